"""Copying pages to the ssd: what counts as a copy, what is dropped, what fails."""

import pytest

from nexuskv.protocol import Type
from nexuskv.types import PageStatus
from nexuskv.worker.commands import CopyOut, DropCopies, MakeFile, SaveNamespace
from tests.control.conftest import StartTiers
from tests.control.raw import PAGE_BYTES, chain
from tests.control.two_tiers import ID, TwoTiers, is_all

STORED = PageStatus.STORED
BOTH = {"host", "ssd"}


def test_a_committed_page_is_copied_with_its_bytes_and_its_record(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 10)
    two.put(client, space, keys)
    two.settle()
    assert all(two.tiers_of(client)[key] == BOTH for key in keys)
    assert len(two.disk.rows) == 10
    assert two.counter("copies_done") == 10


def test_a_namespace_is_on_record_before_its_first_copy(two: TwoTiers) -> None:
    client = two.local()
    two.fake.held.add(SaveNamespace)
    two.put(client, client.open(), chain("a", 4))
    two.turn()
    assert two.fake.count(CopyOut) == 0
    two.run(lambda: two.fake.release())
    two.settle()
    assert list(two.disk.namespaces) == [ID]
    assert len(two.disk.rows) == 4


def test_a_full_queue_drops_copies_and_never_a_put(start_tiers: StartTiers) -> None:
    two = start_tiers(copy_queue_bytes=8 * PAGE_BYTES)
    client = two.local()
    two.fake.held.add(CopyOut)
    assert is_all(two.put(client, client.open(), chain("a", 30)), STORED)
    assert two.gauges()["copy_queue_bytes"] <= 8 * PAGE_BYTES
    assert two.counter("copies_dropped") == 22
    two.run(lambda: two.fake.release())
    two.settle()
    assert two.counter("copies_done") == 8


def test_a_page_that_is_used_again_gets_its_copy_after_all(start_tiers: StartTiers) -> None:
    two = start_tiers(copy_queue_bytes=8 * PAGE_BYTES)
    client = two.local()
    space, keys = client.open(), chain("a", 12)
    two.put(client, space, keys)
    two.settle()
    assert two.counter("copies_done") < 12
    client.release(client.acquire(space, keys).lease)
    two.settle()
    assert two.counter("copies_done") == 12


def test_a_page_being_copied_is_no_victim(two: TwoTiers) -> None:
    client = two.local()
    space = client.open()
    two.fake.held.add(CopyOut)
    two.put(client, space, chain("a", 8))
    two.until_asked(CopyOut)
    assert two.fake.count(CopyOut) > 0
    statuses = two.put(client, space, chain("b", 64))
    assert statuses.count(STORED) == 56
    assert client.match(space, chain("a", 8)) == 8
    two.run(lambda: two.fake.release())
    two.settle()


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_a_copy_of_a_page_that_went_meanwhile_does_not_count(two: TwoTiers, how: str) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 4)
    two.fake.held.add(CopyOut)
    two.put(client, space, keys)
    two.until_asked(CopyOut)
    number = (
        client.send(Type.REMOVE, space, b"".join(keys))
        if how == "remove"
        else client.send(Type.CLEAR, space)
    )
    two.run(lambda: two.fake.release())
    frame = client.receive()
    assert (frame.request_id, frame.body[0]) == (number, 4)
    two.settle()
    assert two.disk.rows == {}
    assert two.tiers_of(client) == {}


@pytest.mark.parametrize("lying", [False, True], ids=["without effect", "with effect"])
def test_a_copy_that_failed_leaves_no_row_and_is_not_tried_again(
    two: TwoTiers, lying: bool
) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 4)
    two.fake.failing.add(CopyOut)
    two.fake.lying = lying
    two.put(client, space, keys)
    two.settle()
    assert two.counter("copies_failed") == 4
    assert two.disk.rows == {}
    assert sum(isinstance(each, CopyOut) for each in two.fake.seen) == 1
    assert client.match(space, keys) == 4


def test_a_worker_that_dies_in_a_copy_leaves_no_row_behind(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 4)
    two.fake.held.add(CopyOut)
    two.put(client, space, keys)
    two.until_asked(CopyOut)
    two.run(lambda: two.fake.die())
    two.turn()
    two.run(lambda: two.fake.release())
    two.run(lambda: two.fake.start())
    two.settle()
    assert two.disk.rows == {}
    two.put(client, space, chain("b", 4))
    two.settle()
    assert len(two.disk.rows) == 4


def test_a_file_that_cannot_be_made_ends_growth_not_service(two: TwoTiers) -> None:
    client = two.local()
    space = client.open()
    two.put(client, space, chain("a", 10))
    two.settle()
    two.fake.failing.add(MakeFile)
    for name in "bcdef":
        two.put(client, space, chain(name, 10))
        two.settle()
    assert two.ssd.state == "ready"
    assert two.counter("ssd_errors") > 0
    assert len(two.disk.files) <= 2


def test_a_full_ssd_gives_up_its_coldest_copies_for_new_ones(start_tiers: StartTiers) -> None:
    two = start_tiers(ssd_capacity=2 * 2**20)  # 30 pages
    client = two.local()
    space = client.open()
    for number in range(12):
        two.put(client, space, chain(f"c{number}", 10))
        two.settle()
    assert len(two.disk.rows) <= 30
    tiers = two.tiers_of(client)
    assert all("ssd" in tiers[key] for key in chain("c11", 10))
    assert two.counter("ssd_evicted_pages") > 0


def test_a_slot_is_used_again_only_after_its_row_was_deleted(start_tiers: StartTiers) -> None:
    two = start_tiers(ssd_capacity=2**20)  # 15 pages
    client = two.local()
    space = client.open()
    two.put(client, space, chain("a", 15))
    two.settle()
    two.fake.held.add(DropCopies)
    two.put(client, space, chain("b", 15))
    two.turn()
    assert two.fake.count(CopyOut) == 0
    assert two.gauges()["ssd_dropping_bytes"] > 0
    two.run(lambda: two.fake.release())
    two.settle()
    assert all(key in two.tiers_of(client) for key in chain("b", 15))


def test_rows_that_cannot_be_deleted_keep_their_slots_out_of_use(start_tiers: StartTiers) -> None:
    two = start_tiers(ssd_capacity=2**20)
    client = two.local()
    space = client.open()
    two.put(client, space, chain("a", 15))
    two.settle()
    two.fake.failing.add(DropCopies)
    two.put(client, space, chain("b", 15))
    two.turn()
    rows = dict(two.disk.rows)
    two.turn()
    assert two.disk.rows == rows
    two.fake.failing.clear()
    two.advance(two.config.ssd_retry_s)
    two.settle()
    assert two.disk.rows != rows


def test_interior_copies_give_way_when_no_leaf_has_one(start_tiers: StartTiers) -> None:
    two = start_tiers(ssd_capacity=2**20, copy_queue_bytes=15 * PAGE_BYTES)
    client = two.local()
    space, stem = client.open(), chain("stem", 15)
    two.put(client, space, stem)
    two.settle()
    two.fake.held.add(CopyOut)
    leaves = [chain(f"leaf {number}", 1)[0] for number in range(3)]
    for leaf in leaves:
        two.put(client, space, [leaf], parent=stem[-1])
    lease = client.acquire(space, stem + leaves).lease
    two.run(lambda: two.fake.release())
    two.settle()
    assert all("ssd" in two.tiers_of(client)[leaf] for leaf in leaves)
    client.release(lease)
