"""Pages that are held, but not in host memory: gets, leases, views, prefetches that load them."""

import pytest

from nexuskv.client.space import Space
from nexuskv.client.store import Store, connect
from nexuskv.errors import Unavailable
from nexuskv.protocol import REPLY, AcquireState, Frame, Type, encode
from nexuskv.types import Kind, PageStatus
from tests.client.conftest import PAGE_BYTES, keys_of, page, quick, room, space_of
from tests.client.fake_daemon import FakeDaemon, Hang

HIT, MISS = PageStatus.HIT, PageStatus.MISS


@pytest.fixture
def keys(space: Space, daemon: FakeDaemon) -> list[bytes]:
    """Eight pages, the first three in host memory, the others elsewhere."""
    found = keys_of(8)
    space.put(found, from_=[page(n) for n in range(8)])
    daemon.far = set(found[3:])
    return found


def sent(daemon: FakeDaemon, kind: Type) -> list[list[object]]:
    with daemon.lock:
        return [body for seen, _, body in daemon.seen if seen is kind]


def parts_back(daemon: FakeDaemon) -> list[bytes]:
    """Keys of the pages given back while their lease went on."""
    parts = [part for body in sent(daemon, Type.RELEASE) for part in body[1]]  # type: ignore[attr-defined]  # a list
    return [part[2] for part in parts]


def test_a_get_loads_what_is_not_in_host_memory(
    space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    into = room(8)
    assert space.get(keys, into=into) == [HIT] * 8
    assert [bytes(item) for item in into] == [page(n) for n in range(8)]


def test_a_get_that_may_not_load_misses(space: Space, keys: list[bytes]) -> None:
    assert space.get(keys, into=room(8), load=False) == [HIT] * 3 + [MISS] * 5


def test_the_time_to_load_is_what_is_left_of_the_transfer(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick(transfer_timeout_s=4.0)) as store:
        space_of(store).get(keys_of(1), into=room(1))
    ((_, _, _, _, wait_ms, load_ms),) = sent(daemon, Type.ACQUIRE)
    assert wait_ms == 0
    assert isinstance(load_ms, int)
    assert 0 < load_ms < 4000


def test_the_time_to_load_is_no_longer_than_the_daemon_lets_an_acquire_wait(
    daemon: FakeDaemon,
) -> None:
    daemon.limits = {"acquire_wait_max_ms": 500}
    with connect(daemon.url, quick(transfer_timeout_s=4.0)) as store:
        space_of(store).get(keys_of(1), into=room(1))
    assert sent(daemon, Type.ACQUIRE)[0][5] == 500


def test_a_chain_passes_through_a_window_that_holds_one_group(
    space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    daemon.ahead = 1
    daemon.far = set(keys)
    into = room(8)
    # The first group is sent before anything can come back, every other one against a release.
    assert space.get(keys, into=into) == [HIT] * 8
    assert [bytes(item) for item in into] == [page(n) for n in range(8)]
    assert parts_back(daemon) == [b"".join(keys[at : at + 2]) for at in (0, 2, 4)]


def test_pages_in_host_memory_are_given_back_before_others_are_loaded(
    space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    daemon.ahead = 0  # the first group needs room too
    assert space.get(keys, into=room(8)) == [HIT] * 8
    assert parts_back(daemon)[0] == b"".join(keys[:3])


def test_a_lease_keeps_what_was_there_at_once_and_gives_back_what_came_later(
    store: Store, space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    lease = store.acquire([(space, keys)], request_id=b"lease", ttl_s=10)
    daemon.ahead = 1
    assert lease.get(space, keys, into=room(8)) == [HIT] * 8
    assert parts_back(daemon) == [b"".join(keys[3:5]), b"".join(keys[5:7])]
    assert list(daemon.leases) == [b"lease"]


def test_groups_that_have_come_together_are_taken_together(
    space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    assert space.get(keys, into=room(8)) == [HIT] * 8  # all three groups were sent at once
    assert parts_back(daemon) == [b"".join(keys[:3])], "no exchange was spent between the groups"


def test_pages_in_host_memory_cost_one_exchange_and_one_copy(
    space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    before = len(daemon.seen)
    assert space.get(keys[:3], into=room(3)) == [HIT] * 3
    assert daemon.kinds()[before:] == [Type.ACQUIRE]


def test_a_page_that_cannot_be_loaded_is_a_miss(
    space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    def one_is_lost(frame: Frame) -> list[bytes]:
        first = daemon.reply(frame)
        last: tuple[object, ...] = (
            1,
            int(AcquireState.DEADLINE),
            0,
            (),
            [(0, 4, daemon_row(daemon, keys[4]), b"")],
        )
        return [first, encode(frame.type + REPLY, frame.request_id, last)]

    daemon.script[Type.ACQUIRE] = one_is_lost
    assert space.get(keys, into=room(8)) == [HIT] * 3 + [MISS, HIT] + [MISS] * 3


def daemon_row(daemon: FakeDaemon, key: bytes) -> bytes:
    far, daemon.far = daemon.far, set()
    row = daemon.descriptors(0, key)
    daemon.far = far
    return row


def test_a_daemon_that_stops_while_it_loads_costs_one_transfer_at_most(
    daemon: FakeDaemon,
) -> None:
    with connect(daemon.url, quick(transfer_timeout_s=0.4, request_timeout_s=0.2)) as store:
        space, keys = space_of(store), keys_of(4)
        space.put(keys, from_=[page(n) for n in range(4)])
        daemon.far = set(keys[1:])
        daemon.ahead = 0  # and nothing is given back by a lease: the next group never comes
        lease = store.acquire([(space, keys)], request_id=b"l", ttl_s=10)
        assert lease.get(space, keys, into=room(4)) == [HIT, MISS, MISS, MISS]


def test_a_corrupt_page_is_reported_by_the_copy_that_was_loaded(
    space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    daemon.flip(keys[6])
    assert space.get(keys, into=room(8))[5:] == [HIT, PageStatus.CORRUPT, HIT]
    space.pin(keys, ttl_s=1.0)  # carries the release in front
    reported = [row for body in sent(daemon, Type.RELEASE) for row in body[2]]  # type: ignore[attr-defined]  # a list
    assert [row[1] for row in reported] == [keys[6]]


def test_a_match_says_which_tier_holds_how_many(
    space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    assert dict(space.match(keys).tier_counts) == {"host": 3, "ssd": 5}


def test_a_lease_on_pages_that_are_all_elsewhere_is_true_and_loads_them(
    store: Store, space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    lease = store.acquire([(space, keys[3:])], request_id=b"far", ttl_s=10)
    assert lease
    assert not lease.held
    assert not lease.renew()
    with connect(daemon.url, quick()) as other:
        read = other.lease(lease.token).get(space_of(other), keys[3:], into=room(5))
        other.ping()
        space_of(other).pin(keys, ttl_s=1.0)  # carries the release in front
        assert daemon.leases == {}, "what nobody else would give back is given back"
    assert read == [HIT] * 5


def test_a_lease_that_may_not_load_counts_host_pages_alone(
    store: Store, space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    lease = store.acquire([(space, keys)], request_id=b"near", ttl_s=10, load=False)
    assert (lease.token_count, lease.matches[0].page_count) == (48, 3)
    assert dict(lease.matches[0].tier_counts) == {"host": 3, "ssd": 0}
    again = store.lease(lease.token)
    assert again.get(space, keys, into=room(8)) == [HIT] * 3 + [MISS] * 5


def test_a_lease_that_may_not_load_counts_only_what_all_chains_have(
    store: Store, space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    wide = store.namespace(
        model="m", dtype="bf16", page_tokens=32, page_bytes=PAGE_BYTES, key_bytes=8
    )
    wide.put(keys_of(4, 100), from_=[page(n) for n in range(4)])
    chains = [(space, keys), (wide, keys_of(4, 100))]
    lease = store.acquire(chains, request_id=b"both", ttl_s=10, load=False)
    # 3 pages of 16 tokens are there; whole pages of both end at 32.
    assert (lease.token_count, [m.page_count for m in lease.matches]) == (32, [2, 1])


def test_a_lease_that_may_not_load_counts_nothing_beside_a_window(
    store: Store, space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    window = store.namespace(
        model="m",
        dtype="bf16",
        page_tokens=16,
        page_bytes=PAGE_BYTES,
        key_bytes=8,
        kind=Kind.WINDOW,
        window_pages=1,
    )
    chains = [(space, keys), (window, keys)]
    lease = store.acquire(chains, request_id=b"kinds", ttl_s=10, load=False)
    assert (lease.token_count, [m.page_count for m in lease.matches]) == (0, [0, 0])


def test_a_view_loads_and_keeps_what_it_shows(
    space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    with space.view(keys) as view:
        assert [None if p is None else bytes(p) for p in view.pages] == [page(n) for n in range(8)]
        assert view.held
        assert parts_back(daemon) == []


def test_a_view_that_may_not_load_shows_host_pages(space: Space, keys: list[bytes]) -> None:
    with space.view(keys, load=False) as view:
        assert [item is not None for item in view.pages] == [True] * 3 + [False] * 5


def test_a_view_shows_no_more_than_the_window_lets_it_hold(daemon: FakeDaemon) -> None:
    narrow = quick(acquire_window_bytes=3 * PAGE_BYTES, acquire_group_bytes=PAGE_BYTES)
    with connect(daemon.url, narrow) as store:
        space, keys = space_of(store), keys_of(8)
        space.put(keys, from_=[page(n) for n in range(8)])
        daemon.far = set(keys)
        daemon.ahead = 1  # more than this is sent only when something comes back: nothing does
        with space.view(keys) as view:
            assert [item is not None for item in view.pages] == [True] * 2 + [False] * 6
            assert view.held


def test_a_prefetch_loads_pages_and_gives_them_back_unread(
    space: Space, daemon: FakeDaemon, keys: list[bytes]
) -> None:
    daemon.ahead = 1
    assert space.prefetch(keys) == 8
    assert daemon.far == set()
    assert parts_back(daemon)[0] == b"".join(keys[:3])
    space.pin(keys, ttl_s=1.0)  # carries the release in front
    assert daemon.leases == {}


def test_a_prefetch_without_a_daemon_brings_nothing(daemon: FakeDaemon) -> None:
    with connect(daemon.url, quick()) as store:
        daemon.stop()
        assert space_of(store).prefetch(keys_of(2)) == 0


def test_a_verify_that_is_not_answered_ends_with_the_transfer(daemon: FakeDaemon) -> None:
    def hang(_: Frame) -> list[bytes]:
        raise Hang

    daemon.script[Type.VERIFY] = hang
    quickly = quick(transfer_timeout_s=0.2, request_timeout_s=5.0)
    with connect(daemon.url, quickly) as store, pytest.raises(Unavailable):
        store.verify(b"n" * 16, b"k" * 8, tier="host")
