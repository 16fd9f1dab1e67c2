"""The one poll-and-drain loop of the control process.

Owns an epoll set, a table fd → callback, and a mailbox through which other threads have a function
run here. Everything in the control plane runs on this loop's thread, so nothing needs a lock.

One of the four outer edges: a fault of a callback is logged and counted, and the loop turns on.
"""

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Protocol, TypeVar

from nexuskv.clock import Clock
from nexuskv.control.counters import Counters
from nexuskv.errors import TransferTimeout, Unavailable

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
_BATCH: Final = 256  # events taken from the kernel in one turn
_MAILBOX_MAX: Final = 1024  # functions waiting to run here
_NAP_S: Final = 3600.0  # epoll counts milliseconds in an int

_LOG = logging.getLogger("nexuskv.control")
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

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._clock = clock
        self._counters = counters
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._fresh: set[int] = set()  # watched since the kernel was last asked
        self._tickers: list[Ticker] = []
        self._drains: list[Callable[[], None]] = []
        self._soon: deque[Callable[[], None]] = deque()  # for the next turn
        self._mailbox: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reentrant, as a signal handler may stop the loop while it is being closed.
        self._wake_guard = threading.RLock()
        self._stopping = False
        self.watch(self._wake_fd, READ, self._on_wake)

    def watch(self, fd: int, mask: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` whenever `fd` is ready for `mask`."""
        self._epoll.register(fd, mask)
        self._callbacks[fd] = callback
        self._fresh.add(fd)

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

    def soon(self, function: Callable[[], None]) -> None:
        """Run `function` in the next turn, behind what is ready then."""
        self._soon.append(function)

    def call(self, function: Callable[[], _T], *, timeout_s: float) -> _T:
        """Run `function` on the loop from another thread; its result, or what it raised.

        Raises:
            TransferTimeout: the loop did not get to it in time.
            Unavailable: too many functions wait already, or the loop is closed.
        """
        if len(self._mailbox) >= _MAILBOX_MAX:
            raise Unavailable(f"{_MAILBOX_MAX} calls wait for the control loop already")
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as exc:  # noqa: BLE001  # the caller's, on the caller's thread
                future.set_exception(exc)

        self._mailbox.append(run)
        if not self.wake():
            raise Unavailable("the control loop has ended")
        try:
            return future.result(timeout_s)
        except TimeoutError as exc:
            message = f"the control loop did not answer within {timeout_s} s"
            raise TransferTimeout(message) from exc

    def wake(self) -> bool:
        """Make the loop turn; safe from any thread. False when it is closed."""
        with self._wake_guard:
            if self._wake_fd < 0:
                return False
            os.eventfd_write(self._wake_fd, 1)
        return True

    def stop(self) -> None:
        """End `run` after its current turn; safe from any thread and from a signal handler."""
        self._stopping = True
        self.wake()

    def run(self) -> None:
        """Turn until `stop`."""
        while not self._stopping:
            try:
                self._turn()
            except Exception:  # noqa: BLE001  # the edge of the loop
                _LOG.exception("a callback of the control loop failed")
                self._counters.add("internal_errors")

    def close(self) -> None:
        """Release the loop's own descriptors. Idempotent."""
        with self._wake_guard:
            if self._wake_fd < 0:
                return
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._callbacks.clear()
        self._epoll.close()

    def _turn(self) -> None:
        self._fresh.clear()
        callbacks, fresh = self._callbacks, self._fresh
        for fd, events in self._epoll.poll(self._timeout_s(), _BATCH):
            # An fd watched during this turn is a new one under a number that was closed meanwhile:
            # these events are the old one's. A pidfd must not be taken for exited by them.
            if fd in callbacks and fd not in fresh:
                callbacks[fd](events)
        for drain in self._drains:
            drain()
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        now_s = self._clock.now()
        for ticker in self._tickers:
            due_s = ticker.next_due()
            if due_s is not None and due_s <= now_s:
                ticker.tick(now_s)

    def _timeout_s(self) -> float:
        """How long the kernel may let us sleep."""
        if self._soon:
            return 0
        least_s = None
        for ticker in self._tickers:
            due_s = ticker.next_due()
            if due_s is not None and (least_s is None or due_s < least_s):
                least_s = due_s
        if least_s is None:
            return -1
        return min(_NAP_S, max(0.0, least_s - self._clock.now()))

    def _on_wake(self, _events: int) -> None:
        os.eventfd_read(self._wake_fd)
        while self._mailbox:
            self._mailbox.popleft()()
