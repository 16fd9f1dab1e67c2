"""What this process did through the client, and how fast its copies go. Thread-safe, only grows."""

import logging
import threading
from typing import Final

from nexuskv.types import PageStatus

LOG: Final = logging.getLogger("nexuskv.client")

COPY_BYTES_PER_S_START: Final = 5e9
"""What a copy out of shared memory is taken to reach until one was measured."""
COPY_BYTES_MEASURED: Final = 1 << 20
"""Smaller loads say more about calls than about bytes."""
COPY_WEIGHT: Final = 0.2
"""Share of the newest measurement in the running mean."""

NAMES: Final = (
    "hits",
    "misses",
    "corrupt",
    "stale",
    "stored",
    "exists",
    "no_space",
    "dropped",
    "unavailable",
    "bytes_in",
    "bytes_out",
    "reconnects",
    "releases_sent_alone",
)


class Counters:
    """Totals by name, and the measured copy bandwidth."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, int] = {name: 0 for name in NAMES}  # noqa: C420  # its type
        self._logged: set[str] = set()
        self.copy_bytes_per_s = COPY_BYTES_PER_S_START

    def snapshot(self) -> dict[str, int]:
        """A copy of all totals."""
        with self._lock:
            return dict(self._totals)

    def count(self, name: str, by: int = 1) -> None:
        """Add to one total."""
        with self._lock:
            self._totals[name] += by

    def got(self, statuses: bytes | bytearray, page_bytes: int) -> None:
        """Count a get's pages."""
        hits = statuses.count(PageStatus.HIT)
        with self._lock:
            totals = self._totals
            totals["hits"] += hits
            totals["bytes_in"] += hits * page_bytes
            if hits != len(statuses):
                totals["misses"] += statuses.count(PageStatus.MISS)
                totals["corrupt"] += statuses.count(PageStatus.CORRUPT)
                totals["stale"] += statuses.count(PageStatus.STALE)
                totals["unavailable"] += statuses.count(PageStatus.UNAVAILABLE)

    def put(self, statuses: bytes | bytearray, page_bytes: int) -> None:
        """Count a put's pages."""
        stored = statuses.count(PageStatus.STORED)
        with self._lock:
            totals = self._totals
            totals["stored"] += stored
            totals["bytes_out"] += stored * page_bytes
            if stored != len(statuses):
                totals["exists"] += statuses.count(PageStatus.EXISTS)
                totals["no_space"] += statuses.count(PageStatus.NO_SPACE)
                totals["dropped"] += statuses.count(PageStatus.DROPPED)
                totals["unavailable"] += statuses.count(PageStatus.UNAVAILABLE)

    def copied(self, size_bytes: int, duration_s: float) -> None:
        """Learn from one load how fast copies are here."""
        if size_bytes >= COPY_BYTES_MEASURED and duration_s > 0:
            speed = size_bytes / duration_s
            self.copy_bytes_per_s += COPY_WEIGHT * (speed - self.copy_bytes_per_s)

    def log_once(self, topic: str, message: str) -> None:
        """Log a warning the first time that `topic` comes up: the log is the engine's."""
        with self._lock:
            if topic in self._logged or len(self._logged) >= LOGGED_TOPICS_MAX:
                return
            self._logged.add(topic)
        LOG.warning("%s", message)


LOGGED_TOPICS_MAX: Final = 1024
