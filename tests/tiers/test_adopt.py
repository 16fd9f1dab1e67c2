"""What a second run makes of the segment that a first one left."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nexuskv.tiers.host import HostTier, SlotArray
from nexuskv.tiers.owner import Process
from nexuskv.tiers.populate import give_back
from nexuskv.tiers.record import RECORD_BYTES, SlotState
from nexuskv.tiers.segment import HEADER_BYTES, TableHeader, open_segment
from tests.tiers.conftest import CHUNK_BYTES, OpenTier, populate

PAGE = 4096
NAMESPACE = bytes(range(16))
SECOND = bytes.fromhex("00000000ffffffff")
MAP = """
import mmap, sys
file = open(sys.argv[1], "r+b")
mapped = mmap.mmap(file.fileno(), 0)
file.close()
print("mapped", flush=True)
sys.stdin.read()
"""


def keys_of(count: int) -> bytes:
    return b"".join(index.to_bytes(32, "big") for index in range(1, count + 1))


def store(tier: HostTier, count: int, *, slot_bytes: int = PAGE) -> SlotArray:
    """A chain of committed pages."""
    slots = lend(tier, count, slot_bytes=slot_bytes)
    tier.publish(
        slots,
        namespace_id=NAMESPACE,
        keys=keys_of(count),
        key_bytes=32,
        parent_state=0,
        parent=b"",
        epoch=3,
        checksums=np.arange(count, dtype=np.uint64) + np.uint64(100),
    )
    return slots


def lend(tier: HostTier, count: int, *, slot_bytes: int = PAGE, pid: int = 1) -> SlotArray:
    """Slots of a writer."""
    while tier.free_count(slot_bytes) < count:
        assert tier.carve(slot_bytes)
    return tier.take(slot_bytes, count, pid=pid, start_time=7, session=1)


def adopt_all(tier: HostTier) -> tuple[dict[bytes, int], dict[Process, list[int]]]:
    """Every page found, key → slot, and every slot that a writer may still write."""
    pages: dict[bytes, int] = {}
    writers: dict[Process, list[int]] = {}
    while tier.adoption.pending:
        found = tier.adoption.step(5)
        for record, slot in zip(found.records, found.slots.tolist(), strict=True):
            pages[record["key"].tobytes()[:32]] = slot
        for process, slots in found.written.items():
            writers.setdefault(process, []).extend(slots.tolist())
    return pages, writers


def stored_keys(count: int) -> list[bytes]:
    return [keys_of(count)[at : at + 32] for at in range(0, 32 * count, 32)]


def table_of(tier: HostTier) -> Path:
    return Path(tier.segments()[0].table_path)


def rewrite(path: Path, slot: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + slot * RECORD_BYTES)
        file.write(raw)


def raw_of(path: Path, slot: int) -> bytes:
    with path.open("rb") as file:
        file.seek(HEADER_BYTES + slot * RECORD_BYTES)
        return file.read(RECORD_BYTES)


@pytest.fixture
def first(open_tier: OpenTier) -> HostTier:
    """A first run with 12 pages on record, of 16 slots."""
    tier = open_tier(populated=1)
    store(tier, 12)
    return tier


def test_pages_are_found_where_they_lay(open_tier: OpenTier, first: HostTier) -> None:
    descriptors = first.descriptors(np.arange(16, dtype=np.uint32), PAGE)
    first.close(unlink=False)
    second = open_tier(incarnation=SECOND)
    pages, _ = adopt_all(second)
    assert sorted(pages) == stored_keys(12)
    slots = np.array([pages[key] for key in stored_keys(12)], dtype=np.uint32)
    assert second.descriptors(slots, PAGE) == descriptors[: 32 * 12]


def test_usage_goes_on_where_it_ended(open_tier: OpenTier, first: HostTier) -> None:
    usage = first.usage_of(PAGE)
    first.close(unlink=False)
    second = open_tier()
    adopt_all(second)
    assert second.usage_of(PAGE) == usage
    assert second.used_bytes == 12 * PAGE


def test_records_say_namespace_epoch_parent_and_checksum(
    open_tier: OpenTier, first: HostTier
) -> None:
    first.close(unlink=False)
    second = open_tier()
    found = second.adoption.step(1000).records
    assert set(found["namespace_id"].tolist()) == {NAMESPACE}
    assert set(found["epoch"].tolist()) == {3}
    assert found["checksum"].tolist() == list(range(100, 112))
    assert (found["parent"][1:, :32] == found["key"][:-1, :32]).all()


def test_memory_without_pages_is_there_at_once(open_tier: OpenTier, first: HostTier) -> None:
    populate(first, 3)
    first.close(unlink=False)
    second = open_tier()
    assert (second.spare_chunks, second.chunk_to_populate()) == (3, 4)
    assert second.populated_bytes == 4 * CHUNK_BYTES


def test_memory_that_was_given_back_is_not_taken_for_there(
    open_tier: OpenTier, first: HostTier
) -> None:
    populate(first, 3)
    row = first.segments()[0]
    first.close(unlink=False)
    with open(row.data_path, "r+b") as file:
        give_back(file.fileno(), 2 * CHUNK_BYTES, CHUNK_BYTES)
    second = open_tier()
    assert (second.spare_chunks, second.chunk_to_populate()) == (0, 1)


def test_no_slot_is_free_before_its_records_were_read(open_tier: OpenTier, first: HostTier) -> None:
    first.close(unlink=False)
    second = open_tier()
    assert (second.free_count(PAGE), second.spare_chunks) == (0, 0)
    assert second.chunk_to_populate() == 1


@pytest.mark.parametrize("incarnation", [bytes(8), b"\xff" * 8], ids=["lower", "higher"])
def test_a_reused_slot_gets_a_generation_it_never_had(
    open_tier: OpenTier, first: HostTier, incarnation: bytes
) -> None:
    free = lend(first, 4)
    before = [first.generation_of(int(slot)) for slot in free]
    first.free(free)
    first.close(unlink=False)
    second = open_tier(incarnation=incarnation)
    adopt_all(second)
    again = lend(second, 4)
    assert sorted(again.tolist()) == sorted(free.tolist())
    after = [second.generation_of(int(slot)) for slot in again]
    assert min(after) > max(before)


def test_slots_being_written_are_quarantined_under_their_writers(
    open_tier: OpenTier, first: HostTier
) -> None:
    lent, revoked = lend(first, 1, pid=11), lend(first, 2, pid=12)
    first.quarantine(revoked)
    first.close(unlink=False)
    second = open_tier()
    _, writers = adopt_all(second)
    assert writers == {Process(11, 7): lent.tolist(), Process(12, 7): sorted(revoked.tolist())}
    assert second.quarantined_bytes == 3 * PAGE
    second.free(np.concatenate([lent, revoked]))
    assert second.free_count(PAGE) == 4


def test_unlinked_slots_are_free(open_tier: OpenTier, first: HostTier) -> None:
    first.unlink(np.arange(3, dtype=np.uint32))
    first.close(unlink=False)
    second = open_tier()
    pages, _ = adopt_all(second)
    assert sorted(pages) == stored_keys(12)[3:]
    assert second.free_count(PAGE) == 7


def test_a_chunk_without_pages_is_spare(open_tier: OpenTier) -> None:
    tier = open_tier(populated=1)
    tier.free(store(tier, 3))
    tier.close(unlink=False)
    second = open_tier()
    adopt_all(second)
    assert (second.spare_chunks, second.usage_by_size()) == (1, [])
    assert len(lend(second, 4, slot_bytes=2 * PAGE)) == 4


def test_chunks_of_several_sizes_keep_their_sizes(open_tier: OpenTier) -> None:
    tier = open_tier(populated=8)
    store(tier, 20)
    store(tier, 5, slot_bytes=3 * PAGE)
    rows = tier.chunks()
    tier.close(unlink=False)
    second = open_tier()
    adopt_all(second)
    assert [row for row in second.chunks() if row.slot_bytes] == [r for r in rows if r.slot_bytes]


def test_of_a_record_with_any_byte_flipped_the_page_is_missing(open_tier: OpenTier) -> None:
    tier = open_tier(capacity_bytes=40 * CHUNK_BYTES, populated=40)
    slots = store(tier, RECORD_BYTES + 100).tolist()
    path = table_of(tier)
    tier.close(unlink=False)
    for at in range(RECORD_BYTES):
        raw = bytearray(raw_of(path, slots[at]))
        raw[at] ^= 1 << at % 8
        rewrite(path, slots[at], bytes(raw))
    second = open_tier(capacity_bytes=40 * CHUNK_BYTES)
    pages, writers = adopt_all(second)
    assert sorted(pages) == stored_keys(RECORD_BYTES + 100)[RECORD_BYTES:]
    assert writers == {}
    assert second.used_bytes == 100 * PAGE
    assert second.quarantined_bytes == 0


def test_a_header_with_any_byte_flipped_is_refused(first: HostTier) -> None:
    path = table_of(first)
    raw = path.read_bytes()[:HEADER_BYTES]
    taken: list[int] = []
    for at in range(len(TableHeader(1, 1, 1, bytes(8), bytes(16)).encode())):
        with path.open("r+b") as file:
            file.write(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        if not isinstance(open_segment(path, CHUNK_BYTES), str):
            taken.append(at)
    assert taken == []


def test_a_segment_whose_header_is_damaged_is_discarded(
    open_tier: OpenTier, first: HostTier
) -> None:
    path = table_of(first)
    first.close(unlink=False)
    with path.open("r+b") as file:
        file.write(b"another program")
    assert not open_tier(incarnation=SECOND).adopted
    assert not path.exists()


def test_two_records_at_each_others_place_are_two_missing_pages(
    open_tier: OpenTier, first: HostTier
) -> None:
    path = table_of(first)
    first.close(unlink=False)
    raws = [raw_of(path, slot) for slot in (2, 5)]
    rewrite(path, 5, raws[0])
    rewrite(path, 2, raws[1])
    pages, _ = adopt_all(open_tier())
    assert sorted(set(pages.values())) == [0, 1, 3, 4, 6, 7, 8, 9, 10, 11]


def test_a_damaged_slot_waits_for_the_processes_that_map_the_segment(
    open_tier: OpenTier, first: HostTier
) -> None:
    path, data = table_of(first), first.segments()[0].data_path
    first.close(unlink=False)
    rewrite(path, 4, b"\xff" * 40)
    child = subprocess.Popen(
        [sys.executable, "-c", MAP, data], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"mapped\n"
        second = open_tier()
        adopt_all(second)
        assert second.adoption.mapped_by == [Process.of(child.pid)]
        assert second.adoption.waits_for_processes
        assert second.quarantined_bytes == PAGE
    finally:
        child.communicate(timeout=10)
    second.free(second.adoption.processes_ended())
    assert (second.quarantined_bytes, second.free_count(PAGE)) == (0, 5)
    assert not second.adoption.waits_for_processes


def test_a_chunk_of_damaged_records_alone_waits_as_a_whole(open_tier: OpenTier) -> None:
    tier = open_tier(populated=1)
    slots = store(tier, 1, slot_bytes=CHUNK_BYTES)
    row = tier.segments()[0]
    tier.close(unlink=False)
    rewrite(Path(row.table_path), int(slots[0]), b"\xff" * 40)
    with open(row.data_path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    second = open_tier()
    adopt_all(second)
    assert (second.spare_chunks, second.usage_by_size()) == (0, [])
    mapped.close()
    second.free(second.adoption.processes_ended())
    assert second.spare_chunks == 1


def test_a_raised_capacity_keeps_the_pages_and_adds_chunks(
    open_tier: OpenTier, first: HostTier
) -> None:
    first.close(unlink=False)
    second = open_tier(capacity_bytes=20 * CHUNK_BYTES)
    assert len(adopt_all(second)[0]) == 12
    assert second.chunk_count == 20
    row = second.segments()[0]
    sizes = [os.stat(path).st_size for path in (row.data_path, row.table_path)]
    assert sizes == [row.capacity_bytes, row.table_bytes]


def test_a_lowered_capacity_gives_up_the_pages_above_and_their_memory(
    open_tier: OpenTier,
) -> None:
    tier = open_tier(populated=4)
    store(tier, 4 * 16)
    data = tier.segments()[0].data_path
    tier.close(unlink=False)
    second = open_tier(capacity_bytes=2 * CHUNK_BYTES)
    assert len(adopt_all(second)[0]) == 32
    assert os.stat(data).st_size == 8 * CHUNK_BYTES
    assert os.stat(data).st_blocks * 512 <= 2 * CHUNK_BYTES


def test_pages_given_up_do_not_return_when_the_capacity_is_raised_again(
    open_tier: OpenTier,
) -> None:
    tier = open_tier(populated=4)
    store(tier, 4 * 16)
    row = tier.segments()[0]
    tier.close(unlink=False)
    with open(row.data_path, "r+b") as file, mmap.mmap(file.fileno(), 0):
        # Somebody maps it, so that its memory stays.
        second = open_tier(capacity_bytes=2 * CHUNK_BYTES)
        second.close(unlink=False)
    third = open_tier(capacity_bytes=8 * CHUNK_BYTES)
    assert len(adopt_all(third)[0]) == 32
    assert third.used_bytes == 32 * PAGE


@pytest.mark.parametrize("which", ["data_path", "table_path"])
def test_a_segment_with_a_short_file_is_discarded(
    open_tier: OpenTier, first: HostTier, which: str
) -> None:
    path = getattr(first.segments()[0], which)
    first.close(unlink=False)
    os.truncate(path, os.stat(path).st_size - 1)
    second = open_tier(incarnation=SECOND)
    assert not second.adopted
    assert second.used_bytes == 0


def test_a_segment_of_other_chunks_is_discarded(
    open_tier: OpenTier, first: HostTier, caplog: pytest.LogCaptureFixture
) -> None:
    first.close(unlink=False)
    second = open_tier(chunk_bytes=2 * CHUNK_BYTES, incarnation=SECOND)
    assert not second.adopted
    (line,) = caplog.messages
    assert "chunk_bytes" in line


def test_a_segment_is_not_adopted_where_that_is_not_wanted(
    open_tier: OpenTier, first: HostTier, folder: Path
) -> None:
    path = table_of(first)
    first.close(unlink=False)
    second = HostTier.open(
        folder=folder,
        capacity_bytes=8 * CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        huge_pages=False,
        incarnation=SECOND,
        adopt=False,
    )
    assert not second.adopted
    assert not path.exists()
    second.close(unlink=True)


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_a_forgotten_page_is_found_by_no_later_run(
    open_tier: OpenTier, first: HostTier, *, read: bool
) -> None:
    first.close(unlink=False)
    second = open_tier()
    if read:
        adopt_all(second)
    slots, others = second.adoption.forget(NAMESPACE, stored_keys(2))
    assert (len(slots), others) == ((2, 0) if read else (0, 2))
    second.unlink(slots)
    if not read:
        assert sorted(adopt_all(second)[0]) == stored_keys(12)[2:]
    second.close(unlink=False)
    assert sorted(adopt_all(open_tier())[0]) == stored_keys(12)[2:]


def test_only_the_named_namespaces_pages_are_forgotten(
    open_tier: OpenTier, first: HostTier
) -> None:
    first.close(unlink=False)
    second = open_tier()
    assert second.adoption.forget(bytes(16), stored_keys(2))[1] == 0
    assert len(adopt_all(second)[0]) == 12


def test_states_of_adopted_slots_are_those_of_their_records(
    open_tier: OpenTier, first: HostTier
) -> None:
    first.close(unlink=False)
    second = open_tier()
    adopt_all(second)
    states = [second.state_of(slot) for slot in range(16)]
    assert states == [SlotState.READY] * 12 + [SlotState.FREE] * 4
