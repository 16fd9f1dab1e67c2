"""How fast pages have been loaded lately: what `match` estimates from."""

from typing import Final

from nexuskv.clock import Clock

FIRST_GUESS: Final = 1e9
"""Bytes a second before anything was loaded: half of what one NVMe drive reads."""

_WEIGHT: Final = 0.2  # of the newest sample


class Bandwidth:
    """A moving average over the times in which loads were under way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rate = FIRST_GUESS
        self._since_s: float | None = None  # of the sample in the making; None: nothing is loaded

    def began(self) -> None:
        """A load was asked for."""
        if self._since_s is None:
            self._since_s = self._clock.now()

    def arrived(self, size_bytes: int, *, idle: bool) -> None:
        """Bytes have come; `idle` says that nothing else is under way."""
        now_s = self._clock.now()
        if self._since_s is not None and now_s > self._since_s and size_bytes:
            sample = size_bytes / (now_s - self._since_s)
            self._rate += _WEIGHT * (sample - self._rate)
        self._since_s = None if idle else now_s

    def load_us(self, size_bytes: int) -> int:
        """Estimated microseconds for so many bytes."""
        return int(size_bytes / self._rate * 1e6)
