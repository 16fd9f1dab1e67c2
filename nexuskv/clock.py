"""Time as an argument: code takes a `Clock`, so that tests own the time."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC, one value for all processes of a machine since its boot."""

    def now(self) -> float:
        """Seconds since boot."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told; for tests and simulations."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The time set so far, in seconds."""
        return self._now_s

    def advance(self, duration_s: float) -> None:
        """Move forward by `duration_s` seconds; going back is a `ValueError`."""
        if duration_s < 0:
            raise ValueError(f"a clock cannot go back: {duration_s} s")
        self._now_s += duration_s
