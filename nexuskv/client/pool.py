"""The bounded set of links of one process, handed out last in, first out.

Invariants: at most `links_max` links are open or being opened (one more after a reconnect), or as
many as the daemon and this process's own limits allow; a link is lent to one caller at a
time; a broken link, or one of an older era, is closed when it comes back. Waiting for a free link
ends at the call's deadline. Thread-safe.
"""

import math
import threading
from collections.abc import Callable
from types import TracebackType

from nexuskv.client.health import Health
from nexuskv.client.link import Link
from nexuskv.clock import Clock
from nexuskv.errors import (
    DaemonUnreachable,
    NexusError,
    ProtocolError,
    Refused,
    TransferTimeout,
)


class Pool:
    """Links that are free, and the count of all."""

    def __init__(
        self,
        open_link: Callable[[], Link],
        *,
        links_max: int,
        health: Health,
        clock: Clock,
        on_away: Callable[[], None],
        while_away: Callable[[], None],
    ) -> None:
        self._open_link = open_link
        self._links_max = links_max
        self._health = health
        self._clock = clock
        self._on_away = on_away
        self._while_away = while_away
        self._free = threading.Condition(threading.Lock())
        self._idle: list[Link] = []
        self._count = 0
        self._waiting_count = 0
        self._closed = False

    def lend(self, deadline_s: float) -> "Loan":
        """A context manager that yields a link.

        Raises:
            DaemonUnreachable: the daemon is away or does not answer; on entering.
            TransferTimeout: all links were busy until `deadline_s`; on entering.
        """
        return Loan(self, deadline_s)

    def take(self, deadline_s: float) -> Link:
        """Take a free link or open one. `give_back` must follow."""
        links_max = self._links_max
        while (link := self._take_free(deadline_s, links_max)) is None:
            era = self._health.era
            try:
                return self._open(era)
            except Refused:
                # No more than are open: they serve all, one after another, as long as there is one.
                links_max = self._count
                if not links_max:
                    self.daemon_failed(era)
                    raise
        return link

    def adopt(self, link: Link) -> None:
        """Take in a link that was opened elsewhere; it is free from now on."""
        with self._free:
            self._count += 1
        self.give_back(link)

    def give_back(self, link: Link) -> None:
        """Return a link; one that broke tells whether the daemon is away."""
        if link.broken and link.away:
            self.daemon_failed(link.era)
        with self._free:
            keep = not (link.broken or self._closed or link.era != self._health.era)
            if keep:
                self._idle.append(link)
            else:
                self._count -= 1
            self._free.notify()
        if not keep:
            link.close()

    def daemon_failed(self, era: int) -> None:
        """Note that the daemon is away: no idle link is of use any more, waiters give up."""
        if not self._health.failed(era):
            return
        with self._free:
            idle, self._idle = self._idle, []
            self._count -= len(idle)
            self._free.notify_all()
        for link in idle:
            link.close()
        self._on_away()

    def take_silent(self, before_s: float) -> Link | None:
        """Take the longest unused remote link if it was not used since `before_s`."""
        with self._free:
            if self._idle and self._idle[0].remote and self._idle[0].used_s < before_s:
                return self._idle.pop(0)
        return None

    def silent_since_s(self) -> float:
        """When the longest unused remote link was used last; infinity without one."""
        with self._free:
            return self._idle[0].used_s if self._idle and self._idle[0].remote else math.inf

    def close(self) -> None:
        """Close idle links and refuse new loans; lent ones are closed as they come back."""
        with self._free:
            self._closed = True
            idle, self._idle = self._idle, []
            self._count -= len(idle)
            self._free.notify_all()
        for link in idle:
            link.close()

    def drop(self) -> None:
        """After a fork, in the child: forget the parent's links without a word to the daemon."""
        for link in self._idle:
            link.drop()

    def _take_free(self, deadline_s: float, links_max: int) -> Link | None:
        """A free link; None when one of at most `links_max` is to be opened, counted already."""
        waited = False
        with self._free:
            while True:
                if self._closed:
                    raise DaemonUnreachable("the store is closed")
                if not self._health.up:
                    self._while_away()
                    raise DaemonUnreachable("the daemon is away")
                # Whoever waits comes first: else one busy thread takes each link back at once.
                if self._idle and (waited or not self._waiting_count):
                    return self._idle.pop()
                if self._count < links_max:
                    self._count += 1
                    return None
                waited = self._wait(deadline_s)
                if not waited:
                    raise TransferTimeout(f"all {links_max} connections are busy")

    def _wait(self, deadline_s: float) -> bool:
        """Wait for news of a link, with the lock held; False when the time is over."""
        told = False
        self._waiting_count += 1
        try:
            told = self._free.wait(max(0.0, deadline_s - self._clock.now()))
        finally:
            self._waiting_count -= 1
            if not told:
                self._free.notify()  # in case that the news came just now, for somebody else
        return told

    def _open(self, era: int) -> Link:
        link: Link | None = None
        try:
            link = self._open_link()
            link.era = era
            return link
        except Refused:
            raise
        except NexusError:
            self.daemon_failed(era)
            raise
        finally:
            if link is None:
                with self._free:
                    self._count -= 1
                    self._free.notify()


class Loan:
    """One link for the length of a `with` block."""

    __slots__ = ("_deadline_s", "_link", "_pool")

    def __init__(self, pool: Pool, deadline_s: float) -> None:
        self._pool = pool
        self._deadline_s = deadline_s
        self._link: Link | None = None

    def __enter__(self) -> Link:
        self._link = self._pool.take(self._deadline_s)
        return self._link

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._link is not None
        if isinstance(error, ProtocolError):
            self._link.broken = self._link.away = True  # it cannot be trusted any more
        self._pool.give_back(self._link)
