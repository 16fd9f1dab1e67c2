"""What carries out commands: hands each to the threads it is for, and sees that it is answered.

Three kinds of threads, none of them busy in Python: one for memory (populating, hashing in place),
`ssd_threads` for reads and writes of slab files, one for the catalogue. Host memory never waits for
the ssd, not even for it to be opened.
"""

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from nexuskv.errors import ConfigError, NexusError
from nexuskv.types import PageStatus
from nexuskv.worker.answers import Answers, Reply
from nexuskv.worker.commands import (
    CheckPages,
    CheckRow,
    ChunkPopulated,
    Command,
    PagesChecked,
    PopulateChunk,
    SsdFailed,
    WorkerReady,
    failed,
)
from nexuskv.worker.copying import Copying, SlotMemory
from nexuskv.worker.health import Health
from nexuskv.worker.lanes import Job, Pool

if TYPE_CHECKING:
    from nexuskv.worker.ssd import Ssd

_LOG = logging.getLogger("nexuskv.worker")


class MemoryTools(SlotMemory, Protocol):
    """What the engine does with host memory. May take seconds; must release the GIL."""

    @property
    def native(self) -> str:
        """Which copying code is in use."""
        ...

    def populate_chunk(self, chunk_index: int) -> None:
        """Reserve one chunk's memory; a `NexusError` when it cannot be had."""
        ...

    def check_page(self, descriptor: bytes, namespace_id: bytes, key: bytes) -> PageStatus:
        """Hash a page where it lies; a `NexusError` when it cannot be read."""
        ...


class Engine:
    """Carries out commands from `start` to `close`."""

    def __init__(
        self,
        *,
        memory: MemoryTools,
        reply: Reply,
        open_ssd: "Callable[[], Ssd] | None" = None,
        ssd_threads: int = 1,
        ssd_errors_max: int = 1,
    ) -> None:
        """Work for the segment in `memory` and, with `open_ssd`, for an ssd folder."""
        self._memory = memory
        self._open_ssd = open_ssd
        self._answers = Answers(reply)
        self._health = Health(
            errors_max=ssd_errors_max,
            on_failed=lambda reason: self._answers.tell(SsdFailed(reason)),
        )
        self._chores = Pool("memory", 1)
        self._catalogue = Pool("catalogue", 1)
        self._transfers = Pool("ssd", ssd_threads)
        self._thread_count = ssd_threads
        self._copying: Copying | None = None
        self._ssd: Ssd | None = None

    def start(self) -> None:
        """Open the ssd, if there is one, in the background; then say hello."""
        if self._open_ssd is None:
            self._say_ready(None)
        else:
            opening = functools.partial(self._begin_ssd, self._open_ssd)
            self._catalogue.put(Job(opening, self._say_ready))

    def take(self, sequence: int, command: Command) -> None:
        """Begin a command; the answer comes through `reply`, on another thread."""
        match command:
            case PopulateChunk(chunk_index):
                run = functools.partial(self._populate, sequence, chunk_index)
            case CheckPages(token, pages):
                run = functools.partial(self._check, sequence, token, pages)
            case _:
                self._take_ssd(sequence, command)
                return
        self._answers.owe()
        self._chores.put(Job(run, functools.partial(self._fail, sequence, command)))

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything taken is answered; whether it is."""
        return self._answers.wait_all(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drop what has not begun, unanswered, and wait for the rest; whether it has ended."""
        deadline_s = time.monotonic() + timeout_s
        pools = (self._chores, self._transfers, self._catalogue)
        ended = [pool.close(max(0.0, deadline_s - time.monotonic())) for pool in pools]
        if all(ended) and self._ssd is not None:
            self._ssd.close()
        return all(ended)

    # --- host memory

    def _populate(self, sequence: int, chunk_index: int) -> None:
        self._memory.populate_chunk(chunk_index)
        self._answers.give(sequence, ChunkPopulated(chunk_index, None))

    def _check(self, sequence: int, token: int, pages: tuple[CheckRow, ...]) -> None:
        statuses = bytes(self._check_one(page) for page in pages)
        self._answers.give(sequence, PagesChecked(token, statuses))

    def _check_one(self, page: CheckRow) -> PageStatus:
        try:
            return self._memory.check_page(*page)
        except NexusError as exc:
            _LOG.warning("a page in host memory cannot be checked: %s", exc)
            return PageStatus.UNAVAILABLE

    # --- ssd

    def _begin_ssd(self, open_ssd: "Callable[[], Ssd]") -> None:
        try:
            ssd = open_ssd()
        except ConfigError as exc:
            self._say_ready(str(exc), refused=True)
            return
        self._ssd = ssd
        self._copying = Copying(
            ssd=ssd,
            memory=self._memory,
            answers=self._answers,
            health=self._health,
            transfers=self._transfers,
            catalogue=self._catalogue,
            thread_count=self._thread_count,
        )
        self._say_ready(None)

    def _say_ready(self, ssd_error: str | None, *, refused: bool = False) -> None:
        if ssd_error is not None:
            _LOG.error("there is no ssd: %s", ssd_error)
        ssd = None if ssd_error is not None else self._ssd
        files = () if ssd is None else ssd.files()
        namespaces = () if ssd is None else ssd.namespaces()
        self._answers.tell(
            WorkerReady(os.getpid(), self._memory.native, ssd_error, files, namespaces, refused)
        )

    def _take_ssd(self, sequence: int, command: Command) -> None:
        copying, reason = self._copying, self._health.failed
        if copying is not None and reason is None:
            copying.take(sequence, command)
        else:
            self._answers.owe()
            self._fail(sequence, command, reason or "this worker serves no ssd tier")

    def _fail(self, sequence: int, command: Command, reason: str) -> None:
        self._answers.give(sequence, failed(command, reason))
