"""The one poll-and-drain loop of the control process.

Owns an epoll set, a table fd → callback, and a mailbox through which other threads have a function
run here. Everything in the control plane runs on this loop's thread, so nothing needs a lock.
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from nexuskv.clock import Clock
from nexuskv.errors import TransferTimeout, Unavailable

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
_BATCH: Final = 256  # events taken from the kernel in one turn
_MAILBOX_MAX: Final = 1024  # functions waiting to run here

_T = TypeVar("_T")


class Ticker(Protocol):
    """Something with deadlines: leases, waits, idle sessions."""

    def next_due(self) -> float | None:
        """When `tick` wants to run next, in the clock's seconds; None: not at all."""
        ...

    def tick(self, now_s: float) -> None:
        """Do what is due. Bounded work."""
        ...


class Loop:
    """Waits for descriptors and times; runs callbacks. One thread, except `call` and `stop`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._tickers: list[Ticker] = []
        self._drains: list[Callable[[], None]] = []
        self._mailbox: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self.watch(self._wake_fd, READ, self._on_wake)

    def watch(self, fd: int, mask: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` whenever `fd` is ready for `mask`."""
        self._epoll.register(fd, mask)
        self._callbacks[fd] = callback

    def change(self, fd: int, mask: int) -> None:
        """Wait for other events of a watched fd."""
        self._epoll.modify(fd, mask)

    def forget(self, fd: int) -> None:
        """Stop watching; call it before the fd is closed. Unknown fds are no error."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def add_ticker(self, ticker: Ticker) -> None:
        """Let `ticker` run when it is due."""
        self._tickers.append(ticker)

    def add_drain(self, drain: Callable[[], None]) -> None:
        """Run `drain` once a turn: for sockets whose readiness is edge-triggered (zmq)."""
        self._drains.append(drain)

    def call(self, function: Callable[[], _T], *, timeout_s: float) -> _T:
        """Run `function` on the loop from another thread and return its result.

        Raises:
            TransferTimeout: the loop did not get to it in time.
            Unavailable: too many functions wait already.
        """
        if len(self._mailbox) >= _MAILBOX_MAX:
            raise Unavailable(f"{_MAILBOX_MAX} calls wait for the control loop already")
        done = threading.Event()
        results: list[_T] = []

        def run() -> None:
            results.append(function())
            done.set()

        self._mailbox.append(run)
        self.wake()
        if not done.wait(timeout_s):
            raise TransferTimeout(f"the control loop did not answer within {timeout_s} s")
        return results[0]

    def wake(self) -> None:
        """Make the loop turn; safe from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """End `run` after its current turn; safe from any thread and from a signal handler."""
        self._stopping = True
        self.wake()

    def run(self) -> None:
        """Turn until `stop`."""
        epoll_wait, callbacks = self._epoll.poll, self._callbacks
        while not self._stopping:
            for fd, events in epoll_wait(self._timeout_s(), _BATCH):
                callback = callbacks.get(fd)
                if callback is not None:
                    callback(events)
            for drain in self._drains:
                drain()
            self._run_due()

    def close(self) -> None:
        """Release the loop's own descriptors. Idempotent."""
        if self._wake_fd >= 0:
            self._callbacks.clear()
            self._epoll.close()
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _timeout_s(self) -> float:
        dues = [due for due in (ticker.next_due() for ticker in self._tickers) if due is not None]
        return max(0.0, min(dues) - self._clock.now()) if dues else -1

    def _run_due(self) -> None:
        now_s = self._clock.now()
        for ticker in self._tickers:
            due = ticker.next_due()
            if due is not None and due <= now_s:
                ticker.tick(now_s)

    def _on_wake(self, _events: int) -> None:
        os.eventfd_read(self._wake_fd)
        while self._mailbox:
            self._mailbox.popleft()()
