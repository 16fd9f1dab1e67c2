"""How long leases surely last, as this process knows (I5), and which of them are to be renewed.

A term is counted from before the request that began or renewed it was sent. The keeper renews
watched terms when a third of their length is over; everybody else reads `deadline_s`. Thread-safe.
"""

import math
import threading
from collections.abc import Callable

from nexuskv.client.link import Link


def as_ms(duration_s: float) -> int:
    """Whole milliseconds, at least one: a message's 0 means none."""
    return max(1, int(duration_s * 1000))


def granted_ttl_s(link: Link, ttl_s: float) -> float:
    """The lease time to ask for: the daemon grants no more than its limit."""
    return min(ttl_s, link.session.limits.lease_ttl_max_s)


class Term:
    """One lease's certain time. `lost` once the daemon said that it has ended."""

    __slots__ = ("deadline_s", "incarnation", "lease_id", "lost", "ttl_s")

    def __init__(self, lease_id: int, incarnation: bytes, *, ttl_s: float, sent_s: float) -> None:
        self.lease_id = lease_id
        self.incarnation = incarnation
        self.ttl_s = ttl_s
        self.deadline_s = sent_s + ttl_s
        self.lost = False

    @property
    def renew_at_s(self) -> float:
        """When a third of the term is over."""
        return self.deadline_s - self.ttl_s * 2 / 3

    def held_at(self, now_s: float) -> bool:
        """Whether the lease certainly held until `now_s`."""
        return not self.lost and now_s <= self.deadline_s

    def renewed(self, *, ttl_s: float, sent_s: float) -> None:
        """Count anew from `sent_s`."""
        self.ttl_s = ttl_s
        self.deadline_s = max(self.deadline_s, sent_s + ttl_s)


class Terms:
    """The terms that work in progress and open views depend on."""

    def __init__(self, *, wake_by: Callable[[float], None]) -> None:
        self._wake_by = wake_by
        self._lock = threading.Lock()
        self._watched: set[Term] = set()

    def watch(self, term: Term) -> None:
        """Keep a term renewed until `forget`."""
        with self._lock:
            self._watched.add(term)
        self._wake_by(term.renew_at_s)

    def forget(self, term: Term) -> None:
        """Stop renewing. Idempotent."""
        with self._lock:
            self._watched.discard(term)

    def due(self, now_s: float) -> list[Term]:
        """Watched terms to renew now, most urgent first."""
        with self._lock:
            found = [term for term in self._watched if term.renew_at_s <= now_s and not term.lost]
        return sorted(found, key=lambda term: term.deadline_s)

    def next_s(self) -> float:
        """When the next watched term is due; infinity without one."""
        with self._lock:
            return min((t.renew_at_s for t in self._watched if not t.lost), default=math.inf)
