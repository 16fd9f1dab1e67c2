"""Pages between host memory and ssd, and the catalogue that says which are there.

A batch is cut into parts that several threads work on. Loads are answered part by part; copies to
the ssd wait for each other at the end: what was written is made durable file by file, then the rows
of every batch that waits go into the catalogue at once, then all of them are answered.

Invariant: a row is written only after the bytes it names are durable.
"""

import functools
import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from nexuskv.errors import NexusError, OutOfSpace, Unavailable
from nexuskv.types import PAGE_ALIGN_BYTES, PageStatus
from nexuskv.worker.answers import Answers
from nexuskv.worker.commands import (
    Answer,
    CheckCopies,
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
    NamespaceSaved,
    RowsLoaded,
    SaveNamespace,
    failed,
)
from nexuskv.worker.health import Health
from nexuskv.worker.lanes import Job, Pool

if TYPE_CHECKING:
    from nexuskv.worker.ssd import Ssd

_LOG = logging.getLogger("nexuskv.worker")
_PART_BYTES: Final = 1 << 20  # of one thread's part of a batch; a part has one page at least
_COMMIT_PAGES_MAX: Final = 4096  # rows of one synced batch, but for the last batch in it
_LOAD_ROWS: Final = 4096  # of the catalogue, in one answer

_Row = TypeVar("_Row", CopyInRow, CopyOutRow, CopyRow)


class SlotMemory(Protocol):
    """Host slots, to be filled and emptied by the disk."""

    def slot(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """A slot's bytes, writable and page aligned; a `NexusError` when it is none."""
        ...

    def check_landed(
        self, offset_bytes: int, size_bytes: int, checksum: int, namespace_id: bytes, key: bytes
    ) -> PageStatus:
        """Hash a page in a slot: HIT or CORRUPT."""
        ...

    def check_apart(
        self, data: memoryview, checksum: int, namespace_id: bytes, key: bytes
    ) -> PageStatus:
        """Hash a page in other memory: HIT or CORRUPT."""
        ...


@dataclass(slots=True)
class _Batch:
    """A batch that is answered when the last of its parts is done."""

    statuses: bytearray
    parts_left: int
    finish: Callable[["_Batch"], None]
    guard: threading.Lock = field(default_factory=threading.Lock)

    def part_done(self, first: int, statuses: bytes) -> None:
        with self.guard:
            self.statuses[first : first + len(statuses)] = statuses
            self.parts_left -= 1
            last = not self.parts_left
        if last:
            self.finish(self)


@dataclass(frozen=True, slots=True)
class _Written:
    """A `CopyOut` whose pages are written and wait to be made durable."""

    sequence: int
    command: CopyOut
    statuses: bytearray


class Copying:
    """Carries out the commands of the ssd tier. Thread-safe."""

    def __init__(
        self,
        *,
        ssd: "Ssd",
        memory: SlotMemory,
        answers: Answers,
        health: Health,
        transfers: Pool,
        catalogue: Pool,
        thread_count: int,
    ) -> None:
        self._ssd = ssd
        self._memory = memory
        self._answers = answers
        self._health = health
        self._transfers = transfers
        self._catalogue = catalogue
        self._thread_count = thread_count
        self._written: deque[_Written] = deque()
        self._committing: list[_Written] = []  # catalogue thread

    def take(self, sequence: int, command: Command) -> None:
        """Begin a command."""
        match command:
            case CopyIn():
                self._copy_in(sequence, command)
            case CopyOut():
                self._copy_out(sequence, command)
            case CheckCopies():
                self._check_copies(sequence, command)
            case MakeFile():
                self._put(self._transfers, sequence, command, self._make_file)
            case _:
                self._put(self._catalogue, sequence, command, self._use_catalogue)

    # --- ssd to host

    def _copy_in(self, sequence: int, command: CopyIn) -> None:
        parts = _parts(command.pages, self._thread_count) or [(0, ())]
        self._answers.owe(len(parts))
        for first, rows in parts:

            def answer(statuses: bytes, first: int = first) -> None:
                self._answers.give(sequence, CopiedIn(command.token, first, statuses))

            run = functools.partial(self._run_part, rows, self._load, answer)
            fail = functools.partial(_fail_part, len(rows), answer)
            self._transfers.put(Job(run, fail), urgent=True)

    def _load(self, row: CopyInRow) -> PageStatus:
        with self._memory.slot(row.offset_bytes, row.size_bytes) as slot:
            self._ssd.slabs.read_into(
                slot,
                file_index=row.file_index,
                slot_index=row.slot_index,
                size_bytes=row.size_bytes,
            )
        return self._memory.check_landed(
            row.offset_bytes, row.size_bytes, row.checksum, row.namespace_id, row.key
        )

    # --- looking at what the ssd holds

    def _check_copies(self, sequence: int, command: CheckCopies) -> None:
        def finish(batch: _Batch) -> None:
            self._answers.give(sequence, CopiesChecked(command.token, bytes(batch.statuses)))

        self._answers.owe()
        self._start(command.pages, self._check, finish)

    def _check(self, row: CopyRow) -> PageStatus:
        with (
            mmap.mmap(-1, _rounded_up(row.size_bytes)) as scratch,
            memoryview(scratch) as whole,
        ):
            self._ssd.slabs.read_into(
                whole,
                file_index=row.file_index,
                slot_index=row.slot_index,
                size_bytes=row.size_bytes,
            )
            with whole[: row.size_bytes] as page:
                return self._memory.check_apart(page, row.checksum, row.namespace_id, row.key)

    # --- host to ssd

    def _copy_out(self, sequence: int, command: CopyOut) -> None:
        def finish(batch: _Batch) -> None:
            self._written.append(_Written(sequence, command, batch.statuses))
            self._catalogue.put(Job(self._commit, self._fail_commit))

        self._answers.owe()
        self._start(command.pages, self._write, finish)

    def _write(self, row: CopyOutRow) -> PageStatus:
        with self._memory.slot(row.offset_bytes, row.size_bytes) as slot:
            self._ssd.slabs.write_from(
                slot,
                file_index=row.file_index,
                slot_index=row.slot_index,
                size_bytes=row.size_bytes,
            )
        return PageStatus.HIT

    def _commit(self) -> None:
        """Make every batch that waits durable, and answer it. Catalogue thread."""
        pages = 0
        while self._written and pages < _COMMIT_PAGES_MAX:
            self._committing.append(self._written.popleft())
            pages += len(self._committing[-1].statuses)
        self._sync_files()
        self._put_rows()
        while self._committing:
            each = self._committing.pop()
            answer = CopiedOut(each.command.token, bytes(each.statuses))
            self._answers.give(each.sequence, answer)

    def _sync_files(self) -> None:
        """Make the bytes durable; pages of a file where that fails have failed."""
        for file_index in sorted({row.file_index for _, _, row in self._good()}):
            status = self._attempt(functools.partial(self._ssd.slabs.sync, {file_index}))
            for statuses, at, row in self._good():
                if row.file_index == file_index:
                    statuses[at] = status

    def _put_rows(self) -> None:
        good = self._good()
        rows = [(row.file_index, row.slot_index, row.record) for _, _, row in good]
        if rows:
            status = self._attempt(functools.partial(self._ssd.put_rows, rows))
            for statuses, at, _ in good:
                statuses[at] = status

    def _good(self) -> list[tuple[bytearray, int, CopyOutRow]]:
        """The pages under way that have not failed: where their status is, and their row."""
        return [
            (each.statuses, at, row)
            for each in self._committing
            for at, row in enumerate(each.command.pages)
            if each.statuses[at] == PageStatus.HIT
        ]

    def _fail_commit(self, reason: str) -> None:
        """Something unforeseen broke the commit: nobody knows what of it is there."""
        while self._committing:
            each = self._committing.pop()
            self._answers.give(each.sequence, failed(each.command, reason))

    # --- files and catalogue

    def _make_file(self, command: Command) -> Answer:
        assert isinstance(command, MakeFile)
        self._ssd.slabs.make(command.file_index, command.slot_bytes)
        return FileMade(command.file_index, None)

    def _use_catalogue(self, command: Command) -> Answer:
        catalogue = self._ssd.catalogue
        match command:
            case DropCopies(token, places):
                catalogue.delete(places)
                return CopiesDropped(token, None)
            case SaveNamespace(token, namespace_id, record, epoch):
                catalogue.save_namespace(namespace_id, record, epoch)
                return NamespaceSaved(token, None)
            case LoadRows(token, cursor):
                return RowsLoaded(token, *catalogue.rows(cursor, _LOAD_ROWS), None)
            case _:
                return failed(command, "this is no command of the ssd tier")

    def _put(
        self, pool: Pool, sequence: int, command: Command, carry_out: Callable[[Command], Answer]
    ) -> None:
        """Queue a command that has one answer."""

        def run() -> None:
            try:
                answer = carry_out(command)
            except NexusError as exc:
                self._note(exc)
                raise
            self._health.note_success()
            self._answers.give(sequence, answer)

        def fail(reason: str) -> None:
            self._answers.give(sequence, failed(command, reason))

        self._answers.owe()
        pool.put(Job(run, fail))

    # --- parts

    def _start(
        self,
        rows: Sequence[_Row],
        do: Callable[[_Row], PageStatus],
        finish: Callable[[_Batch], None],
    ) -> None:
        """Work on a batch in the background; `finish` it when all parts are done."""
        parts = _parts(rows, self._thread_count) or [(0, ())]
        unknown = bytes((PageStatus.UNAVAILABLE,)) * len(rows)
        batch = _Batch(bytearray(unknown), len(parts), finish)
        for first, part in parts:
            answer = functools.partial(batch.part_done, first)
            run = functools.partial(self._run_part, part, do, answer)
            self._transfers.put(Job(run, functools.partial(_fail_part, len(part), answer)))

    def _run_part(
        self,
        rows: Sequence[_Row],
        do: Callable[[_Row], PageStatus],
        answer: Callable[[bytes], None],
    ) -> None:
        answer(bytes(self._attempt(functools.partial(do, row)) for row in rows))

    def _attempt(self, do: Callable[[], PageStatus | None]) -> PageStatus:
        """What became of it: its own status, HIT for None, or that of its error."""
        if self._health.failed is not None:
            return PageStatus.UNAVAILABLE
        try:
            status = do()
        except NexusError as exc:
            self._note(exc)
            return PageStatus.NO_SPACE if isinstance(exc, OutOfSpace) else PageStatus.UNAVAILABLE
        self._health.note_success()
        return PageStatus.HIT if status is None else status

    def _note(self, error: NexusError) -> None:
        """An error of the disk counts against it; one of a command does not."""
        if isinstance(error, Unavailable | OutOfSpace):
            self._health.note_error(str(error))
        else:
            _LOG.error("an ssd command is wrong: %s", error)


def _rounded_up(size_bytes: int) -> int:
    """Whole blocks, one at least: no mapping is empty."""
    return max(1, -(-size_bytes // PAGE_ALIGN_BYTES)) * PAGE_ALIGN_BYTES


def _parts(rows: Sequence[_Row], thread_count: int) -> list[tuple[int, Sequence[_Row]]]:
    """Cut a batch so that all threads have something to do, with the index of each first page."""
    pages_max = -(-len(rows) // thread_count)
    parts: list[tuple[int, Sequence[_Row]]] = []
    start = size_bytes = 0
    for at, row in enumerate(rows):
        size_bytes += row.size_bytes
        if at + 1 - start >= pages_max or size_bytes >= _PART_BYTES:
            parts.append((start, rows[start : at + 1]))
            start, size_bytes = at + 1, 0
    if start < len(rows):
        parts.append((start, rows[start:]))
    return parts


def _fail_part(count: int, answer: Callable[[bytes], None], _reason: str) -> None:
    answer(bytes((PageStatus.UNAVAILABLE,)) * count)
