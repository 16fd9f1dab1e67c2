"""Leases to give back and corrupt pages to report, until an exchange carries them along.

A release is worth no exchange of its own: it rides, wanting no reply, in front of the next request,
or is sent by the keeper after `delay_s`. One that finds no room or is lost on the way costs a lease
that ends by itself. Thread-safe.
"""

import math
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from nexuskv.client.link import Link
from nexuskv.clock import Clock
from nexuskv.protocol import Type, encode

LEASES_PER_FRAME: Final = 1024
REPORTS_PER_FRAME: Final = 128
"""Together below the least `message_bytes_max`."""


class Report(NamedTuple):
    """One page that did not match its checksum."""

    namespace_id: bytes
    record: bytes  # encoded, for a link that has not opened the namespace
    key: bytes
    checksum: int
    generation: int


class Releases:
    """What waits for the next exchange, by the daemon's run that it is for."""

    def __init__(
        self,
        *,
        pending_max: int,
        delay_s: float,
        clock: Clock,
        wake_by: Callable[[float], None],
    ) -> None:
        self._pending_max = pending_max
        self._delay_s = delay_s
        self._clock = clock
        self._wake_by = wake_by
        self._lock = threading.Lock()
        self._incarnation = b""
        self._leases: list[int] = []
        self._reports: list[Report] = []
        self._oldest_s = math.inf

    def release(self, incarnation: bytes, lease_id: int) -> None:
        """Give a lease back soon."""
        with self._lock:
            self._enter(incarnation)
            if len(self._leases) < self._pending_max:
                self._leases.append(lease_id)
            due_s = self._oldest_s + self._delay_s
        self._wake_by(due_s)

    def report(self, incarnation: bytes, report: Report) -> None:
        """Report a corrupt page soon."""
        with self._lock:
            self._enter(incarnation)
            if len(self._reports) < self._pending_max:
                self._reports.append(report)
            due_s = self._oldest_s + self._delay_s
        self._wake_by(due_s)

    def frames_for(self, link: Link) -> list[bytes]:
        """Take what this link can carry: nothing, or one frame that rides along with a request."""
        if not self._leases and not self._reports:
            return []
        with self._lock:
            if link.incarnation != self._incarnation:
                return []
            leases, self._leases = _cut(self._leases, LEASES_PER_FRAME)
            sayable = [r for r in self._reports if link.known_number(r.namespace_id) is not None]
            said = sayable[:REPORTS_PER_FRAME]
            self._reports = [r for r in self._reports if r not in said]
            if not self._leases and not self._reports:
                self._oldest_s = math.inf
        if not leases and not said:
            return []
        corrupt = [
            (link.known_number(r.namespace_id), r.key, r.checksum, r.generation) for r in said
        ]
        return [encode(Type.RELEASE, 0, (leases, (), corrupt))]

    def due_s(self) -> float:
        """When what waits has waited long enough; infinity when nothing waits."""
        with self._lock:
            return self._oldest_s + self._delay_s

    def reported_namespaces(self) -> dict[bytes, bytes]:
        """Id → encoded record of the namespaces with pages to report."""
        with self._lock:
            return {r.namespace_id: r.record for r in self._reports}

    def forget(self, *, but: bytes = b"") -> None:
        """Forget everything, unless it is for the daemon's run `but`."""
        with self._lock:
            if self._incarnation != but:
                self._leases, self._reports = [], []
                self._oldest_s = math.inf

    def _enter(self, incarnation: bytes) -> None:
        if incarnation != self._incarnation:
            # Ids of another run of the daemon are void.
            self._incarnation = incarnation
            self._leases, self._reports = [], []
            self._oldest_s = math.inf
        self._oldest_s = min(self._oldest_s, self._clock.now())


def _cut(items: list[int], count: int) -> tuple[list[int], list[int]]:
    return items[:count], items[count:]
