"""Evicting pages from all tiers, from the tails of the coldest leaves.

Owns no state beyond one eviction. Threading: one thread, the control loop.
"""

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

from nexuskv.index.chains import Chains
from nexuskv.index.ledger import EVICT_OTHERS_MAX, Ledger
from nexuskv.index.order import EvictionPolicy, Frontier
from nexuskv.index.run import Run
from nexuskv.index.tree import Tree
from nexuskv.index.walk import Walk


class Evicted(NamedTuple):
    """Pages of one chain that were unlinked together; their places are the caller's.

    `keys` are joined and `slots` one place a key, near or far, both in chain order. Nothing that is
    still held hangs below them.
    """

    tree: Tree
    keys: bytes
    slots: "array[int]"


class Eviction(Walk):
    """Evicts leaves, coldest first, until `count` pages for which `counts` holds have gone."""

    __slots__ = ("_counts", "_others_left", "evicted")

    def __init__(
        self,
        ledger: Ledger,
        *,
        count: int,
        is_free: Callable[[int], bool],
        now: float,
        counts: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__(ledger, count=count, is_free=is_free, now=now)
        self.evicted: list[Evicted] = []
        self._counts = counts
        self._others_left = EVICT_OTHERS_MAX  # pages that may go without being counted

    def frontier(self, order: EvictionPolicy) -> Frontier:
        """Leaves of the union of tiers."""
        return order

    def take(self, tree: Tree, run: Run) -> bool:
        """Evict from the tail of a leaf run what is wanted and may go."""
        if run.first_child is not None:
            return False
        return not self.shorten(tree, run, 0) or not self._wanted

    def shorten(self, tree: Tree, run: Run, least: int) -> int:
        """Evict from the tail of a leaf run, never below `least` pages; return how many stay."""
        slots, is_free, counts = run.slots, self._is_free, self._counts
        now = self._now if len(self._ledger.pins) else None
        kept = page_count = len(slots)
        wanted = self._wanted
        while kept > least and wanted and is_free(slots[kept - 1]):
            if now is not None and tree.is_pinned(tree.chains.key_at(run, kept - 1), now):
                break
            kept -= 1
            if counts is None or counts(slots[kept]):
                wanted -= 1
        if kept < page_count:
            self._count(page_count - kept, wanted, run.order is tree.chains.fragments.order)
            _cut(tree, run, kept, self.evicted)
        return kept

    def _count(self, page_count: int, wanted: int, is_fragment: bool) -> None:
        ledger = self._ledger
        self._others_left -= page_count - (self._wanted - wanted)
        self._wanted = wanted if self._others_left > 0 else 0
        ledger.evicted += page_count
        if is_fragment:
            ledger.evicted_fragment += page_count
        if self._now is None:
            ledger.evicted_pinned += page_count


def _cut(tree: Tree, run: Run, index: int, evicted: list[Evicted]) -> None:
    """Unlink a run's pages from `index` on and list them."""
    evicted.append(Evicted(tree, run.blob[index * tree.key_bytes :], run.slots[index:]))
    tree.chains.cut(run, index)


def count_pages(evicted: Iterable[Evicted]) -> int:
    """How many pages went in all."""
    return sum(len(each.slots) for each in evicted)


def count_descendants(chains: Chains, key: bytes, limit: int) -> int:
    """Pages below a held page; counting stops once there are `limit`."""
    place = chains.locate(key)
    if place is None:
        return 0
    run, index = place
    count = len(run.slots) - index - 1
    ahead = list(run.children())
    while ahead and count < limit:
        run = ahead.pop()
        count += len(run.slots)
        ahead.extend(run.children())
    return min(count, limit)


def evict_subtrees(
    tree: Tree, keys: Iterable[bytes], is_free: Callable[[int], bool]
) -> list[Evicted] | None:
    """Unlink these pages and all below them, or, when one is busy, nothing and return None."""
    kept: dict[Run, int] = {}  # run → pages of it that stay
    for key in keys:
        place = tree.chains.locate(key)
        if place is None:
            continue
        run, index = place
        kept[run] = min(index, kept.get(run, index))
        below = list(run.children())
        while below:
            run = below.pop()
            if kept.get(run) != 0:
                kept[run] = 0
                below.extend(run.children())
    for run, index in kept.items():
        if not all(is_free(slot) for slot in run.slots[index:]):
            return None
    evicted: list[Evicted] = []
    _cut_leaves_first(tree, kept, evicted)
    tree.chains.ledger.evicted += count_pages(evicted)
    return evicted


def _cut_leaves_first(tree: Tree, kept: dict[Run, int], evicted: list[Evicted]) -> None:
    ready = [run for run in kept if run.first_child is None]
    while ready:
        run = ready.pop()
        above = run.parent
        _cut(tree, run, kept[run], evicted)
        if above is not None and above.first_child is None and above in kept:
            ready.append(above)
