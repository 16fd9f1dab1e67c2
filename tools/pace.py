"""Keeping work under a rate: a wait after each piece, so that the whole is never ahead of time."""

import re
import threading
import time
from collections.abc import Callable
from typing import Final

from nexuskv.config import parse_size
from nexuskv.errors import ConfigError

_RATE: Final = re.compile(r"(.+?)(?:/s)?", re.ASCII)


def parse_rate(text: str) -> int:
    """Bytes a second from `200MiB/s`, `200MiB` or `1GiB/s`.

    Raises:
        ConfigError: no size, or 0.
    """
    found = _RATE.fullmatch(text.strip())
    rate = parse_size(found[1]) if found else 0
    if not rate:
        raise ConfigError(f"a rate of {text!r}: it is a size a second such as 200MiB/s")
    return rate


class Pace:
    """At most `bytes_per_s` over the whole work; 0 is no bound."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        now_s: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._now_s = now_s
        self._wait = wait or threading.Event().wait  # which nobody sets
        self._start_s = now_s()
        self._done_bytes = 0

    def did(self, size_bytes: int) -> None:
        """Wait until so many more bytes were allowed."""
        if not self.bytes_per_s:
            return
        self._done_bytes += size_bytes
        ahead_s = self._start_s + self._done_bytes / self.bytes_per_s - self._now_s()
        if ahead_s > 0:
            self._wait(ahead_s)
