"""Making room: eviction keeps chains whole, memory moves between page sizes, bounds hold."""

import itertools
import random
from pathlib import Path

import pytest

from nexuskv.protocol import Type
from nexuskv.types import PageStatus
from tests.control.conftest import StartRig
from tests.control.raw import KIB, MIB, PAGE_BYTES, RawLocal, chain, is_status
from tests.control.rig import Rig

STORED, EXISTS, NO_SPACE = PageStatus.STORED, PageStatus.EXISTS, PageStatus.NO_SPACE
POOL_PAGES = 64


def held_pages(client: RawLocal, space: int, keys: list[bytes]) -> set[bytes]:
    """Keys whose pages are held, wherever they are in the chain."""
    group = client.acquire(space, keys, request=b"look", ttl_ms=1)
    client.release(group.lease)
    return {keys[at] for at in group.pages()}


def test_pressure_keeps_every_surviving_page_reachable(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    rng = random.Random(5)
    stems = [chain(f"stem {at}", 6) for at in range(6)]
    chains = [
        stem[: rng.randint(1, 6)] + chain(f"{at} {branch}", rng.randint(1, 8))
        for at, stem in enumerate(stems)
        for branch in range(6)
    ]
    for keys in chains * 2:
        client.put(space, keys)
        victim = rng.choice(chains)
        client.match(space, victim)
        for other in chains:
            length = client.match(space, other)
            assert held_pages(client, space, other) == set(other[:length])
    assert rig.counter("evicted_pages") > 0


def test_the_least_recently_used_chain_goes_first(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    old, young = chain("old", 32), chain("young", 32)
    client.put(space, old)
    client.put(space, young)
    client.match(space, old)
    client.put(space, chain("new", 32))
    assert (client.match(space, old), client.match(space, young)) == (32, 0)


def test_growing_a_chain_does_not_evict_what_it_grows_from(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", POOL_PAGES + 20)
    client.put(space, keys[:POOL_PAGES])
    reservation, statuses, _ = client.reserve(space, keys)
    assert statuses == bytes([EXISTS] * POOL_PAGES + [NO_SPACE] * 20)
    assert reservation == 0
    assert client.match(space, keys) == POOL_PAGES


def test_growing_the_coldest_chain_evicts_others(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 40)
    client.put(space, keys[:30])
    client.put(space, chain("b", 34))
    client.put(space, keys)
    assert client.match(space, keys) == 40


@pytest.mark.parametrize("count", [POOL_PAGES + 1, 10 * POOL_PAGES])
def test_a_reserve_of_more_than_the_store_gets_what_fits(rig: Rig, count: int) -> None:
    client = rig.local()
    space = client.open()
    client.put(space, chain("before", 10))
    statuses = client.put(space, chain("a", count))
    assert statuses == bytes([STORED] * POOL_PAGES + [NO_SPACE] * (count - POOL_PAGES))
    assert client.match(space, chain("a", count)) == POOL_PAGES
    assert client.counter("no_space_pages") == count - POOL_PAGES


def test_a_pinned_page_is_evicted_only_when_nothing_else_can_be(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    client.put(space, chain("kept", 8))
    assert client.call(Type.PIN, space, b"".join(chain("kept", 9)), 60_000) == [8]
    client.put(space, chain("b", 40))
    client.put(space, chain("c", 40))
    assert client.match(space, chain("kept", 8)) == 8
    client.put(space, chain("d", POOL_PAGES))
    assert client.match(space, chain("kept", 8)) == 0


def test_a_pin_ends_by_its_time(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    client.put(space, chain("kept", 8))
    client.call(Type.PIN, space, b"".join(chain("kept", 8)), 1000)
    rig.advance(1.1)
    client.put(space, chain("b", POOL_PAGES))
    assert client.match(space, chain("kept", 8)) == 0


def test_an_unpinned_page_is_evictable_again(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), b"".join(chain("kept", 8))
    client.put(space, chain("kept", 8))
    client.call(Type.PIN, space, keys, 60_000)
    assert client.call(Type.UNPIN, space, keys) == [8]
    client.put(space, chain("b", 60))
    assert client.match(space, chain("kept", 8)) == 4


def test_a_namespace_over_its_cap_evicts_its_own_pages_only(start_rig: StartRig) -> None:
    rig = start_rig(namespace_bytes_max=16 * PAGE_BYTES)
    client = rig.local()
    one, two = client.open(model="one"), client.open(model="two")
    client.put(one, chain("a", 16))
    client.put(two, chain("a", 16))
    for name in ("b", "c", "d"):
        assert is_status(client.put(two, chain(name, 16)), STORED)
    assert client.match(one, chain("a", 16)) == 16
    assert rig.gauges()["used_bytes"] == 32 * PAGE_BYTES


def test_a_batch_over_the_cap_gets_what_the_cap_allows(start_rig: StartRig) -> None:
    client = start_rig(namespace_bytes_max=16 * PAGE_BYTES).local()
    statuses = client.put(client.open(), chain("a", 20))
    assert statuses == bytes([STORED] * 16 + [NO_SPACE] * 4)


def test_fragments_beyond_their_limit_are_evicted(start_rig: StartRig) -> None:
    rig = start_rig(fragments_max=4)
    client = rig.local()
    space = client.open()
    client.put(space, chain("whole", 4))
    for at in range(10):
        client.put(space, chain(f"piece {at}", 2)[1:], unknown=True)
    assert client.stats()["index"]["fragments"] == 4
    assert client.match(space, chain("whole", 4)) == 4


def test_removing_pages_that_leave_many_fragments_keeps_the_limit(start_rig: StartRig) -> None:
    rig = start_rig(fragments_max=4)
    client = rig.local()
    space, keys = client.open(), chain("a", 20)
    client.put(space, keys)
    client.call(Type.REMOVE, space, b"".join(keys[::2]))
    assert client.stats()["index"]["fragments"] <= 4


# --- page sizes


def test_a_second_page_size_costs_at_most_two_chunks_of_pages(rig: Rig) -> None:
    client = rig.local()
    small, large = client.open(), client.open(page_bytes=256 * KIB)
    for at in range(8):
        client.put(small, chain(str(at), 8))
    assert is_status(client.put(large, chain("a", 1)), STORED)
    assert rig.counter("chunks_moved") == 1
    assert rig.counter("evicted_pages") <= 2 * MIB // PAGE_BYTES


def test_the_coldest_chunk_is_the_one_given_away(rig: Rig) -> None:
    client = rig.local()
    small, large = client.open(), client.open(page_bytes=MIB)
    names = [str(at) for at in range(4)]
    for name in names:  # one chain a chunk
        client.put(small, chain(name, 16))
    for name in ("2", "0", "1"):
        client.match(small, chain(name, 16))
    client.put(large, chain("a", 1))
    assert [client.match(small, chain(name, 16)) for name in names] == [16, 16, 16, 0]


def test_a_chunk_with_leased_pages_is_never_given_away(rig: Rig) -> None:
    client = rig.local()
    small, large = client.open(), client.open(page_bytes=MIB)
    for at in range(4):
        client.put(small, chain(str(at), 16))
        client.acquire(small, chain(str(at), 16)[:1], request=b"%d" % at)
    assert is_status(client.put(large, chain("a", 1)), NO_SPACE)
    assert [client.match(small, chain(str(at), 16)) for at in range(4)] == [16] * 4


def test_a_chunk_with_slots_being_written_is_never_given_away(rig: Rig) -> None:
    client = rig.local()
    small, large = client.open(), client.open(page_bytes=MIB)
    reserved = [client.reserve(small, chain(str(at), 16))[0] for at in range(4)]
    assert is_status(client.put(large, chain("a", 1)), NO_SPACE)
    assert all(is_status(client.commit(number, 16), STORED) for number in reserved)


def test_an_empty_chunk_of_another_size_is_taken_before_any_page_goes(rig: Rig) -> None:
    client = rig.local()
    small, large = client.open(), client.open(page_bytes=MIB)
    for at in range(4):
        client.put(small, chain(str(at), 16))
    client.call(Type.REMOVE, small, b"".join(chain("2", 16)))
    client.put(large, chain("a", 1))
    assert rig.counter("evicted_pages") == 0


def test_a_page_size_in_use_takes_chunks_from_one_that_is_not(rig: Rig) -> None:
    client = rig.local()
    cold, hot = client.open(), client.open(page_bytes=128 * KIB)
    client.put(cold, chain("cold", POOL_PAGES))
    for at in range(60):
        client.put(hot, chain(f"hot {at}", 4))
    used = {row[1]: row[2] for row in client.inspect("chunks") if row[2]}
    assert set(used) == {128 * KIB}


def test_many_page_sizes_share_the_store(start_rig: StartRig) -> None:
    rig = start_rig(host_memory=8 * MIB)
    client = rig.local()
    sizes = [4096, 10_000, 65_536, 65_537, 262_144, MIB]
    spaces = [client.open(page_bytes=size) for size in sizes]
    for round_ in range(4):
        for space in spaces:
            statuses = client.put(space, chain(f"{round_}", 3))
            assert is_status(statuses, STORED)
            rig.check_accounts()


def test_a_page_of_the_chunks_size_is_stored(rig: Rig) -> None:
    client = rig.local()
    assert is_status(client.put(client.open(page_bytes=MIB), chain("a", 4)), STORED)


def test_usage_adds_up_through_everything_that_can_happen(rig: Rig) -> None:
    rng = random.Random(11)
    client = rig.local()
    spaces = [client.open(page_bytes=size) for size in (PAGE_BYTES, 100_000)]
    reservations: list[tuple[int, int]] = []
    for step in range(150):
        space, name = rng.choice(spaces), str(rng.randint(0, 12))
        keys = chain(name, rng.randint(1, 12))
        action = rng.randint(0, 7)
        if action <= 2:
            reservation, _, _ = client.reserve(space, keys)
            if reservation:
                reservations.append((reservation, len(keys)))
        elif action == 3 and reservations:
            number, count = reservations.pop(rng.randrange(len(reservations)))
            client.commit(number, count, done=bytes(rng.choices((0, 1), k=count)))
        elif action == 4 and reservations:
            client.call(Type.ABORT, reservations.pop()[0])
        elif action == 5:
            client.acquire(space, keys, request=name.encode(), ttl_ms=3000)
        elif action == 6:
            client.call(Type.REMOVE, space, b"".join(keys[::3]))
        else:
            rig.advance(0.7)
        if step % 5 == 0:
            rig.check_accounts()


# --- supply of memory


def test_a_filesystem_that_fills_up_lowers_capacity_and_serves_on(start_rig: StartRig) -> None:
    rig = start_rig(chunks_to_be_had=3)
    client = rig.local()
    space = client.open()
    assert client.put(space, chain("a", POOL_PAGES)).count(STORED) == 48
    assert client.match(space, chain("a", POOL_PAGES)) == 48
    gauges = rig.gauges()
    assert (gauges["capacity_bytes"], gauges["populated_bytes"]) == (3 * MIB, 3 * MIB)
    assert rig.counter("chunks_failed") == 1


def test_a_filesystem_without_any_room_refuses_puts_and_answers_everything_else(
    start_rig: StartRig,
) -> None:
    client = start_rig(chunks_to_be_had=0).local()
    space = client.open()
    assert is_status(client.put(space, chain("a", 2)), NO_SPACE)
    assert client.match(space, chain("a", 2)) == 0


def test_a_store_of_one_chunk_serves_sizes_one_after_another(start_rig: StartRig) -> None:
    client = start_rig(host_memory=MIB).local()
    spaces = [client.open(page_bytes=size) for size in (PAGE_BYTES, MIB, 8192)]
    for at, space in enumerate(itertools.chain(spaces, spaces)):
        assert is_status(client.put(space, chain(str(at), 1)), STORED)


def test_the_segment_lies_where_it_was_told_to(rig: Rig) -> None:
    assert Path(rig.tier.segments()[0].data_path).is_relative_to(rig.config.segment_dir)
