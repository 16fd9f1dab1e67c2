"""A worker in a thread of this process: the engine itself behind the same `CommandQueue`.

For tests of control that need real answers, but no process. Answers of commands wait until they are
collected; both together never exceed `queue_max`.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from itertools import count

from nexuskv.errors import Unavailable
from nexuskv.worker.answers import NEWS
from nexuskv.worker.commands import Command, CopiedIn, Result
from nexuskv.worker.engine import Engine, MemoryTools
from nexuskv.worker.ssd import Ssd


class InProcessWorker:
    """`start` it once; `close` is idempotent."""

    def __init__(
        self,
        *,
        queue_max: int,
        memory: MemoryTools,
        open_ssd: Callable[[], Ssd] | None = None,
        ssd_threads: int = 1,
        ssd_errors_max: int = 1,
    ) -> None:
        self._queue_max = queue_max
        self._guard = threading.Lock()
        self._open: dict[int, int] = {}  # pages of a command that are not answered yet
        self._answers = 0  # uncollected
        self._results: list[Result] = []
        self._sequences = count(1)
        self._closed = False
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.engine = Engine(
            memory=memory,
            reply=self._reply,
            open_ssd=open_ssd,
            ssd_threads=ssd_threads,
            ssd_errors_max=ssd_errors_max,
        )

    def start(self) -> None:
        """Let the engine say that it is ready."""
        self.engine.start()

    def submit(self, command: Command) -> bool:
        """Begin a command; False when `queue_max` are unanswered or the worker is closed."""
        with self._guard:
            if self._closed or len(self._open) + self._answers >= self._queue_max:
                return False
            sequence = next(self._sequences)
            self._open[sequence] = len(getattr(command, "pages", ()))
        self.engine.take(sequence, command)
        return True

    def completed(self) -> list[Result]:
        """The results since the last call. Never waits."""
        with self._guard:
            if self._closed:
                return []
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._eventfd)
            results, self._results, self._answers = self._results, [], 0
        return results

    def fileno(self) -> int:
        """An eventfd that is readable while results wait."""
        if self._closed:
            raise Unavailable("the worker is closed")
        return self._eventfd

    def close(self, timeout_s: float) -> bool:
        """Drop what is queued or uncollected and wait for what runs; whether it has ended."""
        with self._guard:
            if not self._closed:
                self._closed = True
                os.close(self._eventfd)
        return self.engine.close(timeout_s)

    def _reply(self, sequence: int, result: Result) -> None:
        with self._guard:
            if self._closed:
                return
            if sequence != NEWS:
                answered = len(result.statuses) if isinstance(result, CopiedIn) else None
                self._open[sequence] -= answered or 0
                if answered is None or not self._open[sequence]:
                    del self._open[sequence]
                    self._answers += 1
            self._results.append(result)
            os.eventfd_write(self._eventfd, 1)
