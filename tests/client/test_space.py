"""Puts, gets and matches against a scripted daemon with real memory."""

import pytest

import nexuskv
from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.dataplane.batch import Regions
from nexuskv.errors import ConfigError
from nexuskv.protocol import Type
from nexuskv.types import PageStatus
from tests.client.conftest import PAGE_BYTES, keys_of, page, room
from tests.client.fake_daemon import FakeDaemon


def test_a_put_is_got_back_byte_by_byte(space: Space) -> None:
    keys, pages = keys_of(5), [page(n) for n in range(5)]
    assert space.put(keys, from_=pages) == [PageStatus.STORED] * 5
    into = room(5)
    assert space.get(keys, into=into) == [PageStatus.HIT] * 5
    assert [bytes(item) for item in into] == pages


def test_a_page_may_be_several_regions_on_both_sides(space: Space) -> None:
    (key,) = keys_of(1)
    whole = page(3)
    space.put([key], from_=[[whole[:10], whole[10:4000], whole[4000:]]])
    parts = [bytearray(5000), bytearray(PAGE_BYTES - 5000)]
    assert space.get([key], into=[parts]) == [PageStatus.HIT]
    assert b"".join(parts) == whole


def test_a_missing_page_is_a_miss_and_leaves_its_memory(space: Space) -> None:
    keys = keys_of(3)
    space.put(keys[:1], from_=[page(0)])
    into = room(3)
    assert space.get(keys, into=into) == [PageStatus.HIT, PageStatus.MISS, PageStatus.MISS]
    assert into[1] == bytes(PAGE_BYTES)


def test_a_second_put_finds_the_pages_there(space: Space) -> None:
    keys, pages = keys_of(2), [page(0), page(1)]
    space.put(keys[:1], from_=pages[:1])
    assert space.put(keys, from_=pages) == [PageStatus.EXISTS, PageStatus.STORED]


def test_a_get_is_one_exchange(space: Space, daemon: FakeDaemon) -> None:
    keys = keys_of(4)
    space.put(keys, from_=[page(n) for n in range(4)])
    before = len(daemon.seen)
    space.get(keys, into=room(4))
    assert daemon.kinds()[before:] == [Type.ACQUIRE]


def test_a_put_is_two_exchanges(space: Space, daemon: FakeDaemon) -> None:
    space.put(keys_of(1), from_=[page(0)])
    before = len(daemon.seen)
    space.put(keys_of(4, 10), from_=[page(n) for n in range(4)])
    assert daemon.kinds()[before:] == [Type.RESERVE, Type.COMMIT]


def test_a_release_rides_in_front_of_a_put(space: Space, daemon: FakeDaemon) -> None:
    keys = keys_of(1)
    space.put(keys, from_=[page(0)])
    space.get(keys, into=room(1))
    before = len(daemon.seen)
    space.put(keys, from_=[page(0)])
    assert [(kind, bool(number)) for kind, number, _ in daemon.seen[before:]] == [
        (Type.RELEASE, False),
        (Type.RESERVE, True),
    ]
    assert daemon.leases == {}


def test_a_release_rides_behind_what_must_be_quick(space: Space, daemon: FakeDaemon) -> None:
    keys = keys_of(1)
    space.put(keys, from_=[page(0)])
    space.get(keys, into=room(1))
    before = len(daemon.seen)
    space.match(keys)
    space.put(keys, from_=[page(0)])  # answered after the release was handled
    assert daemon.kinds()[before:] == [Type.MATCH, Type.RELEASE, Type.RESERVE]
    assert daemon.leases == {}


def test_a_match_counts_the_held_prefix(space: Space) -> None:
    keys = keys_of(4)
    space.put(keys[:3], from_=[page(n) for n in range(3)])
    match = space.match(keys)
    assert (match.page_count, dict(match.tier_counts)) == (3, {"host": 3, "ssd": 0})


def test_the_time_to_load_includes_the_copy(space: Space) -> None:
    keys = keys_of(3)
    space.put(keys, from_=[page(n) for n in range(3)])
    daemons_s = 0.001
    assert space.match(keys).load_s > daemons_s


def test_a_flipped_byte_is_corrupt_and_reported(space: Space, daemon: FakeDaemon) -> None:
    keys = keys_of(2)
    space.put(keys, from_=[page(0), page(1)])
    daemon.flip(keys[1])
    assert space.get(keys, into=room(2)) == [PageStatus.HIT, PageStatus.CORRUPT]
    space.pin(keys, ttl_s=1.0)  # carries the release in front
    reported = [body[2] for kind, _, body in daemon.seen if kind is Type.RELEASE]
    held = daemon.pages[0, keys[1]]
    assert reported == [[[0, keys[1], held.checksum, held.generation]]]


def test_a_slot_that_changed_owner_is_stale_and_not_reported(
    space: Space, daemon: FakeDaemon
) -> None:
    keys = keys_of(1)
    space.put(keys, from_=[page(0)])
    daemon.flip(keys[0])
    daemon.reuse(keys[0])
    assert space.get(keys, into=room(1)) == [PageStatus.STALE]
    space.pin(keys, ttl_s=1.0)  # carries the release in front
    assert [body[2] for kind, _, body in daemon.seen if kind is Type.RELEASE] == [[]]


def test_a_key_twice_in_a_get_fills_both(space: Space) -> None:
    (key,) = keys_of(1)
    space.put([key], from_=[page(7)])
    into = room(2)
    assert space.get([key, key], into=into) == [PageStatus.HIT, PageStatus.HIT]
    assert into[0] == into[1] == page(7)


def test_a_key_twice_in_a_put_is_stored_once(space: Space, daemon: FakeDaemon) -> None:
    (key, other) = keys_of(2)
    statuses = space.put([key, key, other], from_=[page(1), page(1), page(2)])
    assert all(statuses)
    assert daemon.next_slot == 2


def test_a_key_twice_with_other_bytes_is_refused_before_anything_is_sent(
    space: Space, daemon: FakeDaemon
) -> None:
    (key,) = keys_of(1)
    before = len(daemon.seen)
    with pytest.raises(ConfigError, match="key 1 is key 0 again"):
        space.put([key, key], from_=[page(1), page(2)])
    assert len(daemon.seen) == before


BAD = [
    pytest.param([b"seven77"], [bytearray(PAGE_BYTES)], "key 0 has 7 bytes", id="short key"),
    pytest.param([b"x" * 8], [], "1 keys, but memory for 0", id="no memory"),
    pytest.param([b"x" * 8], [bytearray(9)], "item 0 has 9 bytes, pages have", id="small"),
    pytest.param([b"x" * 8], ["text"], "item 0 is no memory", id="no buffer"),
    pytest.param(
        [b"x" * 8], [memoryview(bytearray(2 * PAGE_BYTES))[::2]], "not contiguous", id="strided"
    ),
]


@pytest.mark.parametrize(("keys", "memory", "message"), BAD)
@pytest.mark.parametrize("way", ["get", "put"])
def test_a_callers_mistake_raises_before_anything_is_sent(
    space: Space,
    daemon: FakeDaemon,
    keys: list[bytes],
    memory: list[Regions],
    message: str,
    way: str,
) -> None:
    before = len(daemon.seen)
    with pytest.raises(ConfigError, match=message):
        space.get(keys, into=memory) if way == "get" else space.put(keys, from_=memory)
    assert len(daemon.seen) == before


def test_a_read_only_destination_is_refused(space: Space) -> None:
    with pytest.raises(ConfigError, match="item 0 is read-only"):
        space.get(keys_of(1), into=[bytes(PAGE_BYTES)])


def test_destinations_that_overlap_are_refused(space: Space) -> None:
    keys = keys_of(2)
    space.put(keys, from_=[page(0), page(1)])
    memory = bytearray(PAGE_BYTES)
    with pytest.raises(ConfigError, match="overlap"):
        space.get(keys, into=[memory, memory])


def test_nothing_to_do_asks_nobody(space: Space, daemon: FakeDaemon) -> None:
    before = len(daemon.seen)
    assert space.get([], into=[]) == []
    assert space.put([], from_=[]) == []
    assert space.match([]).page_count == 0
    assert len(daemon.seen) == before


PARENTS = [
    pytest.param(None, [0, b""], id="root"),
    pytest.param(nexuskv.UNKNOWN, [2, b""], id="unknown"),
    pytest.param(b"parentxx", [1, b"parentxx"], id="key"),
]


@pytest.mark.parametrize(("parent", "sent"), PARENTS)
def test_a_commit_names_the_parent(
    space: Space, daemon: FakeDaemon, parent: object, sent: list[object]
) -> None:
    space.put(keys_of(1), from_=[page(0)], parent=parent)
    (body,) = [body for kind, _, body in daemon.seen if kind is Type.COMMIT]
    assert body[1:3] == sent


@pytest.mark.parametrize("parent", [b"short", 5], ids=["length", "type"])
def test_a_bad_parent_is_refused(space: Space, parent: object) -> None:
    with pytest.raises(ConfigError):
        space.put(keys_of(1), from_=[page(0)], parent=parent)


def test_no_space_drops_the_rest_of_the_chain(space: Space, daemon: FakeDaemon) -> None:
    count = 600  # 2 slots of 4096 a page: 512 fit
    statuses = space.put(keys_of(count), from_=[page(0)] * count)
    assert statuses[:512] == [PageStatus.STORED] * 512
    assert statuses[512] is PageStatus.NO_SPACE
    assert set(statuses[513:]) == {PageStatus.DROPPED}


def test_counters_tell_what_happened(space: Space, store: Store, daemon: FakeDaemon) -> None:
    keys = keys_of(3)
    space.put(keys[:2], from_=[page(0), page(1)])
    daemon.flip(keys[0])
    space.get(keys, into=room(3))
    counters = store.counters
    wanted = {"stored": 2, "hits": 1, "corrupt": 1, "misses": 1}
    assert {name: counters[name] for name in wanted} == wanted
    assert counters["bytes_in"] == PAGE_BYTES
