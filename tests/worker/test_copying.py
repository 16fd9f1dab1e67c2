"""Pages between memory and disk: every page has its own fate, and no row comes before its bytes."""

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nexuskv.dataplane.checksum import page_checksum
from nexuskv.tiers.fake_disk import Fault, FaultyDisk
from nexuskv.tiers.host import HostTier
from nexuskv.tiers.record import Record, SlotState
from nexuskv.tiers.slab_folder import path_of
from nexuskv.types import PageStatus
from nexuskv.worker.codec import WorkerSettings
from nexuskv.worker.commands import (
    Answer,
    CheckCopies,
    ChunkPopulated,
    Command,
    CopiedIn,
    CopiedOut,
    CopiesChecked,
    CopiesDropped,
    CopyIn,
    CopyInRow,
    CopyOut,
    CopyOutRow,
    CopyRow,
    DropCopies,
    FileMade,
    LoadRows,
    MakeFile,
    NamespaceRow,
    NamespaceSaved,
    News,
    PlaceRow,
    PopulateChunk,
    RowsLoaded,
    SaveNamespace,
    SsdFailed,
    WorkerReady,
)
from nexuskv.worker.engine import Engine
from nexuskv.worker.host import HostMemory
from nexuskv.worker.ssd import Ssd
from tests.worker.replies import WAIT_S, Replies
from tests.worker.settings import settings_of

CHUNK_BYTES = 1 << 20
SLOT_BYTES = 16384
PAGE_BYTES = 10_000
NAMESPACE = bytes(range(16))
HIT, CORRUPT = PageStatus.HIT, PageStatus.CORRUPT
UNAVAILABLE, NO_SPACE = PageStatus.UNAVAILABLE, PageStatus.NO_SPACE


class GatedDisk(FaultyDisk):
    """A disk whose syncs wait for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def sync(self, fd: int) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        super().sync(fd)


class Worker:
    """An engine on a real segment and a real ssd folder, asked one command at a time."""

    def __init__(self, tier: HostTier, settings: WorkerSettings) -> None:
        self.tier = tier
        self.settings = settings
        self.disk = GatedDisk()
        self.memory = HostMemory.open(settings)
        self.replies = Replies()
        self.engine = Engine(
            memory=self.memory,
            reply=self.replies,
            open_ssd=self._open,
            ssd_threads=settings.ssd_threads,
            ssd_errors_max=settings.ssd_errors_max,
        )
        self._sequence = 0
        self._opened: list[Ssd] = []
        self.engine.start()
        ready = self.replies.wait(1)[0][1]
        assert isinstance(ready, WorkerReady)
        self.ready = ready
        self.folder = Path(settings.ssd_dir)

    def _open(self) -> Ssd:
        self._opened.append(Ssd.open(self.settings, disk=self.disk))
        return self.ssd

    @property
    def ssd(self) -> Ssd:
        """What the engine works on, behind its back."""
        return self._opened[-1]

    def begin(self, command: Command) -> int:
        self._sequence += 1
        self.engine.take(self._sequence, command)
        return self._sequence

    def answers(self, sequence: int) -> list[Answer]:
        """The answers to a command, once nothing is owed any more."""
        assert self.engine.drain(WAIT_S)
        said = self.replies.wait(0)
        return [
            result for number, result in said if number == sequence and not isinstance(result, News)
        ]

    def ask(self, command: Command) -> Answer:
        (answer,) = self.answers(self.begin(command))
        return answer

    def loaded(self, rows: list[CopyInRow]) -> list[PageStatus]:
        """Load pages; the status of each."""
        found: dict[int, int] = {}
        for answer in self.answers(self.begin(CopyIn(3, tuple(rows)))):
            assert isinstance(answer, CopiedIn)
            found |= {answer.first_index + at: each for at, each in enumerate(answer.statuses)}
        assert sorted(found) == list(range(len(rows)))
        return [PageStatus(found[at]) for at in range(len(rows))]

    def copied(self, numbers: list[int]) -> list[PageStatus]:
        """Write pages to their own places in file 0; the status of each."""
        answer = self.ask(CopyOut(4, tuple(copy_out(number) for number in numbers)))
        assert isinstance(answer, CopiedOut)
        return [PageStatus(each) for each in answer.statuses]

    def rows(self) -> list[tuple[int, int]]:
        """The places that the catalogue names."""
        answer = self.ask(LoadRows(5, b""))
        assert isinstance(answer, RowsLoaded)
        assert (answer.cursor, answer.error) == (b"", None)
        words = memoryview(answer.places).cast("I").tolist()
        assert len(answer.records) == 256 * len(words) // 2
        return list(zip(words[::2], words[1::2], strict=True))

    def fill(self, numbers: list[int]) -> None:
        """Put pages into the host slots of their numbers."""
        for number in numbers:
            with self.memory.slot(offset_of(number), PAGE_BYTES) as slot:
                slot[:PAGE_BYTES] = page(number)

    def read(self, number: int) -> bytes:
        with self.memory.slot(offset_of(number), PAGE_BYTES) as slot:
            return bytes(slot[:PAGE_BYTES])

    def close(self) -> None:
        self.disk.gate.set()
        assert self.engine.close(WAIT_S)
        self.memory.close()


def page(number: int) -> bytes:
    return bytes((number + at) % 251 for at in range(PAGE_BYTES))


def key(number: int) -> bytes:
    return number.to_bytes(12, "big")


def checksum(number: int) -> int:
    return page_checksum(page(number), NAMESPACE, key(number))


def offset_of(number: int) -> int:
    return number * SLOT_BYTES


def record_of(number: int) -> Record:
    return Record(
        slot=number,
        generation=7,
        state=SlotState.READY,
        size_bytes=PAGE_BYTES,
        checksum=checksum(number),
        namespace_id=NAMESPACE,
        key=key(number),
    )


def copy_out(number: int, file_index: int = 0) -> CopyOutRow:
    record = record_of(number).encode()
    return CopyOutRow(offset_of(number), PAGE_BYTES, file_index, number, record)


def copy(number: int) -> CopyRow:
    return CopyRow(0, number, PAGE_BYTES, checksum(number), NAMESPACE, key(number))


def copy_in(number: int, into: int | None = None) -> CopyInRow:
    return CopyInRow(*copy(number), offset_of(number if into is None else into))


@pytest.fixture
def tier(shm_dir: Path) -> Iterator[HostTier]:
    tier = HostTier.open(
        folder=shm_dir / "s",
        capacity_bytes=CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        huge_pages=False,
        incarnation=bytes(8),
    )
    yield tier
    tier.close(unlink=True)


StartWorker = Callable[..., Worker]


@pytest.fixture
def start(tier: HostTier, tmp_path: Path) -> Iterator[StartWorker]:
    started: list[Worker] = []

    def make(**flags: object) -> Worker:
        small = {"ssd_capacity": "4MiB", "ssd_file_bytes": "1MiB", "ssd_threads": 4, **flags}
        worker = Worker(tier, settings_of(tier, ssd_dir=str(tmp_path / "ssd"), **small))
        started.append(worker)
        worker.ask(PopulateChunk(0))
        return worker

    yield make
    for worker in started:
        worker.close()


@pytest.fixture
def worker(start: StartWorker) -> Worker:
    """One with file 0 made and twenty pages in memory."""
    worker = start()
    assert worker.ask(MakeFile(0, SLOT_BYTES)) == FileMade(0, None)
    worker.fill(list(range(20)))
    return worker


def test_pages_come_back_as_they_were(worker: Worker) -> None:
    numbers = list(range(20))
    assert worker.copied(numbers) == [HIT] * 20
    assert worker.rows() == [(0, number) for number in numbers]
    for number in numbers:
        with worker.memory.slot(offset_of(number), SLOT_BYTES) as slot:
            slot[:] = bytes(SLOT_BYTES)
    assert worker.loaded([copy_in(number) for number in numbers]) == [HIT] * 20
    assert [worker.read(number) for number in numbers] == [page(number) for number in numbers]


def test_what_is_on_disk_is_there_for_the_next_worker(worker: Worker, start: StartWorker) -> None:
    worker.copied([0, 1])
    worker.ask(SaveNamespace(1, NAMESPACE, b"a record", 6))
    worker.close()
    later = start()
    assert later.ready.files == ((0, SLOT_BYTES),)
    assert later.ready.namespaces == (NamespaceRow(NAMESPACE, b"a record", 6),)
    assert later.loaded([copy_in(1, into=30)]) == [HIT]
    assert later.read(30) == page(1)


def test_a_batch_without_pages_is_answered(worker: Worker) -> None:
    assert worker.ask(CopyOut(4, ())) == CopiedOut(4, b"")
    assert worker.ask(CopyIn(4, ())) == CopiedIn(4, 0, b"")
    assert worker.ask(CheckCopies(4, ())) == CopiesChecked(4, b"")


def test_a_flipped_byte_is_corrupt_and_its_neighbours_are_hits(worker: Worker) -> None:
    worker.copied(list(range(10)))
    with path_of(worker.folder, 0).open("r+b") as file:
        file.seek(4096 + 4 * SLOT_BYTES + 123)
        file.write(b"\xff")
    wanted = [CORRUPT if number == 4 else HIT for number in range(10)]
    assert worker.loaded([copy_in(number) for number in range(10)]) == wanted
    statuses = bytes(wanted)
    pages = tuple(copy(number) for number in range(10))
    assert worker.ask(CheckCopies(8, pages)) == CopiesChecked(8, statuses)


def test_two_pages_at_each_others_place_are_corrupt(worker: Worker) -> None:
    worker.copied([0, 1])
    rows = [copy_in(0)._replace(slot_index=1), copy_in(1)._replace(slot_index=0)]
    assert worker.loaded(rows) == [CORRUPT] * 2


def test_checking_copies_leaves_host_memory_alone(worker: Worker) -> None:
    worker.copied([0])
    before = [worker.read(number) for number in range(20)]
    worker.ask(CheckCopies(8, (copy(0),)))
    assert [worker.read(number) for number in range(20)] == before


@pytest.mark.parametrize("cut", [0, 4096 + SLOT_BYTES + 4096], ids=["all", "within a page"])
def test_a_file_truncated_behind_its_back_is_unavailable(worker: Worker, cut: int) -> None:
    worker.copied([0, 1, 2])
    with path_of(worker.folder, 0).open("r+b") as file:
        file.truncate(cut)
    assert worker.loaded([copy_in(1)]) == [UNAVAILABLE]
    assert worker.ask(CheckCopies(8, (copy(2),))) == CopiesChecked(8, bytes((UNAVAILABLE,)))


def test_a_directory_that_goes_away_ends_the_ssd_and_not_the_worker(start: StartWorker) -> None:
    worker = start(ssd_errors_max=3)
    worker.ask(MakeFile(0, SLOT_BYTES))
    worker.ask(MakeFile(1, SLOT_BYTES))
    path_of(worker.folder, 1).unlink()
    for _ in range(3):
        row = copy_out(0, file_index=1)
        answer = worker.ask(CopyOut(4, (row,)))
        assert answer == CopiedOut(4, bytes((UNAVAILABLE,)))
    assert worker.ask(PopulateChunk(0)) == ChunkPopulated(0, None)
    assert isinstance(worker.ask(MakeFile(2, SLOT_BYTES)), FileMade)
    assert [type(said) for number, said in worker.replies.wait(0) if not number] == [
        WorkerReady,
        SsdFailed,
    ]


def test_a_read_error_costs_one_page(worker: Worker) -> None:
    worker.copied(list(range(8)))
    worker.disk.plan("read", Fault(error=errno.EIO))
    statuses = worker.loaded([copy_in(number) for number in range(8)])
    assert sorted(statuses) == [HIT] * 7 + [UNAVAILABLE]


def test_short_reads_are_completed(worker: Worker) -> None:
    worker.copied([0])
    worker.disk.plan("read", Fault(most_bytes=4096), Fault(most_bytes=4096))
    assert worker.loaded([copy_in(0, into=30)]) == [HIT]
    assert worker.read(30) == page(0)


@pytest.mark.parametrize(("error", "status"), [(errno.EIO, UNAVAILABLE), (errno.ENOSPC, NO_SPACE)])
def test_a_write_error_costs_one_page_and_leaves_no_row(
    worker: Worker, error: int, status: PageStatus
) -> None:
    worker.disk.plan("write", Fault(error=error))
    statuses = worker.copied(list(range(8)))
    assert sorted(statuses) == sorted([HIT] * 7 + [status])
    assert worker.rows() == [(0, at) for at in range(8) if statuses[at] is HIT]


def test_a_file_that_cannot_be_synced_has_no_rows(worker: Worker) -> None:
    worker.ask(MakeFile(1, SLOT_BYTES))
    worker.disk.plan("sync", Fault(error=errno.EIO))
    rows = tuple(copy_out(number, file_index=number % 2) for number in range(6))
    statuses = bytes((UNAVAILABLE, HIT) * 3)
    assert worker.ask(CopyOut(4, rows)) == CopiedOut(4, statuses)
    assert worker.rows() == [(1, 1), (1, 3), (1, 5)]


def test_no_row_is_there_before_its_bytes_are_durable(worker: Worker) -> None:
    worker.disk.gate.clear()
    worker.disk.entered.clear()
    sequence = worker.begin(CopyOut(4, (copy_out(0),)))
    assert worker.disk.entered.wait(WAIT_S)
    assert worker.ssd.catalogue.rows(b"", 10).places == b""
    assert [number for number, _ in worker.replies.wait(0)].count(sequence) == 0
    worker.disk.gate.set()
    assert worker.answers(sequence) == [CopiedOut(4, bytes((HIT,)))]
    assert worker.rows() == [(0, 0)]


def test_batches_that_wait_share_one_sync(worker: Worker) -> None:
    worker.disk.gate.clear()
    worker.disk.entered.clear()
    worker.begin(CopyOut(0, (copy_out(0),)))
    assert worker.disk.entered.wait(WAIT_S)
    for number in range(1, 10):
        worker.begin(CopyOut(number, (copy_out(number),)))
    written = worker.disk.calls.count("sync")
    while worker.disk.calls.count("write") < 11:  # with the superblock
        assert not worker.engine.drain(0.01)
    worker.disk.gate.set()
    assert worker.engine.drain(WAIT_S)
    assert worker.disk.calls.count("sync") - written <= 3
    assert worker.rows() == [(0, number) for number in range(10)]


def test_dropped_rows_are_gone(worker: Worker) -> None:
    worker.copied([0, 1, 2])
    places = (PlaceRow(0, 0), PlaceRow(0, 2), PlaceRow(3, 3))
    assert worker.ask(DropCopies(9, places)) == CopiesDropped(9, None)
    assert worker.rows() == [(0, 1)]


def test_a_file_that_cannot_be_made_says_why(worker: Worker) -> None:
    answer = worker.ask(MakeFile(99, SLOT_BYTES))
    assert isinstance(answer, FileMade)
    assert answer.error is not None
    assert "99" in answer.error


def test_commands_that_are_wrong_are_no_errors_of_the_disk(start: StartWorker) -> None:
    worker = start(ssd_errors_max=1)
    worker.ask(MakeFile(0, SLOT_BYTES))
    worker.fill([0])
    outside = copy_in(0)._replace(offset_bytes=CHUNK_BYTES)
    assert worker.loaded([copy_in(0)._replace(file_index=3)]) == [UNAVAILABLE]
    assert worker.loaded([copy_in(0)._replace(slot_index=10_000)]) == [UNAVAILABLE]
    assert worker.loaded([outside]) == [UNAVAILABLE]
    assert worker.copied([0]) == [HIT]


def test_errors_in_a_row_end_the_ssd_and_say_so_once(start: StartWorker) -> None:
    worker = start(ssd_errors_max=4)
    worker.ask(MakeFile(0, SLOT_BYTES))
    worker.fill([0])
    worker.copied([0])
    worker.disk.plan("read", *[Fault(error=errno.EIO)] * 3)
    assert worker.loaded([copy_in(0)] * 3) == [UNAVAILABLE] * 3
    assert worker.loaded([copy_in(0)]) == [HIT], "three are not four, and a success ends the row"
    worker.disk.plan("read", *[Fault(error=errno.EIO)] * 4)
    assert worker.loaded([copy_in(0)] * 4) == [UNAVAILABLE] * 4
    calls = len(worker.disk.calls)
    assert worker.loaded([copy_in(0)]) == [UNAVAILABLE]
    assert worker.copied([0]) == [UNAVAILABLE]
    for command in (
        DropCopies(1, ()),
        SaveNamespace(1, NAMESPACE, b"", 1),
        MakeFile(1, SLOT_BYTES),
        LoadRows(1, b""),
    ):
        answer = worker.ask(command)
        assert isinstance(answer, CopiesDropped | NamespaceSaved | FileMade | RowsLoaded)
        assert answer.error is not None
    assert len(worker.disk.calls) == calls, "the disk is left alone"
    assert worker.ask(PopulateChunk(0)) == ChunkPopulated(0, None)
    assert sum(isinstance(said, SsdFailed) for _, said in worker.replies.wait(0)) == 1


def test_a_folder_of_something_else_is_told_and_memory_is_served(
    tier: HostTier, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("not ours")
    settings = replace(settings_of(tier), ssd_dir=str(tmp_path), ssd_capacity=1 << 30)
    worker = Worker(tier, settings)
    try:
        assert worker.ready.ssd_error is not None
        assert str(tmp_path) in worker.ready.ssd_error
        assert worker.ready.ssd_refused
        assert worker.ask(PopulateChunk(0)) == ChunkPopulated(0, None)
        assert worker.loaded([copy_in(0)]) == [UNAVAILABLE]
    finally:
        worker.close()


def test_rows_are_read_in_pieces(start: StartWorker) -> None:
    worker = start(ssd_file_bytes="32MiB", ssd_capacity="32MiB", ssd_slot_bytes_min="4KiB")
    assert worker.ask(MakeFile(0, 4096)) == FileMade(0, None)
    small = replace(record_of(0), size_bytes=4000)
    worker.ssd.put_rows((0, at, replace(small, slot=at).encode()) for at in range(5000))
    cursor, found, rounds = b"", 0, 0
    while rounds == 0 or cursor:
        answer = worker.ask(LoadRows(1, cursor))
        assert isinstance(answer, RowsLoaded)
        assert len(answer.records) == 32 * len(answer.places)
        cursor, found, rounds = answer.cursor, found + len(answer.places) // 8, rounds + 1
    assert (found, rounds) == (5000, 2)
