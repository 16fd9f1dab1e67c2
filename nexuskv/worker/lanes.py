"""The worker's threads: pools that carry out jobs, the urgent ones first.

A pool outlives any error of a job. Its queue is bounded by what control leaves unanswered
(`worker_queue_max` commands). Thread-safe.

One of the outer edges: an unexpected fault of a job is logged and becomes its failed answer.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nexuskv.errors import NexusError

_LOG = logging.getLogger("nexuskv.worker")


@dataclass(frozen=True, slots=True)
class Job:
    """`run` does it; `fail` is told why when it raised. Both must see to the answer."""

    run: Callable[[], None]
    fail: Callable[[str], None]


class Pool:
    """Some threads and two queues. Start with the first job; `close` is idempotent.

    Background jobs never hold more than half of the threads (one at least), so that urgent ones
    find some free; urgent jobs leave a waiting background job one thread, so that it ends.
    """

    def __init__(self, name: str, thread_count: int) -> None:
        self._name = name
        self._thread_count = thread_count
        self._background_max = max(1, thread_count // 2)
        self._changed = threading.Condition()
        self._urgent: deque[Job] = deque()
        self._background: deque[Job] = deque()
        self._background_running = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    def put(self, job: Job, *, urgent: bool = False) -> None:
        """Queue a job. After `close` it fails at once."""
        with self._changed:
            if not self._closed:
                (self._urgent if urgent else self._background).append(job)
                if len(self._threads) < self._thread_count:
                    self._add_thread()
                self._changed.notify()
                return
        job.fail("the worker ends")

    def close(self, timeout_s: float) -> bool:
        """Drop what is queued, unanswered, and wait for what runs; whether it has ended."""
        with self._changed:
            self._closed = True
            self._urgent.clear()
            self._background.clear()
            self._changed.notify_all()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _add_thread(self) -> None:
        # A daemon thread: a process that must exit does not wait for a disk.
        name = f"nexuskv-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _work(self) -> None:
        while (found := self._next()) is not None:
            job, urgent = found
            _carry_out(job)
            if not urgent:
                with self._changed:
                    self._background_running -= 1
                    self._changed.notify()

    def _next(self) -> tuple[Job, bool] | None:
        """The next job and whether it is urgent; waits for one. None when closed."""
        with self._changed:
            while not self._closed:
                if self._urgent and not self._owes_background():
                    return self._urgent.popleft(), True
                if self._background and self._background_running < self._background_max:
                    self._background_running += 1
                    return self._background.popleft(), False
                self._changed.wait()
        return None

    def _owes_background(self) -> bool:
        """Whether this thread must take a background job though urgent ones wait."""
        return bool(self._background) and not self._background_running and self._thread_count > 1


def _carry_out(job: Job) -> None:
    try:
        job.run()
    except NexusError as exc:
        job.fail(str(exc) or type(exc).__name__)
    except Exception as exc:  # noqa: BLE001  # outer edge: the thread must go on serving
        _LOG.exception("a job broke")
        job.fail(str(exc) or type(exc).__name__)
