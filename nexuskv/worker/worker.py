"""The worker: a low-priority thread that carries out commands which touch page memory.

Commands wait in a bounded queue, results until they are collected; both together never exceed
`queue_max`. Results raise an eventfd, so that the control loop polls it like a socket. Every
accepted command is answered once, unless the worker is closed first. The thread outlives any error
of a command. Thread-safe.
"""

import contextlib
import logging
import os
import threading
from collections import deque
from types import TracebackType
from typing import Final, Protocol, Self

from nexuskv.errors import NexusError, Unavailable
from nexuskv.types import PageStatus
from nexuskv.worker.commands import (
    ChunkPopulated,
    Command,
    PageChecked,
    PopulateChunk,
    Result,
    failed,
)

_LOG = logging.getLogger("nexuskv.worker")
_NICE: Final = 19


class WorkerTools(Protocol):
    """What the worker can do. Called on its thread; may take seconds; must release the GIL."""

    def populate_chunk(self, chunk_index: int) -> None:
        """Reserve one chunk's memory; a `NexusError` when it cannot be had."""
        ...

    def check_page(self, descriptor: bytes, namespace_id: bytes, key: bytes) -> PageStatus:
        """Hash a page where it lies; a `NexusError` when it cannot be read."""
        ...


class Worker:
    """One thread behind a bounded queue. `start` it once; `close` is idempotent."""

    def __init__(self, *, queue_max: int, run: WorkerTools) -> None:
        """Take commands, up to `queue_max` unanswered ones, for the tools in `run`."""
        self._queue_max = queue_max
        self._run = run
        self._changed = threading.Condition()
        self._queue: deque[Command] = deque()
        self._results: deque[Result] = deque()
        self._running = 0
        self._failed_count = 0
        self._closed = False
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A daemon thread: a process that must exit does not wait for a kernel call.
        self._thread = threading.Thread(target=self._work, name="nexuskv-worker", daemon=True)

    def start(self) -> None:
        """Start the thread. Commands may be submitted before."""
        self._thread.start()

    def submit(self, command: Command) -> bool:
        """Queue a command; False when `queue_max` are unanswered or the worker is closed."""
        with self._changed:
            waiting = len(self._queue) + self._running + len(self._results)
            if self._closed or waiting >= self._queue_max:
                return False
            self._queue.append(command)
            self._changed.notify()
        return True

    def completed(self) -> list[Result]:
        """The results since the last call, in the order of their commands. Never waits."""
        with self._changed:
            if self._closed:
                return []
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._eventfd)
            results = list(self._results)
            self._results.clear()
        return results

    def fileno(self) -> int:
        """An eventfd that is readable while results wait.

        Raises:
            Unavailable: the worker is closed.
        """
        if self._closed:
            raise Unavailable("the worker is closed")
        return self._eventfd

    @property
    def failed_count(self) -> int:
        """Commands that ended in an error."""
        return self._failed_count

    def close(self, timeout_s: float) -> bool:
        """Drop what is queued or uncollected and wait for the running command. Idempotent.

        Args:
            timeout_s: how long to wait at most.

        Returns:
            Whether the thread has ended. If not, it ends by itself after its command.
        """
        with self._changed:
            self._queue.clear()
            self._results.clear()
            if not self._closed:
                self._closed = True
                os.close(self._eventfd)
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(0)

    def _work(self) -> None:
        _lower_priority()
        while (command := self._next()) is not None:
            try:
                result = _execute(self._run, command)
            except NexusError as exc:
                result = self._note_failure(command, exc)
            except Exception as exc:  # noqa: BLE001  # outer edge: the thread must go on serving
                _LOG.exception("%s broke the worker's command", command)
                result = self._note_failure(command, exc)
            self._finish(result)

    def _next(self) -> Command | None:
        """The next command; waits for one. None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue)
            if self._closed:
                return None
            self._running = 1
            return self._queue.popleft()

    def _finish(self, result: Result) -> None:
        with self._changed:
            self._running = 0
            if not self._closed:
                self._results.append(result)
                os.eventfd_write(self._eventfd, 1)

    def _note_failure(self, command: Command, exc: Exception) -> Result:
        self._failed_count += 1
        return failed(command, str(exc) or type(exc).__name__)


def _execute(tools: WorkerTools, command: Command) -> Result:
    if isinstance(command, PopulateChunk):
        tools.populate_chunk(command.chunk_index)
        return ChunkPopulated(command.chunk_index, None)
    status = tools.check_page(command.descriptor, command.namespace_id, command.key)
    return PageChecked(command.token, status)


def _lower_priority() -> None:
    """Let lookups and engines go first; a kernel that forbids it costs only latency."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)
