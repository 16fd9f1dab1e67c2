"""A data plane that a test plays: it carries out commands when told, in any order, well or badly.

Its ssd is a dict, host memory is the segment's real file. It runs on the control loop's thread:
`completed` carries out what is not held back. Everything it has "written" outlives `die`.
"""

import os
from dataclasses import dataclass
from random import Random

from nexuskv.dataplane.checksum import page_checksum
from nexuskv.tiers.host import HostTier
from nexuskv.tiers.record import decode
from nexuskv.types import Descriptor, PageStatus
from nexuskv.worker.commands import (
    CheckCopies,
    CheckPages,
    ChunkPopulated,
    Command,
    CopiedIn,
    CopiedOut,
    CopiesChecked,
    CopiesDropped,
    CopyIn,
    CopyInRow,
    CopyOut,
    CopyRow,
    DropCopies,
    FileMade,
    FileRow,
    LoadRows,
    MakeFile,
    NamespaceRow,
    NamespaceSaved,
    PagesChecked,
    PopulateChunk,
    Result,
    RowsLoaded,
    SaveNamespace,
    SsdFailed,
    WorkerLost,
    WorkerReady,
    failed,
)

HIT, CORRUPT, UNAVAILABLE = PageStatus.HIT, PageStatus.CORRUPT, PageStatus.UNAVAILABLE
Where = tuple[int, int]  # file, slot


@dataclass(slots=True, eq=False)
class Asked:
    """A command without an answer, and for a `CopyIn` the pages that were not answered yet."""

    command: Command
    left: list[int]


class Disk:
    """What a folder of the ssd holds; several workers may have it one after another."""

    def __init__(self) -> None:
        self.files: dict[int, int] = {}
        self.pages: dict[Where, bytes] = {}
        self.rows: dict[Where, bytes] = {}
        self.namespaces: dict[bytes, tuple[bytes, int]] = {}


class FakeWorker:
    """A `CommandQueue`. `held` names the commands that are not carried out by themselves."""

    def __init__(self, tier: HostTier, disk: Disk, *, rng: Random | None = None) -> None:
        self.disk = disk
        self.asked: list[Asked] = []
        self.held: set[type[Command]] = set()
        self.refused: set[type[Command]] = set()  # not taken
        self.failing: set[type[Command]] = set()  # answered as failed, without effect
        self.lying = False  # failing commands take effect all the same
        self.seen: list[Command] = []
        self.alive = False
        self._tier = tier
        self._rng = rng
        self._data = os.open(tier.segments()[0].data_path, os.O_RDWR)
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._news: list[Result] = []

    # --- the queue

    def submit(self, command: Command) -> bool:
        if not self.alive or type(command) in self.refused:
            return False
        self.seen.append(command)
        pages = command.pages if isinstance(command, CopyIn) else ()
        self.asked.append(Asked(command, list(range(len(pages)))))
        self._wake()
        return True

    def completed(self) -> list[Result]:
        try:
            os.eventfd_read(self._eventfd)
        except BlockingIOError:
            return []
        ready = [each for each in self.asked if type(each.command) not in self.held]
        if self._rng is not None:
            self._rng.shuffle(ready)
        results, self._news = self._news, []
        for each in ready:
            results += self._carry_out(each)
        return results

    def fileno(self) -> int:
        return self._eventfd

    # --- its life

    def start(self, *, ssd_error: str | None = None) -> None:
        """Say that it is ready."""
        self.alive = True
        files = tuple(FileRow(*item) for item in sorted(self.disk.files.items()))
        spaces = tuple(NamespaceRow(key, *row) for key, row in self.disk.namespaces.items())
        self._tell(WorkerReady(os.getpid(), "fake", ssd_error, files, spaces))

    def die(self) -> None:
        """End, as the supervisor tells it: everything unanswered has failed."""
        self.alive = False
        self._tell(WorkerLost("it was killed"))
        for each in self.asked:
            if isinstance(each.command, CopyIn):
                for index in each.left:
                    self._tell(CopiedIn(each.command.token, index, bytes([UNAVAILABLE])))
            else:
                self._tell(failed(each.command, "the worker was lost"))
        self.asked.clear()

    def fail_ssd(self, reason: str = "too many errors") -> None:
        """Say that the ssd is of no use any more."""
        self._tell(SsdFailed(reason))

    def release(self, kind: type[Command] | None = None) -> None:
        """Carry out what was held back, and hold it no more."""
        if kind is None:
            self.held.clear()
        else:
            self.held.discard(kind)
        self._wake()

    def answer_now(self, index: int, *, status: PageStatus | None = None) -> None:
        """Carry out one unanswered command, held or not; `status` instead of what is true."""
        for result in self._carry_out(self.asked[index], status=status):
            self._tell(result)

    def answer_page(self, index: int, page: int) -> None:
        """Carry out one page of an unanswered `CopyIn`."""
        asked = self.asked[index]
        assert isinstance(asked.command, CopyIn)
        at = asked.left.pop(page)
        self._tell(CopiedIn(asked.command.token, at, bytes([self._read(asked.command.pages[at])])))
        if not asked.left:
            self.asked.remove(asked)

    def count(self, kind: type[Command]) -> int:
        """Unanswered commands of a kind."""
        return sum(isinstance(each.command, kind) for each in self.asked)

    def close(self) -> None:
        os.close(self._data)
        os.close(self._eventfd)

    def _tell(self, result: Result) -> None:
        self._news.append(result)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._eventfd, 1)

    # --- what it does

    def _carry_out(self, asked: Asked, *, status: PageStatus | None = None) -> list[Result]:
        self.asked.remove(asked)
        command = asked.command
        fails = type(command) in self.failing
        if fails and not self.lying:
            if isinstance(command, CopyIn):
                none = bytes([UNAVAILABLE])
                return [CopiedIn(command.token, index, none) for index in asked.left]
            return [failed(command, "it fails")]
        if isinstance(command, CopyIn):
            return self._copy_in(command, asked.left, status)
        result = self._do(command)
        return [failed(command, "it failed, or so it says")] if fails else [result]

    def _copy_in(self, command: CopyIn, left: list[int], status: PageStatus | None) -> list[Result]:
        order = list(left)
        if self._rng is not None:
            self._rng.shuffle(order)
        answers: list[Result] = []
        for index in order:
            found = self._read(command.pages[index]) if status is None else status
            answers.append(CopiedIn(command.token, index, bytes([found])))
        return answers

    def _do(self, command: Command) -> Result:
        disk = self.disk
        match command:
            case PopulateChunk(chunk_index):
                self._tier.populate_chunk(chunk_index)
                return ChunkPopulated(chunk_index, None)
            case MakeFile(file_index, slot_bytes):
                disk.files[file_index] = slot_bytes
                return FileMade(file_index, None)
            case CheckPages(token, pages):
                found = [self._check(*page) for page in pages]
                return PagesChecked(token, bytes(found))
            case CopyOut():
                return self._copy_out(command)
            case CheckCopies(token, pages):
                return CopiesChecked(token, bytes([self._hash(row) for row in pages]))
            case DropCopies(token, places):
                gone = {(place.file_index, place.slot_index) for place in places}
                disk.rows = {at: row for at, row in disk.rows.items() if at not in gone}
                return CopiesDropped(token, None)
            case SaveNamespace(token, namespace_id, record_bytes, epoch):
                disk.namespaces[namespace_id] = (record_bytes, epoch)
                return NamespaceSaved(token, None)
            case LoadRows(token, cursor):
                return self._rows(token, cursor)
            case CopyIn():
                raise AssertionError("answered page by page elsewhere")

    def _copy_out(self, command: CopyOut) -> Result:
        disk = self.disk
        for row in command.pages:
            where = (row.file_index, row.slot_index)
            assert where not in disk.rows, f"{where} has a row still"
            assert row.file_index in disk.files, "no such file"
            record = decode(row.record)
            assert record is not None
            assert record.slot == row.slot_index
            disk.pages[where] = os.pread(self._data, row.size_bytes, row.offset_bytes)
            disk.rows[where] = row.record
        return CopiedOut(command.token, bytes(len(command.pages)))

    def _rows(self, token: int, cursor: bytes) -> RowsLoaded:
        """Three rows at a time."""
        after = (-1, -1)
        if cursor:
            after = int.from_bytes(cursor[:4], "big"), int.from_bytes(cursor[4:], "big")
        places = [where for where in sorted(self.disk.rows) if where > after]
        chosen = places[:3]
        more = len(places) > len(chosen)
        last = b"".join(n.to_bytes(4, "big") for n in chosen[-1]) if more else b""
        raw = b"".join(n.to_bytes(4, "little") for where in chosen for n in where)
        records = b"".join(self.disk.rows[where] for where in chosen)
        return RowsLoaded(token, records, raw, last, None)

    def _check(self, raw: bytes, namespace_id: bytes, key: bytes) -> PageStatus:
        descriptor = Descriptor.decode(raw)
        page = os.pread(self._data, descriptor.size_bytes, descriptor.offset_bytes)
        return HIT if page_checksum(page, namespace_id, key) == descriptor.checksum else CORRUPT

    def _hash(self, row: CopyRow | CopyInRow) -> PageStatus:
        page = self.disk.pages.get((row.file_index, row.slot_index))
        if page is None:
            return UNAVAILABLE
        return HIT if page_checksum(page, row.namespace_id, row.key) == row.checksum else CORRUPT

    def _read(self, row: CopyInRow) -> PageStatus:
        page = self.disk.pages.get((row.file_index, row.slot_index))
        if page is not None:
            os.pwrite(self._data, page, row.offset_bytes)
        return self._hash(row)
