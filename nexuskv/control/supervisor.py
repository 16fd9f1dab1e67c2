"""The worker process from control's side: starts it, asks it, watches it, replaces it.

A `CommandQueue` without a thread. One descriptor (an epoll set of its own) is readable whenever
something is to be done; `completed` does it, `tick` does what time brings. Invariants: at most one
worker lives at a time; what a worker left unanswered is answered as failed only after the process
was reaped, so that whoever hears of a failure knows that nobody writes any more (I14); a worker
that fails again and again is started ever more rarely.

Control thread only. Nothing here waits, but for `close`.
"""

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from nexuskv.clock import Clock
from nexuskv.control.channel import Channel
from nexuskv.control.counters import Counters
from nexuskv.control.unanswered import Unanswered
from nexuskv.control.worker_process import WorkerHandle
from nexuskv.errors import ProtocolError, Unavailable
from nexuskv.worker.codec import Finish, Ping, WorkerSettings, decode, encode
from nexuskv.worker.commands import Command, Result, SsdFailed, WorkerLost, WorkerReady

_LOG = logging.getLogger("nexuskv.control")
_READS_MAX: Final = 8  # at a time: what is left keeps the descriptor readable
_LAST_READS_MAX: Final = 1024  # of a dead worker: a socket's buffer holds less
_PING_SHARE: Final = 4  # an idle worker is asked this often in a timeout
_POLL_MAX: Final = 4


class StartWorker(Protocol):
    """Makes a worker process; `OSError` when that cannot be done."""

    def __call__(self) -> WorkerHandle:
        """Start one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of a supervisor; `worker_…` of the configuration."""

    queue_max: int  # commands without an answer
    socket_bytes_max: int  # unsent, and of one message
    timeout_s: float  # of a command
    backoff_min_s: float
    backoff_max_s: float
    reap_s: float


class Supervisor:
    """Keeps one worker running from `start` to `close`."""

    def __init__(
        self,
        *,
        start_worker: StartWorker,
        settings: WorkerSettings,
        limits: Limits,
        clock: Clock,
        counters: Counters,
        on_start: Callable[[int], None] = lambda _pid: None,
        on_failed_start: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Watch over workers that `start_worker` makes.

        Args:
            start_worker: makes a process.
            settings: what each is told first.
            limits: the bounds.
            clock: for deadlines and backoff.
            counters: `worker_starts`, `worker_lost`.
            on_start: told the pid of each new worker.
            on_failed_start: told why the very first worker ended by itself before it was ready, and
                no other is started; or why the ssd folder is not for us. One that a signal ended
                says nothing about the next.
        """
        self._start_worker = start_worker
        self._settings = settings
        self._limits = limits
        self._clock = clock
        self._counters = counters
        self._on_start = on_start
        self._on_failed_start = on_failed_start
        self._unanswered = Unanswered(commands_max=limits.queue_max, timeout_s=limits.timeout_s)
        self._results: list[Result] = []
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._closed = False
        # --- of the worker that lives now
        self._worker: WorkerHandle | None = None
        self._channel: Channel | None = None
        self._awaits_room = False
        self._heard_s = 0.0
        self._ready_s: float | None = None
        self._dying: str | None = None  # why; it was killed and is not reaped
        self._garbled = False  # nothing it sent is to be believed
        self._reap_due_s: float | None = None
        # --- of the one to come
        self._failures = 0  # in a row
        self._served = False  # whether any was ever ready
        self._restart_s: float | None = None

    # --- the command queue

    def submit(self, command: Command) -> bool:
        """Send a command; False when a bound is reached or no worker runs."""
        if self._worker is None or self._dying is not None or self._unanswered.full:
            return False
        return self._ask(command)

    def completed(self) -> list[Result]:
        """Do what is to be done; the answers and news since the last call. Never waits."""
        if self._closed:
            return []
        for fd, events in self._epoll.poll(0, _POLL_MAX):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif self._worker is not None and fd == self._worker.pidfd:
                self._ended()
            elif self._worker is not None and self._dying is None:
                self._exchange(events)
        results, self._results = self._results, []
        return results

    def fileno(self) -> int:
        """Readable while `completed` has something to do.

        Raises:
            Unavailable: the supervisor is closed.
        """
        if self._closed:
            raise Unavailable("the worker's supervisor is closed")
        return self._epoll.fileno()

    # --- time

    def next_due(self) -> float | None:
        """When `tick` wants to run next."""
        if self._worker is None:
            return self._restart_s
        if self._dying is not None:
            return self._reap_due_s
        due_s = self._unanswered.due_s
        return self._heard_s + self._ping_s if due_s is None else due_s

    def tick(self, now_s: float) -> None:
        """Replace what hangs, ask what is silent, start what is due."""
        due_s = self.next_due()
        if due_s is None or due_s > now_s or self._closed:
            return
        if self._worker is None:
            self.start()
        elif self._dying is not None:
            self._reap_due_s = None
            _LOG.error(
                "worker %d was killed %g s ago and is not gone (%s): what it writes to stays out "
                "of use until it is", self._worker.pid, self._limits.reap_s, self._dying,
            )  # fmt: skip
        elif self._unanswered.due_s is None:
            self._ask(Ping())
        else:
            waited = f"{self._unanswered.oldest} for {self._limits.timeout_s:g} s"
            self._kill(f"it did not answer {waited}")

    # --- its life

    def start(self) -> None:
        """Start a worker; when that fails, another is due later. Commands may follow at once."""
        self._restart_s = None
        try:
            worker = self._start_worker()
        except OSError as exc:
            self._fail_start(f"a worker process cannot be made: {exc}", by_itself=True)
            return
        self._counters.add("worker_starts")
        self._worker = worker
        self._heard_s = self._clock.now()
        self._ready_s = None
        self._epoll.register(worker.pidfd, select.EPOLLIN)
        self._epoll.register(worker.end.fileno(), select.EPOLLIN)
        self._channel = Channel(worker.end, bytes_max=self._limits.socket_bytes_max)
        self._awaits_room = self._garbled = False
        self._on_start(worker.pid)
        self._send(encode(0, self._settings))

    def gauges(self) -> dict[str, int]:
        """`worker_pid` (0: none runs), `worker_unanswered`, `worker_unreaped`."""
        return {
            "worker_pid": self._worker.pid if self._worker is not None else 0,
            "worker_unanswered": len(self._unanswered),
            "worker_unreaped": int(self._dying is not None and self._reap_due_s is None),
        }

    def close(self, timeout_s: float) -> bool:
        """Let the worker finish what runs, then end it. Waits; nothing is answered any more.

        Args:
            timeout_s: how long it may take before it is killed.

        Returns:
            Whether it is gone. If not, it cannot be killed; it keeps the instance's lock.
        """
        if self._closed:
            return self._worker is None
        self._closed = True
        worker = self._worker
        gone = worker is None or self._finish(worker, timeout_s)
        self._epoll.close()
        os.close(self._wake_fd)
        if worker is not None:
            worker.close()
            self._worker = None if gone else worker
        return gone

    def _finish(self, worker: WorkerHandle, timeout_s: float) -> bool:
        """Ask a worker to end, wait, kill it, wait again; whether it is gone."""
        if self._dying is None and self._channel is not None:
            self._channel.send(encode(0, Finish()))
            _wait_for_end(worker, self._channel, timeout_s)
        if worker.reap() is None:
            worker.kill()
            _poll({worker.pidfd: select.POLLIN}, self._limits.reap_s)
        gone = worker.reap() is not None
        if not gone:
            _LOG.error("worker %d cannot be ended", worker.pid)
        return gone

    @property
    def _ping_s(self) -> float:
        return self._limits.timeout_s / _PING_SHARE

    def _kill(self, reason: str) -> None:
        """End the worker. What it left unanswered waits until it is gone."""
        assert self._worker is not None
        _LOG.error("worker %d is killed: %s", self._worker.pid, reason)
        self._dying = reason
        self._reap_due_s = self._clock.now() + self._limits.reap_s
        self._epoll.unregister(self._worker.end.fileno())
        self._worker.kill()

    def _ended(self) -> None:
        """The worker is gone for good: take its last words, then fail what it left."""
        worker = self._worker
        assert worker is not None
        status = worker.reap()
        if status is None:
            return
        reason = self._dying or f"it ended by itself with status {status}"
        if self._dying is None:
            self._epoll.unregister(worker.end.fileno())
        self._epoll.unregister(worker.pidfd)
        if self._channel is not None and not self._garbled:
            with contextlib.suppress(ProtocolError):
                self._receive(self._channel, reads_max=_LAST_READS_MAX)
        self._worker = self._channel = self._dying = self._reap_due_s = None
        worker.close()
        self._counters.add("worker_lost")
        _LOG.error("worker %d is lost: %s", worker.pid, reason)
        self._results.append(WorkerLost(reason))
        self._results += self._unanswered.fail_all(f"the worker was lost: {reason}")
        os.eventfd_write(self._wake_fd, 1)
        self._fail_start(reason, by_itself=status >= 0)

    def _fail_start(self, reason: str, *, by_itself: bool) -> None:
        """Plan a successor, ever later while none lives long."""
        now_s = self._clock.now()
        if by_itself and not self._served:
            self._on_failed_start(f"no worker can be started: {reason}")
            return
        lived_s = 0.0 if self._ready_s is None else now_s - self._ready_s
        self._ready_s = None
        self._failures = 1 if lived_s >= self._limits.backoff_max_s else self._failures + 1
        # 2 ** 63 is long past any limit: the power stays a small number.
        pause_s = self._limits.backoff_min_s * 2 ** min(self._failures - 1, 63)
        self._restart_s = now_s + min(pause_s, self._limits.backoff_max_s)

    # --- the socket

    def _ask(self, question: Command | Ping) -> bool:
        """Send a question; False when too much is unsent."""
        if not self._send(encode(self._unanswered.next_sequence, question)):
            return False
        self._unanswered.add(question, self._clock.now())
        return True

    def _send(self, frame: bytes) -> bool:
        assert self._channel is not None
        taken = self._channel.send(frame)
        self._await_room()
        return taken

    def _await_room(self) -> None:
        """Wait for room in the socket while something is unsent."""
        assert self._worker is not None
        assert self._channel is not None
        waits = self._channel.unsent_bytes > 0
        if waits != self._awaits_room:
            self._awaits_room = waits
            wanted = select.EPOLLIN | (select.EPOLLOUT if waits else 0)
            self._epoll.modify(self._worker.end.fileno(), wanted)

    def _exchange(self, events: int) -> None:
        """The socket is ready for something."""
        assert self._channel is not None
        if events & select.EPOLLOUT:
            self._channel.flush()
            self._await_room()
        try:
            self._receive(self._channel, reads_max=_READS_MAX)
        except ProtocolError as exc:
            self._garbled = True
            self._kill(f"it does not speak the protocol: {exc}")
            return
        if self._channel.ended:
            self._kill("it closed its socket")

    def _receive(self, channel: Channel, *, reads_max: int) -> None:
        """Take what has come.

        Raises:
            ProtocolError: something of it is malformed or answers nothing.
        """
        for payload in channel.receive(reads_max=reads_max):
            sequence, record = decode(payload)
            self._heard_s = self._clock.now()
            if sequence:
                answer = self._unanswered.settle(sequence, record, self._heard_s)
                if answer is not None:
                    self._results.append(answer)
            elif isinstance(record, WorkerReady | SsdFailed):
                self._hear(record)
            else:
                raise ProtocolError(f"{type(record).__name__} is no news")

    def _hear(self, news: WorkerReady | SsdFailed) -> None:
        self._results.append(news)
        if isinstance(news, WorkerReady):
            if news.ssd_refused and not self._served:
                # What the configuration names is another's. Later, only the ssd would be lost.
                self._on_failed_start(news.ssd_error or "")
            self._ready_s = self._heard_s
            self._served = True


def _wait_for_end(worker: WorkerHandle, channel: Channel, timeout_s: float) -> None:
    """Send what is unsent and throw away what comes, until the worker ends or the time is up."""
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        wanted = {worker.pidfd: select.POLLIN}
        if not channel.ended:
            writes = select.POLLOUT if channel.unsent_bytes else 0
            wanted[worker.end.fileno()] = select.POLLIN | writes
        if worker.pidfd in _poll(wanted, left_s):
            return
        channel.flush()
        with contextlib.suppress(ProtocolError):
            for _ in channel.receive(reads_max=_READS_MAX):
                pass


def _poll(wanted: dict[int, int], timeout_s: float) -> set[int]:
    """Wait for one of some descriptors, whatever their numbers; those that are ready."""
    poll = select.poll()
    for fd, mask in wanted.items():
        poll.register(fd, mask)
    return {fd for fd, _ in poll.poll(timeout_s * 1000)}
