"""Whether the daemon is there, as far as this process knows. A pure state machine, thread-safe.

Up: calls are tried. Away: calls fail at once and the keeper tries to reconnect at `retry_at_s`,
with pauses that double up to a bound, each shortened by chance so that clients do not come in step.
An era is the time between two failures: news from an older era is stale and changes nothing.
"""

import random
import threading

from nexuskv.clock import Clock

JITTER = 0.5
"""A pause is its nominal length less up to this share."""


class Health:
    """Up or away, with the backoff between attempts."""

    def __init__(
        self, *, backoff_min_s: float, backoff_max_s: float, clock: Clock, chance: random.Random
    ) -> None:
        self._backoff_min_s = backoff_min_s
        self._backoff_max_s = backoff_max_s
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._pause_s = backoff_min_s
        self.up = True
        self.era = 0
        self.retry_at_s = 0.0

    def failed(self, era: int) -> bool:
        """Note a failure seen in `era`; whether it was news."""
        with self._lock:
            if era != self.era:
                return False
            self.up = False
            self.era += 1
            self._plan()
            return True

    def attempt_failed(self) -> None:
        """Note that a reconnect did not succeed."""
        with self._lock:
            self._plan()

    def recovered(self) -> None:
        """Note that a session was opened."""
        with self._lock:
            self.up = True
            self._pause_s = self._backoff_min_s

    def _plan(self) -> None:
        pause_s = self._pause_s * (1 - JITTER * self._chance.random())
        self.retry_at_s = self._clock.now() + pause_s
        self._pause_s = min(self._pause_s * 2, self._backoff_max_s)
