"""Walking the eviction orders of several trees from their coldest runs on.

Owns no state beyond one request for room. Runs that can give nothing are passed over in their
order and looked at again in small numbers; the bounds are those of ledger.py. Threading: one
thread, the control loop.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable

from nexuskv.index.ledger import EVICT_RESCAN_MAX, EVICT_REVISIT_MAX, EVICT_SCAN_MAX, Ledger
from nexuskv.index.order import EvictionPolicy, Frontier
from nexuskv.index.run import Run
from nexuskv.index.tree import Tree


class Walk(ABC):
    """One request for room: how many pages are wanted, and which are busy or pinned."""

    __slots__ = ("_is_free", "_ledger", "_now", "_wanted")

    def __init__(
        self, ledger: Ledger, *, count: int, is_free: Callable[[int], bool], now: float
    ) -> None:
        self._ledger = ledger
        self._wanted = count
        self._is_free = is_free
        self._now: float | None = now  # None: pins do not count any more

    @abstractmethod
    def frontier(self, order: EvictionPolicy) -> Frontier:
        """Where in an order to walk."""

    @abstractmethod
    def take(self, tree: Tree, run: Run) -> bool:
        """Take of a run what is wanted and may be taken.

        Returns:
            Whether the run need not be passed over: it is gone, or nothing more is wanted.
        """

    def relent(self) -> bool:
        """Allow more than before, as all else did not suffice; False when there is no more."""
        if self._now is None or not len(self._ledger.pins):
            return False
        self._now = None
        return True

    def run(self, trees: list[Tree]) -> None:
        """Take from trees: fragments first, then rooted pages, then what was held back."""
        self.run_fragments(trees)
        rooted = [(tree, self.frontier(tree.chains.rooted)) for tree in trees]
        self._from_frontiers(rooted)
        while self._wanted and self.relent():
            self._again(
                [(tree, self.frontier(tree.chains.fragments.order)) for tree in trees],
                EVICT_RESCAN_MAX,
            )
            self._again(rooted, EVICT_RESCAN_MAX)

    def run_fragments(self, trees: list[Tree]) -> None:
        """Take from the fragments of trees only."""
        self._from_frontiers(
            [
                (tree, self.frontier(tree.chains.fragments.order))
                for tree in trees
                if tree.fragment_count
            ]
        )

    def _from_frontiers(self, frontiers: list[tuple[Tree, Frontier]]) -> None:
        """Take from the coldest of several orders, globally by touch."""
        self._again(frontiers, EVICT_REVISIT_MAX)
        fronts: list[tuple[int, int, Run]] = []
        for number, (_, frontier) in enumerate(frontiers):
            front = frontier.coldest()
            if front is not None:
                fronts.append((front.touch, number, front))
        heapq.heapify(fronts)
        passed = 0
        while fronts and self._wanted and passed < EVICT_SCAN_MAX:
            _, number, run = fronts[0]
            tree, frontier = frontiers[number]
            if not self.take(tree, run):
                frontier.pass_over(run)
                passed += 1
            front = frontier.coldest()
            if front is None:
                heapq.heappop(fronts)
            else:
                heapq.heapreplace(fronts, (front.touch, number, front))
        if self._wanted and not fronts:
            self._again(frontiers, EVICT_RESCAN_MAX)

    def _again(self, frontiers: list[tuple[Tree, Frontier]], limit: int) -> None:
        """Look again at runs that were passed over."""
        for tree, frontier in frontiers:
            if not self._wanted:
                return
            for run in frontier.passed_over(limit):
                self.take(tree, run)

    def _may_go(self, tree: Tree, run: Run, index: int) -> bool:
        """Whether a page is neither busy nor, while pins count, pinned."""
        if not self._is_free(run.slots[index]):
            return False
        if self._now is None or not len(self._ledger.pins):
            return True
        return not tree.is_pinned(tree.chains.key_at(run, index), self._now)
