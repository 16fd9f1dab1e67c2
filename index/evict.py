"""Evicting pages from the tails of the coldest leaves.

Owns no state beyond one eviction. Busy runs are passed over in their order and looked at again in
small numbers; the bounds are those of ledger.py. Threading: one thread, the control loop.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

from nexuskv.index.chains import Chains
from nexuskv.index.ledger import EVICT_RESCAN_MAX, EVICT_REVISIT_MAX, EVICT_SCAN_MAX, Ledger
from nexuskv.index.order import EvictionPolicy
from nexuskv.index.run import Run
from nexuskv.index.tree import Tree


class Evicted(NamedTuple):
    """Pages of one chain that were unlinked together; their slots are the caller's.

    `keys` are joined and `slots` one a key, both in chain order. Nothing that is still held hangs
    below them.
    """

    tree: Tree
    keys: bytes
    slots: "array[int]"


class Eviction:
    """One request for room: how much, what is busy, and what went so far."""

    __slots__ = ("_is_free", "_ledger", "_now", "_wanted", "evicted")

    def __init__(
        self, ledger: Ledger, *, count: int, is_free: Callable[[int], bool], now: float
    ) -> None:
        self.evicted: list[Evicted] = []
        self._ledger = ledger
        self._wanted = count
        self._is_free = is_free
        self._now: float | None = now  # None: pins do not count any more

    def run(self, trees: list[Tree]) -> None:
        """Evict from trees: fragments first, then rooted pages, then pinned ones."""
        self.run_fragments(trees)
        self._from_orders([(tree, tree.chains.rooted) for tree in trees])
        if self._wanted and len(self._ledger.pins):
            self._now = None
            self._again([(tree, tree.chains.fragments.order) for tree in trees], EVICT_RESCAN_MAX)
            self._again([(tree, tree.chains.rooted) for tree in trees], EVICT_RESCAN_MAX)

    def run_fragments(self, trees: list[Tree]) -> None:
        """Evict from the fragments of trees only."""
        self._from_orders(
            [(tree, tree.chains.fragments.order) for tree in trees if tree.fragment_count]
        )

    def _from_orders(self, orders: list[tuple[Tree, EvictionPolicy]]) -> None:
        """Evict the coldest of several orders, globally by touch."""
        self._again(orders, EVICT_REVISIT_MAX)
        fronts: list[tuple[int, int, Run]] = []
        for number, (_, order) in enumerate(orders):
            front = order.coldest()
            if front is not None:
                fronts.append((front.touch, number, front))
        heapq.heapify(fronts)
        passed = 0
        while fronts and self._wanted and passed < EVICT_SCAN_MAX:
            _, number, run = fronts[0]
            tree, order = orders[number]
            if not self._take(tree, run):
                order.pass_over(run)
                passed += 1
            front = order.coldest()
            if front is None:
                heapq.heappop(fronts)
            else:
                heapq.heapreplace(fronts, (front.touch, number, front))
        if self._wanted and not fronts:
            self._again(orders, EVICT_RESCAN_MAX)

    def _again(self, orders: list[tuple[Tree, EvictionPolicy]], limit: int) -> None:
        """Look again at runs that were passed over."""
        for tree, order in orders:
            if not self._wanted:
                return
            for run in order.passed_over(limit):
                self._take(tree, run)

    def _take(self, tree: Tree, run: Run) -> bool:
        """Evict from the tail of a run what is wanted and may go.

        Returns:
            False when pages of the run stay although more are wanted.
        """
        if run.first_child is not None:
            return False
        slots, is_free = run.slots, self._is_free
        now = self._now if len(self._ledger.pins) else None
        kept = page_count = len(slots)
        least = max(0, page_count - self._wanted)
        while kept > least and is_free(slots[kept - 1]):
            if now is not None and tree.is_pinned(tree.chains.key_at(run, kept - 1), now):
                break
            kept -= 1
        if kept < page_count:
            self._count(page_count - kept, is_fragment=run.order is tree.chains.fragments.order)
            _cut(tree, run, kept, self.evicted)
        return kept == least

    def _count(self, page_count: int, *, is_fragment: bool) -> None:
        ledger = self._ledger
        self._wanted -= page_count
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
