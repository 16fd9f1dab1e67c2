"""A daemon that lies, breaks off, is silent or away: statuses, bounded, and back again."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nexuskv.client.space import Space
from nexuskv.client.store import Store, connect
from nexuskv.errors import (
    ConfigError,
    DaemonUnreachable,
    NexusError,
    OutOfSpace,
    ProtocolError,
    Refused,
    Unavailable,
)
from nexuskv.protocol import REPLY, Frame, Type, encode, encode_error
from nexuskv.types import Match, PageStatus
from tests.client.conftest import keys_of, page, quick, room, space_of, until
from tests.client.fake_daemon import FakeDaemon, Hang, HangUp

UNAVAILABLE = [PageStatus.UNAVAILABLE]


def hang(_: Frame) -> list[bytes]:
    raise Hang


def answer(kind: int, *body: object, shift: int = 0) -> Callable[[Frame], list[bytes]]:
    return lambda frame: [encode(kind, frame.request_id + shift, body)]


MALFORMED = [
    pytest.param(lambda _: [b"\xc1garbage"], id="no msgpack"),
    pytest.param(lambda _: [b""], id="empty"),
    pytest.param(lambda _: [encode(5, 1, ())[:-2]], id="cut short"),
    pytest.param(answer(Type.MATCH + REPLY, 0, []), id="another type"),
    pytest.param(answer(Type.ACQUIRE + REPLY, 1, 1, 0, [], [], shift=5), id="another request"),
    pytest.param(answer(Type.ACQUIRE + REPLY, 1, 1), id="fields missing"),
    pytest.param(answer(Type.ACQUIRE + REPLY, 1, 9, 0, [], []), id="unknown state"),
    pytest.param(answer(Type.ACQUIRE + REPLY, 1, 1, 0, [], [[0, 0]]), id="run of two fields"),
    pytest.param(answer(Type.ACQUIRE + REPLY, 1, 1, 0, [], [[0, 9, b"x" * 32, b""]]), id="far run"),
    pytest.param(answer(Type.ACQUIRE + REPLY, 1, 1, 0, [], [[0, 0, b"x" * 31, b""]]), id="odd run"),
    pytest.param(
        answer(Type.ACQUIRE + REPLY, 1, 1, 0, [], [[0, 0, b"\xff" * 32, b""]]), id="wild descriptor"
    ),
]


@pytest.mark.parametrize("reply", MALFORMED)
def test_a_malformed_answer_is_unavailable_and_never_raises(
    space: Space, daemon: FakeDaemon, reply: Callable[[Frame], list[bytes]]
) -> None:
    keys = keys_of(1)
    space.put(keys, from_=[page(0)])
    daemon.script[Type.ACQUIRE] = reply
    assert space.get(keys, into=room(1)) == UNAVAILABLE


@pytest.mark.parametrize("last", [b"", b"\x40", b"\x40\0\0\0abc"], ids=["none", "head", "body"])
def test_a_daemon_that_closes_in_its_answer_is_unavailable(
    space: Space, daemon: FakeDaemon, last: bytes
) -> None:
    def hang_up(_: Frame) -> list[bytes]:
        raise HangUp(last)

    daemon.script[Type.ACQUIRE] = hang_up
    assert space.get(keys_of(1), into=room(1)) == UNAVAILABLE


def test_an_answer_longer_than_a_message_is_refused(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick(message_bytes_max=65536)) as store:
        daemon.script[Type.STATS] = answer(Type.STATS + REPLY, {"x": "y" * 70000})
        with pytest.raises(ProtocolError):
            store.stats()


def test_another_version_leaves_the_store_away(daemon: FakeDaemon) -> None:
    error = encode_error(0, ProtocolError("protocol version 0, this side speaks 9"))
    daemon.script[Type.HELLO] = lambda _: [error]
    with connect(daemon.url, quick()) as store:
        assert not store.connected
        assert space_of(store).get(keys_of(1), into=room(1)) == UNAVAILABLE


def test_nobody_there_is_a_miss_at_connect(tmp_path: Path) -> None:
    with connect(f"unix://{tmp_path}/nobody.sock", quick()) as store:
        space = space_of(store)
        assert space.get(keys_of(2), into=room(2)) == UNAVAILABLE * 2
        assert space.put(keys_of(1), from_=[page(0)]) == UNAVAILABLE
        assert space.match(keys_of(1)) == Match(0)
        assert store.match_all([(space, keys_of(1))]).token_count == 0
        space.prefetch(keys_of(1))
        with space.view(keys_of(2)) as view:
            assert (view.pages, view.held) == ([None, None], False)


@pytest.mark.parametrize(
    "ask",
    [
        lambda store, _: store.ping(),
        lambda store, _: store.stats(),
        lambda store, _: list(store.inspect("sessions")),
        lambda _, space: space.clear(),
        lambda _, space: space.remove(keys_of(1)),
        lambda _, space: space.pin(keys_of(1), ttl_s=1.0),
    ],
    ids=["ping", "stats", "inspect", "clear", "remove", "pin"],
)
def test_people_are_told_that_the_daemon_is_away(
    tmp_path: Path, ask: Callable[[Store, Space], object]
) -> None:
    with (
        connect(f"unix://{tmp_path}/nobody.sock", quick()) as store,
        pytest.raises(DaemonUnreachable),
    ):
        ask(store, space_of(store))


def test_silence_costs_one_timeout_and_then_nothing(daemon: FakeDaemon) -> None:
    with connect(
        daemon.url, quick(request_timeout_s=0.3, backoff_min_s=5.0, backoff_max_s=5.0)
    ) as store:
        space = space_of(store)
        space.put(keys_of(1), from_=[page(0)])
        daemon.script[Type.ACQUIRE] = hang
        assert space.get(keys_of(1), into=room(1)) == UNAVAILABLE
        asked = len(daemon.seen)
        assert [space.get(keys_of(1), into=room(1)) for _ in range(50)] == [UNAVAILABLE] * 50
        assert len(daemon.seen) == asked
        assert not store.connected


def test_the_store_comes_back_by_itself(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick(request_timeout_s=0.3)) as store:
        space = space_of(store)
        space.put(keys_of(1), from_=[page(0)])
        daemon.script[Type.ACQUIRE] = hang
        space.get(keys_of(1), into=room(1))
        del daemon.script[Type.ACQUIRE]
        until(lambda: store.connected)
        assert space.get(keys_of(1), into=room(1)) == [PageStatus.HIT]
        assert store.counters["reconnects"] == 1


def test_a_daemon_that_returns_as_another_run_is_found(daemon: FakeDaemon, store: Store) -> None:
    space = space_of(store)
    space.put(keys_of(1), from_=[page(0)])
    daemon.stop()
    assert space.get(keys_of(1), into=room(1)) == UNAVAILABLE
    daemon.incarnation = b"next-run"
    daemon.listen()
    until(lambda: store.connected)
    assert space.get(keys_of(1), into=room(1)) == [PageStatus.HIT]


def test_releases_of_a_past_run_are_never_sent(daemon: FakeDaemon, store: Store) -> None:
    space = space_of(store)
    space.put(keys_of(1), from_=[page(0)])
    space.get(keys_of(1), into=room(1))  # leaves a release behind
    daemon.stop()
    space.match(keys_of(1))
    daemon.incarnation = b"next-run"
    daemon.seen.clear()
    daemon.listen()
    until(lambda: store.connected)
    space.match(keys_of(1))
    assert Type.RELEASE not in daemon.kinds()


REFUSALS = [
    pytest.param(OutOfSpace("quarantine is full"), PageStatus.NO_SPACE, id="out of space"),
    pytest.param(Refused("this session may not reserve"), PageStatus.UNAVAILABLE, id="refused"),
    pytest.param(Unavailable("the worker is away"), PageStatus.UNAVAILABLE, id="unavailable"),
]


@pytest.mark.parametrize(("error", "status"), REFUSALS)
def test_a_refused_reservation_is_a_status(
    space: Space, daemon: FakeDaemon, error: NexusError, status: PageStatus
) -> None:
    daemon.script[Type.RESERVE] = lambda frame: [encode_error(frame.request_id, error)]
    statuses = space.put(keys_of(2), from_=[page(0), page(1)])
    assert statuses[0] is status
    assert not any(statuses)


def test_a_refusal_keeps_the_connection(space: Space, daemon: FakeDaemon) -> None:
    daemon.script[Type.ACQUIRE] = lambda frame: [encode_error(frame.request_id, Refused("no"))]
    accepted = daemon.accepted
    space.get(keys_of(1), into=room(1))
    del daemon.script[Type.ACQUIRE]
    assert space.get(keys_of(1), into=room(1)) == [PageStatus.MISS]
    assert daemon.accepted == accepted


def test_pages_too_large_for_the_daemon_are_a_config_error_at_put(
    space: Space, daemon: FakeDaemon
) -> None:
    too_large = ConfigError("a page of 6000 bytes, a chunk has 4096")
    daemon.script[Type.OPEN_NAMESPACE] = lambda f: [encode_error(f.request_id, too_large)]
    with pytest.raises(ConfigError, match="a chunk has 4096"):
        space.put(keys_of(1), from_=[page(0)])
    assert space.get(keys_of(1), into=room(1)) == UNAVAILABLE


def test_a_commit_without_an_answer_is_unavailable_and_ends_the_session(
    daemon: FakeDaemon,
) -> None:
    with connect(daemon.url, quick(request_timeout_s=0.3)) as store:
        space = space_of(store)
        space.put(keys_of(1), from_=[page(0)])
        daemon.script[Type.COMMIT] = hang
        statuses = space.put(keys_of(2), from_=[page(0), page(1)])
        assert statuses == [PageStatus.EXISTS, PageStatus.UNAVAILABLE]
        assert Type.ABORT not in daemon.kinds()


def test_a_clear_during_the_put_drops_its_pages(space: Space, daemon: FakeDaemon) -> None:
    daemon.script[Type.COMMIT] = lambda frame: [
        encode(frame.type + REPLY, frame.request_id, (bytes([PageStatus.DROPPED]) * 2,))
    ]
    assert space.put(keys_of(2), from_=[page(0), page(1)]) == [PageStatus.DROPPED] * 2


def test_a_put_that_cannot_copy_aborts_its_reservation(space: Space, daemon: FakeDaemon) -> None:
    def wild(frame: Frame) -> list[bytes]:
        body = (1, bytes([PageStatus.MISS]), b"\xff" * 32)
        return [encode(frame.type + REPLY, frame.request_id, body)]

    daemon.script[Type.RESERVE] = wild
    assert space.put(keys_of(1), from_=[page(0)]) == UNAVAILABLE
    assert daemon.kinds()[-1] is Type.ABORT


def test_busy_connections_are_waited_for_and_no_longer_than_the_call_may_take(
    daemon: FakeDaemon,
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow(_: Frame) -> None:
        reached.set()
        go_on.wait(10)

    config = quick(client_connections=1, transfer_timeout_s=0.3, request_timeout_s=5.0)
    with connect(daemon.url, config) as store:
        space = space_of(store)
        daemon.script[Type.STATS] = slow
        busy = threading.Thread(target=store.stats)
        busy.start()
        assert reached.wait(5)
        assert space.get(keys_of(1), into=room(1)) == UNAVAILABLE
        assert store.connected  # a busy pool says nothing about the daemon
        go_on.set()
        busy.join()


def test_no_more_connections_than_configured(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick(client_connections=2)) as store:
        space = space_of(store)
        space.put(keys_of(3), from_=[page(n) for n in range(3)])
        done: list[list[PageStatus]] = []
        threads = [
            threading.Thread(target=lambda: done.append(space.get(keys_of(3), into=room(3))))
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [[PageStatus.HIT] * 3] * 12
        assert daemon.accepted <= 2


def test_close_twice_is_close_and_calls_after_it_miss(daemon: FakeDaemon) -> None:
    store = connect(daemon.url, quick())
    space = space_of(store)
    store.close()
    store.close()
    assert space.get(keys_of(1), into=room(1)) == UNAVAILABLE


def test_close_sends_the_releases_that_wait(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick()) as store:
        space = space_of(store)
        space.put(keys_of(1), from_=[page(0)])
        space.get(keys_of(1), into=room(1))
    assert daemon.leases == {}


def test_releases_are_sent_alone_after_a_while(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick(release_delay_s=0.01)) as store:
        space = space_of(store)
        space.put(keys_of(1), from_=[page(0)])
        space.get(keys_of(1), into=room(1))
        until(lambda: store.counters["releases_sent_alone"] == 1)
        assert daemon.leases == {}


def test_a_store_that_was_never_closed_warns(daemon: FakeDaemon) -> None:
    store = connect(daemon.url, quick())
    process = store.process
    with pytest.warns(ResourceWarning, match="never closed"):
        del store
    process.close()


@pytest.mark.parametrize("url", ["", "http://x", "unix://relative", "tcp://host", "/path"])
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        connect(url or "nothing", quick())


def test_errors_are_logged_once(
    space: Space, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.script[Type.ACQUIRE] = lambda frame: [encode_error(frame.request_id, Refused("no"))]
    for _ in range(5):
        space.get(keys_of(1), into=room(1))
    assert len([r for r in caplog.records if r.name == "nexuskv.client"]) == 1


def test_an_error_that_belongs_to_no_request_closes_the_session(
    store: Store, daemon: FakeDaemon
) -> None:
    daemon.script[Type.PING] = lambda _: [encode_error(0, Refused("not to you"))]
    with pytest.raises(ProtocolError):
        store.ping()
