"""Loading pages from the ssd: windows, shared loads, faults; and room in host memory for them."""

import pytest

from nexuskv.protocol import AcquireState, Type
from nexuskv.tiers.record import SlotState
from nexuskv.types import FAR_PLACES, PageStatus
from nexuskv.worker.commands import CopyIn, CopyOut, DropCopies
from tests.control.conftest import StartTiers
from tests.control.raw import PAGE_BYTES, Group, RawLocal, chain, is_status
from tests.control.two_tiers import TwoTiers, page_of

MORE, COMPLETE = AcquireState.MORE, AcquireState.COMPLETE
DEADLINE, ABORTED = AcquireState.DEADLINE, AcquireState.ABORTED
HOST_PAGES = 64


def put_long(two: TwoTiers, client: RawLocal, space: int, keys: list[bytes]) -> None:
    """Store a chain that may be longer than host memory; all of it has copies afterwards."""
    for at in range(0, len(keys), 16):
        two.put(client, space, keys[at : at + 16], parent=keys[at - 1] if at else None)
        two.settle()


def far_pages(two: TwoTiers, client: RawLocal, space: int, keys: list[bytes]) -> None:
    """Store pages and push them out of host memory."""
    put_long(two, client, space, keys)
    put_long(two, client, space, chain("others", HOST_PAGES))
    tiers = two.tiers_of(client)
    assert all(tiers[key] == {"ssd"} for key in keys)


def all_groups(two: TwoTiers, client: RawLocal, keys: list[bytes], group: Group) -> list[Group]:
    groups = [group]
    while groups[-1].state is MORE:
        groups.append(client.group())
    return groups


def test_a_page_pushed_out_of_memory_is_held_by_its_copy(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 20)
    far_pages(two, client, space, keys)
    body = client.call(Type.MATCH, [[space, b"".join(keys)]])
    assert body[1][0][:2] == [20, [0, 20]]
    assert body[1][0][2] > 0
    assert two.counter("evicted_pages") == 0
    assert two.counter("demoted_pages") >= 20


def test_an_acquire_that_does_not_load_counts_far_pages_as_held(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 4)
    far_pages(two, client, space, keys)
    group = client.acquire(space, keys)
    assert (group.counts, group.pages(), group.state) == ([4], {}, DEADLINE)
    assert group.lease == 0
    assert not any(isinstance(each, CopyIn) for each in two.fake.seen)


def test_loaded_pages_come_with_their_bytes(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 12)
    far_pages(two, client, space, keys)
    groups = all_groups(two, client, keys, client.acquire(space, keys, load_ms=60_000))
    assert groups[0].pages() == {}
    assert sum(two.check(keys, group) for group in groups) == 12
    assert groups[-1].state is COMPLETE
    tiers = two.tiers_of(client)
    assert all(tiers[key] == {"host", "ssd"} for key in keys)
    client.release(groups[0].lease)


def test_pages_come_in_groups_while_others_are_still_read(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 12)
    far_pages(two, client, space, keys)
    two.fake.held.add(CopyIn)
    assert client.acquire(space, keys, load_ms=60_000).state is MORE
    two.until_asked(CopyIn)
    for _ in range(4):  # four pages of 64 KiB are a group
        two.run(lambda: two.fake.answer_page(0, 0))
    group = client.group()
    assert sorted(group.pages()) == [0, 1, 2, 3]
    assert two.check(keys, group) == 4
    two.run(lambda: two.fake.release())
    while group.state is MORE:
        group = client.group()
    assert group.state is COMPLETE


@pytest.mark.parametrize("length", [HOST_PAGES + 10, 3 * HOST_PAGES])
def test_a_chain_longer_than_host_memory_passes_through_the_window(
    two: TwoTiers, length: int
) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", length)
    put_long(two, client, space, keys)
    assert client.match(space, keys) == length
    assert two.get(client, space, keys) == length
    two.settle()
    assert client.match(space, keys) == length


def test_no_more_is_loaded_than_the_window_and_the_bound_allow(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 40)
    far_pages(two, client, space, keys)
    two.fake.held.add(CopyIn)
    client.acquire(space, keys, load_ms=60_000)
    two.until_asked(CopyIn)
    assert two.gauges()["load_inflight_bytes"] == two.config.load_inflight_bytes
    two.run(lambda: two.fake.release())
    seen = 0
    while seen < 16:
        seen += len(client.group().pages())
    two.turn()
    assert two.gauges()["leased_slots"] == 16  # a window of 1 MiB
    assert two.gauges()["loads_in_flight"] == 0


def test_two_acquires_of_a_page_share_one_load(two: TwoTiers) -> None:
    client, other = two.local(), two.local()
    space, keys = client.open(), chain("a", 4)
    far_pages(two, client, space, keys)
    theirs = other.open()
    two.fake.held.add(CopyIn)
    client.acquire(space, keys, load_ms=60_000)
    other.acquire(theirs, keys, request=b"other", load_ms=60_000)
    two.until_asked(CopyIn)
    two.run(lambda: two.fake.release())
    assert two.check(keys, client.group()) == two.check(keys, other.group()) == 4
    assert two.counter("loads_done") == 4


def test_a_page_in_load_is_no_victim_nor_is_its_copy(start_tiers: StartTiers) -> None:
    two = start_tiers(ssd_capacity=6 * 2**20)
    client, other = two.local(), two.local()
    space, keys = client.open(), chain("a", 4)
    far_pages(two, client, space, keys)
    two.fake.held.add(CopyIn)
    client.acquire(space, keys, load_ms=60_000)
    two.until_asked(CopyIn)
    theirs = other.open()
    for number in range(8):
        two.put(other, theirs, chain(f"press {number}", 30))
        two.turn()
    assert client.match(space, keys) == 4
    two.run(lambda: two.fake.release())
    assert two.check(keys, client.group()) == 4
    two.settle()


def test_the_header_names_the_worker_while_a_page_is_loaded(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 1)
    far_pages(two, client, space, keys)
    two.fake.held.add(CopyIn)
    client.acquire(space, keys, load_ms=60_000)
    two.until_asked(CopyIn)
    rows = [row for row in client.inspect("chunks") if row[3]]
    assert sum(row[3] for row in rows) == 1
    (load,) = two.run(lambda: list(two.ssd.loads.under_way()))
    assert two.tier.state_of(load.slot) is SlotState.WRITING
    two.run(lambda: two.fake.release())
    client.group()


def test_a_page_found_corrupt_by_its_load_is_dropped_and_the_rest_comes(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 6)
    far_pages(two, client, space, keys)
    where = next(w for w, page in two.disk.pages.items() if page == page_of(keys[3]))
    two.disk.pages[where] = bytes(PAGE_BYTES)
    groups = all_groups(two, client, keys, client.acquire(space, keys, load_ms=60_000))
    came = {at for group in groups for at in group.pages()}
    assert came == {0, 1, 2, 4, 5}
    assert groups[-1].state is DEADLINE
    two.settle()
    assert keys[3] not in two.tiers_of(client)
    assert where not in two.disk.rows
    assert client.match(space, keys) == 3
    assert two.counter("loads_corrupt") == 1


def test_a_corrupt_page_is_waited_for_until_somebody_commits_it(two: TwoTiers) -> None:
    client, writer = two.local(), two.local()
    space, keys = client.open(), chain("a", 2)
    far_pages(two, client, space, keys)
    where = next(w for w, page in two.disk.pages.items() if page == page_of(keys[1]))
    two.disk.pages[where] = bytes(PAGE_BYTES)
    client.acquire(space, keys, load_ms=60_000, wait_ms=60_000)
    two.settle()
    two.put(writer, writer.open(), keys)
    group = client.group()
    while group.state is MORE:
        group = client.group()
    assert group.state is COMPLETE


def test_a_page_that_cannot_be_read_stays_held_and_the_wait_ends_without_it(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 3)
    far_pages(two, client, space, keys)
    two.fake.failing.add(CopyIn)
    client.acquire(space, keys, load_ms=60_000)
    group = client.group()
    assert (group.state, group.pages()) == (DEADLINE, {})
    assert client.match(space, keys) == 3
    two.fake.failing.clear()
    assert two.get(client, space, keys) == 3


def test_a_worker_that_dies_costs_its_loads_only(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 3)
    far_pages(two, client, space, keys)
    two.fake.held.add(CopyIn)
    client.acquire(space, keys, load_ms=60_000)
    two.until_asked(CopyIn)
    two.run(lambda: two.fake.die())
    assert client.group().state is DEADLINE
    assert client.acquire(space, keys, load_ms=60_000).state is MORE
    assert client.group().state is DEADLINE  # no worker: at once
    two.run(lambda: two.fake.start())
    two.fake.held.clear()
    assert two.get(client, space, keys) == 3


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_bytes_that_come_for_a_page_that_went_are_discarded(two: TwoTiers, how: str) -> None:
    client, other = two.local(), two.local()
    space, keys = client.open(), chain("a", 3)
    far_pages(two, client, space, keys)
    theirs = other.open()
    two.fake.held.add(CopyIn)
    client.acquire(space, keys, load_ms=60_000)
    two.until_asked(CopyIn)
    writing = two.gauges()["writing_bytes"]
    if how == "clear":
        other.call(Type.CLEAR, theirs)
        assert client.group().state is ABORTED
    else:
        other.call(Type.REMOVE, theirs, b"".join(keys))
    assert two.gauges()["writing_bytes"] == writing == 3 * PAGE_BYTES
    two.run(lambda: two.fake.release())
    if how == "remove":
        assert client.group().state is DEADLINE
    two.settle()
    assert two.gauges()["writing_bytes"] == 0
    assert client.match(space, keys) == 0
    assert two.counter("loads_done") == 0


def test_a_page_stored_anew_during_its_load_is_the_new_one(two: TwoTiers) -> None:
    client, other = two.local(), two.local()
    space, keys = client.open(), chain("a", 2)
    far_pages(two, client, space, keys)
    theirs = other.open()
    two.fake.held.add(CopyIn)
    client.acquire(space, keys, load_ms=60_000)
    two.until_asked(CopyIn)
    other.call(Type.REMOVE, theirs, b"".join(keys))
    two.put(other, theirs, keys)
    two.run(lambda: two.fake.release())
    group = client.group()
    assert (group.state, two.check(keys, group)) == (COMPLETE, 2)


def test_a_load_ends_by_its_deadline(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 2)
    far_pages(two, client, space, keys)
    two.fake.held.add(CopyIn)
    client.acquire(space, keys, load_ms=2000)
    two.until_asked(CopyIn)
    two.advance(2.1)
    assert client.group().state is DEADLINE
    two.run(lambda: two.fake.release())
    two.settle()
    assert two.get(client, space, keys) == 2


def test_the_two_waits_end_one_by_one(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 2)
    far_pages(two, client, space, keys)
    two.fake.held.add(CopyIn)
    client.acquire(space, keys + chain("never", 1), load_ms=60_000, wait_ms=1000)
    two.until_asked(CopyIn)
    two.advance(1.1)
    two.run(lambda: two.fake.release())
    group = client.group()
    assert (group.state, len(group.pages())) == (DEADLINE, 2)


def test_a_load_waits_for_memory_that_is_all_leased_until_it_is_released(two: TwoTiers) -> None:
    client, other = two.local(), two.local()
    space, keys = client.open(), chain("a", 4)
    far_pages(two, client, space, keys)
    theirs, busy = other.open(), chain("others", HOST_PAGES)
    lease = other.acquire(theirs, busy, request=b"other").lease
    assert client.acquire(space, keys, load_ms=60_000).state is MORE
    two.turn()
    assert two.gauges()["loads_in_flight"] == 0
    other.release(lease)
    group = client.group()
    assert (group.state, two.check(keys, group)) == (COMPLETE, 4)


def test_the_session_that_waited_may_be_gone(two: TwoTiers) -> None:
    client, other = two.local(), two.local()
    space, keys = client.open(), chain("a", 4)
    far_pages(two, client, space, keys)
    other_space = other.open()
    two.fake.held.add(CopyIn)
    other.acquire(other_space, keys, request=b"other", load_ms=60_000)
    two.until_asked(CopyIn)
    other.close()
    two.until(lambda: len(two.control.sessions) == 1)
    two.run(lambda: two.fake.release())
    two.settle()
    assert two.get(client, space, keys) == 4


def test_a_released_lease_ends_its_loads(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 4)
    far_pages(two, client, space, keys)
    two.fake.held.add(CopyIn)
    group = client.acquire(space, keys, load_ms=60_000)
    two.until_asked(CopyIn)
    client.send(Type.RELEASE, [group.lease], [], [])
    assert client.group().state is ABORTED
    client.receive()
    two.run(lambda: two.fake.release())
    two.settle()


def test_demoted_pages_need_no_second_copy(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 4)
    far_pages(two, client, space, keys)
    copies = two.counter("copies_done")
    two.get(client, space, keys)
    put_long(two, client, space, chain("again", HOST_PAGES))
    tiers = two.tiers_of(client)
    assert all(tiers[key] == {"ssd"} for key in keys)
    assert two.counter("copies_done") == copies + HOST_PAGES


def test_a_chain_that_outgrows_memory_faster_than_it_is_copied_loses_nothing(
    two: TwoTiers,
) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", HOST_PAGES + 16)
    put_long(two, client, space, keys[:32])
    two.fake.held.add(CopyOut)
    for at in range(32, len(keys), 16):
        two.put(client, space, keys[at : at + 16], parent=keys[at - 1])
    assert client.match(space, keys) == len(keys)
    two.run(lambda: two.fake.release())
    two.settle()


def test_cold_pages_without_a_copy_go_before_hot_ones_are_demoted(two: TwoTiers) -> None:
    client = two.local()
    space = client.open()
    two.run(lambda: two.fake.die())
    two.put(client, space, chain("bare", 20))
    two.run(two.ssd.copying.drop_queue)
    two.run(lambda: two.fake.start())
    two.turn()
    two.put(client, space, chain("hot", 44))
    two.settle()
    two.put(client, space, chain("new", 20))
    tiers = two.tiers_of(client)
    assert not any(key in tiers for key in chain("bare", 20))
    assert all("host" in tiers[key] for key in chain("hot", 44))


def test_a_capped_namespace_is_capped_in_host_memory_only(start_tiers: StartTiers) -> None:
    two = start_tiers(namespace_bytes_max=16 * PAGE_BYTES)
    client = two.local()
    space = client.open()
    for name in "abc":
        assert is_status(two.put(client, space, chain(name, 16)), PageStatus.STORED)
        two.settle()
    assert two.gauges()["used_bytes"] == 16 * PAGE_BYTES
    assert [client.match(space, chain(name, 16)) for name in "abc"] == [16, 16, 16]
    assert two.get(client, space, chain("a", 16)) == 16


def test_memory_given_to_another_page_size_demotes_what_has_copies(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", HOST_PAGES)
    put_long(two, client, space, keys)
    other = client.open(model="big", page_bytes=4 * PAGE_BYTES)
    assert is_status(client.put(other, chain("b", 2)), PageStatus.STORED)
    assert client.match(space, keys) == HOST_PAGES
    assert two.gauges()["ssd_only_pages"] >= 16
    two.settle()


def test_far_places_never_reach_a_client(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 4)
    far_pages(two, client, space, keys)
    near = chain("others", HOST_PAGES)[:2]
    group = client.acquire(space, near + keys)
    assert sorted(group.pages()) == [0, 1]
    assert all(d.offset_bytes < FAR_PLACES for d in group.pages().values())
    assert not any(isinstance(each, DropCopies) for each in two.fake.seen)
