"""Supervised workers for tests: real ones, ones that misbehave, and one that cannot be killed."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from nexuskv.clock import Clock, MonotonicClock
from nexuskv.control.counters import Counters
from nexuskv.control.supervisor import Limits, StartWorker, Supervisor
from nexuskv.control.worker_process import WorkerProcess
from nexuskv.tiers.host import HostTier
from nexuskv.worker.commands import Result, WorkerLost, WorkerReady
from tests.worker.settings import settings_of

PATIENCE_S = 20.0
CHUNK_BYTES = 1 << 20

# Says that it is ready, takes one command and then does `{act}`, with `link` and its `sequence`.
MISBEHAVING = """
import os, socket, sys, signal
from nexuskv.worker.__main__ import Link
from nexuskv.worker.codec import *
from nexuskv.worker.commands import *
end = socket.socket(fileno=int(sys.argv[1]))
link = Link(end)
link.receive()
link.send(0, WorkerReady(os.getpid(), "bad", None, (), ()))
sequence, command = link.receive()
{act}
signal.pause()
"""


def run_script(script: str) -> WorkerProcess:
    """Start a Python program in a worker's place; its first argument is the socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
        )
    ours.setblocking(False)
    return WorkerProcess(process, os.pidfd_open(process.pid), ours)


class Immortal(WorkerProcess):
    """A worker in a state that no signal ends, until `die`: SIGKILL only stops it."""

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def die(self) -> None:
        super().kill()


class Watched:
    """A supervisor with a tier and a loop of its own. `close` ends all."""

    def __init__(
        self,
        folder: Path,
        start: StartWorker | None = None,
        *,
        clock: Clock | None = None,
        queue_max: int = 64,
        socket_bytes_max: int = 1 << 20,
        timeout_s: float = PATIENCE_S,
        backoff_min_s: float = 0.01,
        backoff_max_s: float = 0.05,
        reap_s: float = PATIENCE_S,
    ) -> None:
        self.tier = HostTier.open(
            folder=folder,
            capacity_bytes=4 * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            huge_pages=False,
            incarnation=bytes(8),
        )
        self.clock = clock or MonotonicClock()
        self.counters = Counters()
        self.started: list[int] = []
        self.failed_starts: list[str] = []
        self.results: list[Result] = []
        self.supervisor = Supervisor(
            start_worker=start or self.start_real,
            settings=settings_of(self.tier),
            limits=Limits(
                queue_max=queue_max,
                socket_bytes_max=socket_bytes_max,
                timeout_s=timeout_s,
                backoff_min_s=backoff_min_s,
                backoff_max_s=backoff_max_s,
                reap_s=reap_s,
            ),
            clock=self.clock,
            counters=self.counters,
            on_start=self.started.append,
            on_failed_start=self.failed_starts.append,
        )

    def __enter__(self) -> Self:
        self.supervisor.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.supervisor.close(PATIENCE_S)
        self.tier.close(unlink=True)

    def start_real(self) -> WorkerProcess:
        return WorkerProcess.start(executable=sys.executable, lock_fd=self.tier.lock.fileno())

    @property
    def pid(self) -> int:
        return self.started[-1]

    def turn(self, wait_s: float = 0.0) -> None:
        """One turn of a loop."""
        select.select([self.supervisor], [], [], wait_s)
        self.results += self.supervisor.completed()
        due_s, now_s = self.supervisor.next_due(), self.clock.now()
        if due_s is not None and due_s <= now_s:
            self.supervisor.tick(now_s)

    def until(self, condition: Callable[[], object]) -> None:
        """Turn until something is so; it must become so."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"it never came to be: {self.results}"
            self.turn(0.01)

    def until_ready(self, count: int = 1) -> None:
        """Turn until `count` workers have been ready."""
        self.until(lambda: len(self.of(WorkerReady)) >= count)

    def until_lost(self, count: int) -> None:
        """Turn until `count` workers have been lost."""
        self.until(lambda: len(self.of(WorkerLost)) >= count)

    def of(self, kind: type[Result]) -> list[Result]:
        """The results of a kind so far."""
        return [result for result in self.results if isinstance(result, kind)]

    def counter(self, name: str) -> int:
        return self.counters.snapshot()[name]
