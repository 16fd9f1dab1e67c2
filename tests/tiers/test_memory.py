"""Supply of memory: sparse start, full filesystems, and no SIGBUS for anybody."""

import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from nexuskv.errors import OutOfSpace
from nexuskv.tiers.host import HostTier
from nexuskv.tiers.populate import allocate
from nexuskv.types import Descriptor
from tests.tiers.conftest import CHUNK_BYTES, INCARNATION, OpenTier, populate

PAGE = 8192
WAIT_S = 10

TOUCH = """
import mmap, sys
path, writable, *places = sys.argv[1:]
with open(path, "r+b") as file:
    view = mmap.mmap(file.fileno(), 0)
    for at in map(int, places):
        view[at] = view[at] + 1 if writable == "w" else view[at] and 1
"""


class Disk(Protocol):
    """A filesystem that can be filled up."""

    kind: str
    folder: Path

    def allocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None: ...

    def leave(self, free_bytes: int) -> None:
        """Let somebody else use up all but this much."""
        ...


class RealDisk:
    """A small tmpfs, filled by a file."""

    kind = "kernel"

    def __init__(self, mount: Path) -> None:
        self._mount = mount
        self.folder = mount / "one"

    def allocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        allocate(fd, offset_bytes, length_bytes)

    def leave(self, free_bytes: int) -> None:
        room = os.statvfs(self._mount)
        with (self._mount / "filler").open("ab") as filler:
            used = filler.tell()
            os.posix_fallocate(filler.fileno(), used, room.f_bavail * room.f_frsize - free_bytes)


class CountedDisk:
    """Any filesystem, with a budget in front: for machines where nothing may be mounted."""

    kind = "injected"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._left = 1 << 40

    def allocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        if length_bytes > self._left:
            raise OutOfSpace("the budget is spent")
        self._left -= length_bytes
        allocate(fd, offset_bytes, length_bytes)

    def leave(self, free_bytes: int) -> None:
        self._left = free_bytes


@pytest.fixture(params=["kernel", "injected"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """Both kinds; where mounting is not allowed, the injected one stands for the kernel's."""
    mount = tmp_path / "mount"
    mount.mkdir(mode=0o700)
    options = ["-t", "tmpfs", "-o", "size=2m,mode=0700", "nexuskv-test", str(mount)]
    if request.param == "injected" or subprocess.call(["mount", *options]):
        yield CountedDisk(mount / "one")
        return
    yield RealDisk(mount)
    subprocess.check_call(["umount", str(mount)])


@pytest.fixture
def tier(disk: Disk) -> Iterator[HostTier]:
    """Eight chunks of 64 KiB on that disk, none populated."""
    tier = HostTier.open(
        folder=disk.folder,
        capacity_bytes=8 * CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        huge_pages=False,
        incarnation=INCARNATION,
        allocate=disk.allocate,
    )
    yield tier
    tier.close(unlink=True)


def populate_all(tier: HostTier) -> None:
    """What control does: ask for every chunk, note which ones came."""
    while (chunk_index := tier.chunk_to_populate()) is not None:
        try:
            tier.populate_chunk(chunk_index)
        except OutOfSpace:
            tier.chunk_failed(chunk_index)
        else:
            tier.chunk_populated(chunk_index)


def touch(path: str, places: list[int], *, write: bool) -> int:
    """Read (and write) one byte at each place from another process; its exit status."""
    argv = [sys.executable, "-c", TOUCH, path, "w" if write else "r", *map(str, places)]
    return subprocess.call(argv)


def test_opening_takes_no_memory(open_tier: OpenTier) -> None:
    row = open_tier(capacity_bytes=1 << 30, chunk_bytes=1 << 26).segments()[0]
    assert os.stat(row.data_path).st_blocks == 0
    assert os.stat(row.table_path).st_blocks * 512 <= 4096


def test_population_reserves_the_chunk(open_tier: OpenTier) -> None:
    tier = open_tier(populated=2)
    assert os.stat(tier.segments()[0].data_path).st_blocks * 512 == 2 * CHUNK_BYTES
    assert (tier.populated_bytes, tier.spare_chunks) == (2 * CHUNK_BYTES, 2)


def test_huge_pages_are_a_wish(open_tier: OpenTier) -> None:
    tier = open_tier(huge_pages=True, populated=1, capacity_bytes=1 << 22, chunk_bytes=1 << 21)
    assert os.stat(tier.segments()[0].data_path).st_blocks * 512 >= 1 << 21


def test_nothing_is_left_to_populate_in_the_end(open_tier: OpenTier) -> None:
    assert open_tier(populated=8).chunk_to_populate() is None


def test_the_chunk_to_populate_stays_until_it_is_settled(open_tier: OpenTier) -> None:
    tier = open_tier()
    assert (tier.chunk_to_populate(), tier.chunk_to_populate()) == (0, 0)


def test_chunks_that_fail_shrink_the_capacity(tier: HostTier, disk: Disk) -> None:
    disk.leave(3 * CHUNK_BYTES + 8192)
    populate_all(tier)
    assert (tier.spare_chunks, tier.failed_chunks) == (3, 5)
    assert tier.capacity_bytes == 3 * CHUNK_BYTES


def test_what_was_populated_before_the_disk_filled_up_works(tier: HostTier, disk: Disk) -> None:
    disk.leave(3 * CHUNK_BYTES + 8192)
    populate_all(tier)
    assert tier.carve(PAGE)
    assert len(tier.take(PAGE, 8, pid=1, start_time=1, session=1)) == 8


def test_a_spare_chunk_is_traded_for_room_for_records(tier: HostTier, disk: Disk) -> None:
    populate(tier, 4)
    disk.leave(0)
    carved = tier.carve(PAGE)
    # The injected disk does not notice that memory came back, but the tier gave a chunk up.
    assert carved == (disk.kind == "kernel")
    assert (tier.failed_chunks, tier.spare_chunks) == ((1, 2) if carved else (1, 3))


def test_the_last_spare_chunk_is_not_traded(tier: HostTier, disk: Disk) -> None:
    populate(tier, 1)
    disk.leave(0)
    assert not tier.carve(PAGE)
    assert (tier.failed_chunks, tier.spare_chunks) == (0, 1)


def test_a_chunk_that_clients_know_is_never_traded(tier: HostTier, disk: Disk) -> None:
    populate(tier, 2)
    for _ in range(2):
        assert tier.carve(65536)
    for chunk_index in (0, 1):
        tier.release_chunk(chunk_index)
    disk.leave(0)
    tier.carve(4096)
    assert tier.failed_chunks == 0


def test_no_reader_or_writer_of_a_full_disk_dies(tier: HostTier, disk: Disk) -> None:
    populate(tier, 4)
    while tier.carve(PAGE):
        pass
    disk.leave(0)
    slots = tier.take(PAGE, 1000, pid=1, start_time=1, session=1)
    assert len(slots) == 32
    raw = tier.descriptors(slots, PAGE)
    found = [Descriptor.decode(raw[at : at + 32]) for at in range(0, len(raw), 32)]
    row = tier.segments()[0]
    data = [d.offset_bytes + step for d in found for step in (0, 4096, PAGE - 1)]
    table = [row.header_bytes + int(slot) * row.record_bytes for slot in slots]
    assert touch(row.data_path, data, write=True) == 0
    assert touch(row.table_path, table, write=False) == 0


def test_a_hole_of_a_full_disk_would_kill_its_reader(tier: HostTier, disk: Disk) -> None:
    """The control of the test above: the danger is real where the disk is."""
    disk.leave(0)
    died = touch(tier.segments()[0].data_path, [CHUNK_BYTES], write=True)
    assert died == (-signal.SIGBUS if disk.kind == "kernel" else 0)


def test_a_lowered_capacity_leaves_earlier_mappings_readable(open_tier: OpenTier) -> None:
    first = open_tier(populated=8)
    row = first.segments()[0]
    with open(row.data_path, "r+b") as data:
        mapped = mmap.mmap(data.fileno(), row.capacity_bytes)
    mapped[-1] = 7
    first.close(unlink=False)
    assert open_tier(capacity_bytes=CHUNK_BYTES, incarnation=bytes(8)).chunk_count == 1
    assert mapped[-1] == 7
    mapped.close()


def test_population_after_close_is_refused(open_tier: OpenTier) -> None:
    tier = open_tier()
    tier.close(unlink=True)
    with pytest.raises(OutOfSpace, match="closed"):
        tier.populate_chunk(0)


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_close_during_population_does_not_disturb_it(open_tier: OpenTier, folder: Path) -> None:
    entered, closed = threading.Event(), threading.Event()
    outcome: list[str] = []

    def gated(fd: int, offset_bytes: int, length_bytes: int) -> None:
        if length_bytes == CHUNK_BYTES:
            entered.set()
            assert closed.wait(WAIT_S)
        allocate(fd, offset_bytes, length_bytes)

    tier = open_tier(allocate=gated)

    def act() -> None:
        tier.populate_chunk(0)
        outcome.append("done")

    thread = in_thread(act)
    assert entered.wait(WAIT_S)
    tier.close(unlink=True)
    closed.set()
    thread.join(WAIT_S)
    assert outcome == ["done"]
