"""Leases that outlive a call, waiting gets, renewals, views."""

import threading

import pytest

from nexuskv.client.keeper import Keeper
from nexuskv.client.space import Space
from nexuskv.client.store import Store, connect
from nexuskv.client.terms import Term, Terms
from nexuskv.clock import MonotonicClock
from nexuskv.errors import ConfigError
from nexuskv.protocol import REPLY, AcquireState, Frame, Type, encode
from nexuskv.types import PageStatus
from tests.client.conftest import PAGE_BYTES, keys_of, page, quick, room, space_of, until
from tests.client.fake_daemon import FakeDaemon, Hang

Body = tuple[int, int, int, list[object], list[list[object]]]
HIT, MISS, STALE = PageStatus.HIT, PageStatus.MISS, PageStatus.STALE


def stored(space: Space, count: int) -> list[bytes]:
    keys = keys_of(count)
    space.put(keys, from_=[page(n) for n in range(count)])
    return keys


def test_a_lease_is_read_by_another_store_through_its_token(
    store: Store, space: Space, daemon: FakeDaemon
) -> None:
    keys = stored(space, 3)
    lease = store.acquire([(space, keys)], request_id=b"request", ttl_s=10)
    with connect(daemon.url, quick()) as other:
        into = room(3)
        assert other.lease(lease.token).get(space_of(other), keys, into=into) == [HIT] * 3
    assert [bytes(item) for item in into] == [page(n) for n in range(3)]
    assert (lease.token_count, lease.matches[0].page_count) == (48, 3)


def test_the_same_request_id_is_the_same_lease(
    store: Store, space: Space, daemon: FakeDaemon
) -> None:
    keys = stored(space, 1)
    for _ in range(2):
        assert store.acquire([(space, keys)], request_id=b"same", ttl_s=10)
    assert list(daemon.leases) == [b"same"]


def test_a_lease_taken_again_under_its_name_outlives_the_release_before_it(
    store: Store, space: Space
) -> None:
    keys = stored(space, 1)
    for _ in range(3):
        with store.acquire([(space, keys)], request_id=b"again", ttl_s=10) as lease:
            assert lease.renew()
            assert lease.get(space, keys, into=room(1)) == [HIT]


def test_a_lease_on_nothing_that_is_held_misses(
    store: Store, space: Space, daemon: FakeDaemon
) -> None:
    nothing: tuple[object, ...] = (0, int(AcquireState.COMPLETE), 0, [[0, [0, 0], 0]], [])
    daemon.script[Type.ACQUIRE] = lambda frame: [
        encode(Type.ACQUIRE + REPLY, frame.request_id, nothing)
    ]
    lease = store.acquire([(space, keys_of(1))], request_id=b"nothing", ttl_s=10)
    assert not lease
    assert lease.get(space, keys_of(1), into=room(1)) == [MISS]


@pytest.mark.parametrize("ttl_s", [-1.0, float("nan"), float("inf")])
def test_a_lease_is_not_renewed_for_no_time_at_all(
    store: Store, space: Space, ttl_s: float
) -> None:
    lease = store.acquire([(space, stored(space, 1))], request_id=b"renewed", ttl_s=10)
    with pytest.raises(ConfigError):
        lease.renew(ttl_s=ttl_s)


def test_a_released_lease_is_stale(store: Store, space: Space, daemon: FakeDaemon) -> None:
    keys = stored(space, 1)
    lease = store.acquire([(space, keys)], request_id=b"r", ttl_s=10)
    again = store.lease(lease.token)
    with lease:
        pass
    space.match(keys)  # carries the release, behind it
    store.ping()
    assert daemon.leases == {}
    assert lease.get(space, keys, into=room(1)) == [STALE]
    assert again.get(space, keys, into=room(1)) == [STALE]
    assert not lease.renew()
    assert not again.renew()


def test_a_lease_of_another_run_is_stale(store: Store, space: Space, daemon: FakeDaemon) -> None:
    keys = stored(space, 1)
    lease = store.acquire([(space, keys)], request_id=b"r", ttl_s=10)
    daemon.stop()
    space.match(keys)
    daemon.incarnation = b"next-run"
    daemon.listen()
    until(lambda: store.connected)
    assert lease.get(space, keys, into=room(1)) == [STALE]


def test_a_get_under_a_lease_keeps_it(store: Store, space: Space, daemon: FakeDaemon) -> None:
    keys = stored(space, 1)
    lease = store.acquire([(space, keys)], request_id=b"r", ttl_s=10)
    lease.get(space, keys, into=room(1))
    space.pin(keys, ttl_s=1.0)  # would carry a release in front
    assert list(daemon.leases) == [b"r"]
    assert lease.renew(ttl_s=20)


def test_a_lease_without_a_daemon_is_empty(daemon: FakeDaemon) -> None:
    daemon.stop()
    with connect(daemon.url, quick()) as store:
        space = space_of(store)
        lease = store.acquire([(space, keys_of(1))], request_id=b"r", ttl_s=10)
        assert (bool(lease), lease.token_count, lease.held) == (False, 0, False)
        assert lease.get(space, keys_of(1), into=room(1)) == [PageStatus.UNAVAILABLE]


@pytest.mark.parametrize("request_id", [b"", b"x" * 65], ids=["0", "65"])
def test_a_request_id_has_1_to_64_bytes(store: Store, request_id: bytes) -> None:
    with pytest.raises(ConfigError, match="1-64 bytes"):
        store.acquire([], request_id=request_id, ttl_s=1)


@pytest.mark.parametrize("token", [b"", b"\x00" * 20, b"\x07" + bytes(60)])
def test_bytes_that_are_no_token_are_refused(store: Store, token: bytes) -> None:
    with pytest.raises(ConfigError, match="no lease token"):
        store.lease(token)


def test_a_load_that_outlasts_its_lease_is_stale(daemon: FakeDaemon) -> None:
    # The daemon's answer comes later than the lease lasts, and it grants no renewal.
    def late(_: Frame) -> None:
        threading.Event().wait(0.15)

    with connect(daemon.url, quick(lease_ttl_s=0.1)) as store:
        space = space_of(store)
        keys = stored(space, 1)
        daemon.script[Type.ACQUIRE] = late
        assert space.get(keys, into=room(1)) == [STALE]


def test_a_wait_brings_pages_as_groups_arrive(space: Space, daemon: FakeDaemon) -> None:
    keys = stored(space, 3)
    held = daemon.descriptors(0, b"".join(keys))

    def in_groups(frame: Frame) -> list[bytes]:
        def group(state: int, first: int, *rows: bytes) -> bytes:
            body: Body = (5, state, 0, [], [[0, first, b"".join(rows), b""]])
            return encode(frame.type + REPLY, frame.request_id, body)

        return [
            group(AcquireState.MORE, 0, held[:32], bytes(64)),
            group(AcquireState.MORE, 2, held[64:]),
            group(AcquireState.DEADLINE, 1, bytes(32)),
        ]

    daemon.script[Type.ACQUIRE] = in_groups
    into = room(3)
    assert space.get(keys, into=into, wait_s=5) == [HIT, MISS, HIT]
    assert bytes(into[2]) == page(2)


def test_a_wait_that_is_broken_off_closes_its_connection(
    store: Store, space: Space, daemon: FakeDaemon
) -> None:
    keys = stored(space, 1)

    def endless(frame: Frame) -> list[bytes]:
        body: Body = (5, AcquireState.MORE, 0, [], [[0, 0, b"odd", b""]])
        return [encode(frame.type + REPLY, frame.request_id, body)]

    daemon.script[Type.ACQUIRE] = endless
    assert not any(space.get(keys, into=room(1), wait_s=5))
    del daemon.script[Type.ACQUIRE]
    until(lambda: store.connected)
    assert space.get(keys, into=room(1)) == [HIT]


def test_a_view_shows_the_pages_in_place(space: Space) -> None:
    keys = stored(space, 2)
    with space.view([*keys, b"missing!"]) as view:
        assert [None if p is None else bytes(p) for p in view.pages] == [page(0), page(1), None]
        assert view.pages[0] is not None
        assert view.pages[0].readonly
        assert view.held
    assert view.held
    with pytest.raises(ValueError, match="released"):
        bytes(view.pages[0])


def test_a_view_of_a_page_that_changed_was_not_held(space: Space, daemon: FakeDaemon) -> None:
    keys = stored(space, 2)
    with space.view(keys) as view:
        daemon.reuse(keys[1])
    assert not view.held


def test_a_view_is_renewed_while_it_is_open(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick(lease_ttl_s=0.3)) as store:
        space = space_of(store)
        keys = stored(space, 1)
        with space.view(keys) as view:
            until(lambda: daemon.count(Type.RENEW) >= 3)
            assert view.held
        assert view.held


def test_a_view_whose_renewal_is_refused_was_not_held(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick(lease_ttl_s=0.3)) as store:
        space = space_of(store)
        keys = stored(space, 1)
        with space.view(keys) as view:
            daemon.leases.clear()
            until(lambda: not view.held)
        assert not view.held


def test_a_checked_view_leaves_corrupt_pages_out(space: Space, daemon: FakeDaemon) -> None:
    keys = stored(space, 2)
    daemon.flip(keys[0])
    with space.view(keys, check=True) as view:
        assert [item is None for item in view.pages] == [True, False]


def test_no_more_views_than_configured(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick(views_max=1)) as store:
        space = space_of(store)
        keys = stored(space, 1)
        with space.view(keys), space.view(keys) as second:
            assert second.pages == [None]
        with space.view(keys) as third:
            assert third.held


def test_prefetch_leases_and_gives_back(space: Space, daemon: FakeDaemon) -> None:
    keys = stored(space, 1)
    before = len(daemon.seen)
    space.prefetch(keys)
    space.put(keys, from_=[page(0)])
    assert daemon.kinds()[before:] == [Type.ACQUIRE, Type.RELEASE, Type.RESERVE]
    assert daemon.leases == {}


def test_long_calls_are_split_and_chains_continue(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick(client_batch_pages=3)) as store:
        space = space_of(store)
        keys = keys_of(8)
        assert space.put(keys, from_=[page(n) for n in range(8)]) == [PageStatus.STORED] * 8
        commits = [body for kind, _, body in daemon.seen if kind is Type.COMMIT]
        assert [body[1:3] for body in commits] == [[0, b""], [1, keys[2]], [1, keys[5]]]
        into = room(8)
        assert space.get(keys, into=into) == [HIT] * 8
        assert [bytes(item) for item in into] == [page(n) for n in range(8)]
        assert space.pin(keys, ttl_s=1) == 8


def test_a_failure_in_one_part_drops_the_parts_after_it(daemon: FakeDaemon) -> None:
    full = [PageStatus.MISS, PageStatus.NO_SPACE]

    def second_fails(frame: Frame) -> list[bytes] | None:
        if daemon.count(Type.RESERVE) < 2:
            return None
        body = (0, bytes([full[1]]) * 2, bytes(64))
        return [encode(frame.type + REPLY, frame.request_id, body)]

    with connect(daemon.url, quick(client_batch_pages=2)) as store:
        space = space_of(store)
        daemon.script[Type.RESERVE] = second_fails
        statuses = space.put(keys_of(6), from_=[page(n) for n in range(6)])
    wanted = [PageStatus.STORED] * 2 + [PageStatus.NO_SPACE] + [PageStatus.DROPPED] * 3
    assert statuses == wanted


def test_a_chain_longer_than_a_message_is_matched_in_parts(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick(batch_pages_max=3)) as store:
        space = space_of(store)
        keys = keys_of(8)
        space.put(keys[:7], from_=[page(n) for n in range(7)])
        assert space.match(keys).page_count == 7
        with pytest.raises(ConfigError, match="8 pages in one call, at most 3"):
            store.match_all([(space, keys)])


def test_a_term_is_renewed_after_a_third(daemon: FakeDaemon) -> None:
    alarms: list[float] = []
    terms = Terms(wake_by=alarms.append)
    term = Term(1, b"run", ttl_s=30, sent_s=100)
    terms.watch(term)
    assert alarms == [110]
    assert (terms.due(109), terms.due(110)) == ([], [term])
    term.renewed(ttl_s=30, sent_s=110)
    assert (terms.due(119), terms.next_s()) == ([], 120)
    assert term.held_at(140)
    assert not term.held_at(140.1)
    term.lost = True
    assert not term.held_at(111)


def test_the_keeper_comes_when_it_is_called_and_ends() -> None:
    done = threading.Event()

    def chores() -> float:
        done.set()
        return float("inf")

    keeper = Keeper(chores, clock=MonotonicClock())
    keeper.wake_by(MonotonicClock().now())
    assert done.wait(5)
    assert keeper.close(timeout_s=5)
    assert keeper.close(timeout_s=5)


def test_a_slow_daemon_costs_a_waiting_get_its_wait_and_one_timeout(daemon: FakeDaemon) -> None:
    def hang(_: Frame) -> list[bytes]:
        raise Hang

    with connect(
        daemon.url, quick(request_timeout_s=0.2, backoff_min_s=5.0, backoff_max_s=5.0)
    ) as store:
        space = space_of(store)
        stored(space, 1)
        daemon.script[Type.ACQUIRE] = hang
        assert space.get(keys_of(1), into=room(1), wait_s=0.1) == [PageStatus.UNAVAILABLE]
        assert not store.connected


def test_memory_that_does_not_fit_is_refused_under_a_lease(store: Store, space: Space) -> None:
    lease = store.acquire([(space, keys_of(1))], request_id=b"r", ttl_s=1)
    with pytest.raises(ConfigError, match="pages have"):
        lease.get(space, keys_of(1), into=[bytearray(PAGE_BYTES - 1)])
