"""What all trees of one index share: the touch counter, bounds and counts of what happened.

Threading: one thread, the control loop.
"""

from typing import Final

from nexuskv.index.pins import PinTable

EVICT_SCAN_MAX: Final = 16384
"""Busy runs one eviction may pass over: about 8 ms."""

EVICT_REVISIT_MAX: Final = 64
"""Runs found busy before that one eviction looks at again in each tree, before all others."""

EVICT_RESCAN_MAX: Final = 1024
"""The same, when nothing else can be evicted."""

EVICT_OTHERS_MAX: Final = 4096
"""Pages one eviction may take that do not count for it: about 6 ms. A run may exceed it."""

COLD_NEAR_SCAN_MAX: Final = 2048
"""Runs that one search for cold near pages looks at, set aside and others each."""


class Ledger:
    """Counts of one index. `touch` numbers the operations that used pages, from 1 on."""

    __slots__ = (
        "demoted",
        "evicted",
        "evicted_fragment",
        "evicted_pinned",
        "fragments",
        "grafts",
        "grafts_refused",
        "pins",
        "run_pages_max",
        "splits",
        "touch",
    )

    def __init__(self, *, pins: PinTable, run_pages_max: int) -> None:
        self.pins = pins
        self.run_pages_max = run_pages_max
        self.touch = 0
        self.fragments = 0
        self.grafts = 0
        self.grafts_refused = 0
        self.splits = 0
        self.demoted = 0
        self.evicted = 0
        self.evicted_fragment = 0
        self.evicted_pinned = 0

    def counters(self) -> dict[str, int]:
        """The counts by name; `fragments` and `pins` are how many there are now."""
        return {
            "grafts": self.grafts,
            "grafts_refused": self.grafts_refused,
            "splits": self.splits,
            "fragments": self.fragments,
            "pins": len(self.pins),
            "demoted": self.demoted,
            "evicted": self.evicted,
            "evicted_fragment": self.evicted_fragment,
            "evicted_pinned": self.evicted_pinned,
        }
