"""Fragments: runs whose parent is unknown or absent, and what is recorded of that parent.

Owns the heads of one tree's fragments. Every run below a head stands in the fragments' eviction
order, which goes before the rooted one; `page_count` counts their pages. Threading: one thread.
"""

from nexuskv import UNKNOWN, Unknown
from nexuskv.index.ledger import Ledger
from nexuskv.index.order import EvictionPolicy
from nexuskv.index.run import Run


class Fragments:
    """Head run → the key of its absent parent, or UNKNOWN."""

    __slots__ = ("_heads", "_ledger", "order", "page_count")

    def __init__(self, order: EvictionPolicy, ledger: Ledger) -> None:
        self.order = order
        self.page_count = 0
        self._ledger = ledger
        self._heads: dict[Run, bytes | Unknown] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def record(self, head: Run, parent: bytes | Unknown) -> None:
        """Note a parentless run as a head, or what its parent is."""
        if head not in self._heads:
            self._ledger.fragments += 1
        self._heads[head] = parent

    def forget(self, head: Run) -> bool:
        """Drop a head that got a parent or was evicted; False when it was none."""
        if self._heads.pop(head, None) is None:
            return False
        self._ledger.fragments -= 1
        return True

    def parent_of(self, run: Run) -> bytes | Unknown | None:
        """What is recorded of a head's parent; None when the run heads no fragment."""
        return self._heads.get(run)

    def agrees(self, run: Run, parent: bytes) -> bool:
        """Whether the run heads a fragment whose parent may be `parent`."""
        recorded = self._heads.get(run)
        return recorded is UNKNOWN or recorded == parent

    def clear(self) -> None:
        """Drop every head."""
        self._ledger.fragments -= len(self._heads)
        self._heads.clear()
        self.page_count = 0
