"""What carries out commands: hands each to the threads it is for, and sees that it is answered.

Three kinds of threads, none of them busy in Python: one for memory (populating, hashing in place),
`ssd_threads` for reads and writes of slab files, one for the catalogue. The index of who does what
is `take`. Any thread may call the answer function.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from nexuskv.errors import NexusError
from nexuskv.types import PageStatus
from nexuskv.worker.commands import (
    CheckPages,
    CheckRow,
    ChunkPopulated,
    Command,
    PagesChecked,
    PopulateChunk,
    Result,
    WorkerReady,
    failed,
)
from nexuskv.worker.lanes import Job, Pool

_LOG = logging.getLogger("nexuskv.worker")

Reply: TypeAlias = Callable[[int, Result], None]
"""Takes an answer and the sequence of its command; 0 for news. Called on any thread."""

NEWS: Final = 0


class MemoryTools(Protocol):
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
    """Carries out commands until `close`. `start` once."""

    def __init__(self, *, memory: MemoryTools, reply: Reply) -> None:
        self._memory = memory
        self._reply = reply
        self._chores = Pool("memory", 1)
        self._changed = threading.Condition()
        self._unanswered = 0

    def start(self) -> None:
        """Say hello."""
        self._reply(NEWS, WorkerReady(os.getpid(), self._memory.native, None, (), ()))

    def take(self, sequence: int, command: Command) -> None:
        """Begin a command; the answer comes through `reply`, on another thread."""
        with self._changed:
            self._unanswered += 1
        fail = functools.partial(self._fail, sequence, command)
        match command:
            case PopulateChunk(chunk_index):
                run = functools.partial(self._populate, sequence, chunk_index)
            case CheckPages(token, pages):
                run = functools.partial(self._check, sequence, token, pages)
            case _:
                fail("this worker serves no ssd tier")
                return
        self._chores.put(Job(run, fail))

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything taken is answered; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unanswered, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drop what has not begun, unanswered, and wait for the rest; whether it has ended."""
        return self._chores.close(timeout_s)

    def _populate(self, sequence: int, chunk_index: int) -> None:
        self._memory.populate_chunk(chunk_index)
        self._answer(sequence, ChunkPopulated(chunk_index, None))

    def _check(self, sequence: int, token: int, pages: tuple[CheckRow, ...]) -> None:
        statuses = bytes(self._check_one(page) for page in pages)
        self._answer(sequence, PagesChecked(token, statuses))

    def _check_one(self, page: CheckRow) -> PageStatus:
        try:
            return self._memory.check_page(*page)
        except NexusError as exc:
            _LOG.warning("a page in host memory cannot be checked: %s", exc)
            return PageStatus.UNAVAILABLE

    def _fail(self, sequence: int, command: Command, reason: str) -> None:
        self._answer(sequence, failed(command, reason))

    def _answer(self, sequence: int, result: Result) -> None:
        """The last answer of a command."""
        self._reply(sequence, result)
        with self._changed:
            self._unanswered -= 1
            self._changed.notify_all()
