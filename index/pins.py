"""Soft pins: pages that eviction passes over while anything else can go, until a time.

Owns which pages are pinned and until when, for all trees of one index. Bounded: at most `pins_max`
pins, and one heap entry a pin plus as many again that are stale. Threading: one thread.
"""

import heapq
from typing import Final

from nexuskv.errors import OutOfSpace

PINS_FORGOTTEN_MAX: Final = 1024
"""Expired pins one call forgets."""

Pin = tuple[int, bytes]  # number of the tree, page key


class PinTable:
    """(tree number, key) → the time in seconds until which the page is pinned."""

    __slots__ = ("_heap", "_pins_max", "_until_s")

    def __init__(self, *, pins_max: int) -> None:
        self._pins_max = pins_max
        self._until_s: dict[Pin, float] = {}
        self._heap: list[tuple[float, Pin]] = []

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, pin: Pin, until_s: float) -> None:
        """Pin one page, or give it another end.

        Raises:
            OutOfSpace: `pins_max` pages are pinned.
        """
        if pin not in self._until_s and len(self._until_s) >= self._pins_max:
            raise OutOfSpace(f"{self._pins_max} pages are pinned, the most allowed (pins_max)")
        self._until_s[pin] = until_s
        heapq.heappush(self._heap, (until_s, pin))
        if len(self._heap) > 2 * len(self._until_s) + PINS_FORGOTTEN_MAX:
            self._heap = [(until, pin) for pin, until in self._until_s.items()]
            heapq.heapify(self._heap)

    def remove(self, pin: Pin) -> bool:
        """Unpin one page; False when it was not pinned."""
        return self._until_s.pop(pin, None) is not None

    def remove_tree(self, number: int) -> None:
        """Unpin every page of one tree."""
        self._until_s = {pin: until for pin, until in self._until_s.items() if pin[0] != number}

    def is_pinned(self, pin: Pin, now_s: float) -> bool:
        """Whether a page is pinned at `now_s`."""
        until_s = self._until_s.get(pin)
        return until_s is not None and until_s > now_s

    def forget_expired(self, now_s: float) -> None:
        """Forget pins past their end, at most `PINS_FORGOTTEN_MAX` a call."""
        heap = self._heap
        for _ in range(PINS_FORGOTTEN_MAX):
            if not heap or heap[0][0] > now_s:
                return
            until_s, pin = heapq.heappop(heap)
            if self._until_s.get(pin) == until_s:
                del self._until_s[pin]
