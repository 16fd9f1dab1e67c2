"""What `stats` answers, and the same as Prometheus text."""

import os
from collections.abc import Callable

import nexuskv
from nexuskv.clock import Clock
from nexuskv.control.counters import COUNTERS, Counters
from nexuskv.control.namespaces import Namespaces
from nexuskv.control.pages import Pages
from nexuskv.control.sessions import Sessions
from nexuskv.control.waiting import Waiting
from nexuskv.index.radix import RadixIndex


class Metrics:
    """Reads every part's numbers; owns none but the start time."""

    def __init__(
        self,
        *,
        clock: Clock,
        counters: Counters,
        pages: Pages,
        index: RadixIndex,
        namespaces: Namespaces,
        sessions: Sessions,
        waiting: Waiting,
        native: Callable[[], str],
        recovery_gauges: Callable[[], dict[str, int]],
        worker_gauges: Callable[[], dict[str, int]],
        ssd_gauges: Callable[[], dict[str, int]],
        ssd_state: Callable[[], str],
        urls: Callable[[], list[str]],
        http: Callable[[], str],
        events: Callable[[], str],
    ) -> None:
        self._clock = clock
        self._counters = counters
        self._pages = pages
        self._index = index
        self._namespaces = namespaces
        self._sessions = sessions
        self._waiting = waiting
        self._native = native
        self._recovery_gauges = recovery_gauges
        self._worker_gauges = worker_gauges
        self._ssd_gauges = ssd_gauges
        self._ssd_state = ssd_state
        self._urls = urls
        self._http = http
        self._events = events
        self._started_s = clock.now()

    def gauges(self) -> dict[str, int]:
        """Numbers that go up and down, by name."""
        tier = self._pages.tier
        return {
            "capacity_bytes": tier.capacity_bytes,
            "populated_bytes": tier.populated_bytes,
            "used_bytes": tier.used_bytes,
            "writing_bytes": tier.writing_bytes,
            "quarantined_bytes": tier.quarantined_bytes,
            "unlinked_bytes": tier.unlinked_bytes,
            "unlinked_slots": self._pages.unlinked_count,
            "spare_chunks": tier.spare_chunks,
            "pages": sum(n.tree.page_count for n in self._namespaces.by_id.values()),
            "namespaces": len(self._namespaces.by_id),
            "sessions": len(self._sessions.by_number),
            "leases": self._pages.leases.lease_count,
            "leased_slots": self._pages.leases.leased_count,
            "acquires_waiting": len(self._waiting),
            **self._recovery_gauges(),
            **self._worker_gauges(),
            **self._ssd_gauges(),
        }

    def stats(self) -> dict[str, object]:
        """Everything `nexuskv status` shows."""
        return {
            "version": nexuskv.__version__,
            "pid": os.getpid(),
            "native": self._native(),
            "urls": self._urls(),
            "http": self._http(),
            "events": self._events(),
            "ssd": self._ssd_state(),
            "uptime_s": self._clock.now() - self._started_s,
            "gauges": self.gauges(),
            "counters": self._counters.snapshot(),
            "index": dict(self._index.counters),
        }

    def prometheus(self) -> str:
        """The text exposition format, version 0.0.4."""
        lines: list[str] = []
        for name, value in self.gauges().items():
            lines += [f"# TYPE nexuskv_{name} gauge", f"nexuskv_{name} {value}"]
        for name, value in self._counters.snapshot().items():
            full = f"nexuskv_{name}_total"
            lines += [f"# HELP {full} {COUNTERS[name]}", f"# TYPE {full} counter"]
            lines.append(f"{full} {value}")
        return "\n".join(lines) + "\n"
