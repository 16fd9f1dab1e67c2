"""Giving back host memory: near pages become far ones, or leave with what hangs below them.

Owns no state beyond one request. A page with a copy elsewhere may lose its near place wherever it
stands in its chain; one without goes only after everything below it. Threading: one thread, the
control loop.
"""

import heapq
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nexuskv.index.evict import Eviction
from nexuskv.index.ledger import COLD_NEAR_SCAN_MAX, Ledger
from nexuskv.index.near import NearFrontier, is_near
from nexuskv.index.order import EvictionPolicy, Frontier
from nexuskv.index.run import Run
from nexuskv.index.tree import ABSENT, Tree
from nexuskv.index.walk import Walk
from nexuskv.types import FAR_PLACES


class Demoted(NamedTuple):
    """Pages of one run that are held at their far places now; their near ones are the caller's.

    `keys` are joined, in chain order though not always consecutive; `near` and `far` are one a key.
    """

    tree: Tree
    keys: bytes
    near: "array[int]"
    far: "array[int]"


class Demotion(Walk):
    """Replaces near places by far ones, coldest run first and in it the last page first."""

    __slots__ = ("_far_of", "demoted")

    def __init__(
        self,
        ledger: Ledger,
        *,
        count: int,
        far_of: Callable[[int], int],
        is_free: Callable[[int], bool],
        now: float,
    ) -> None:
        super().__init__(ledger, count=count, is_free=is_free, now=now)
        self.demoted: list[Demoted] = []
        self._far_of = far_of

    def frontier(self, order: EvictionPolicy) -> Frontier:
        """Runs with near pages."""
        return order.near

    def take(self, tree: Tree, run: Run) -> bool:
        """Demote the pages of a run that have a copy and may go."""
        slots = run.slots
        chosen: list[tuple[int, int]] = []
        for index in range(len(slots) - 1, -1, -1):
            place = slots[index]
            if place >= FAR_PLACES:
                continue
            if len(chosen) == self._wanted:
                break
            far = self._far_of(place)
            if far != ABSENT and self._may_go(tree, run, index):
                chosen.append((index, far))
        if chosen:
            chosen.reverse()
            self._demote(tree, run, chosen)
        return not self._wanted

    def _demote(self, tree: Tree, run: Run, chosen: list[tuple[int, int]]) -> None:
        slots, chains = run.slots, tree.chains
        near = array("I", [slots[index] for index, _ in chosen])
        for index, far in chosen:
            slots[index] = far
        keys = b"".join([chains.key_at(run, index) for index, _ in chosen])
        self.demoted.append(Demoted(tree, keys, near, array("I", [far for _, far in chosen])))
        self._wanted -= len(chosen)
        self._ledger.demoted += len(chosen)


class NearEviction(Eviction):
    """Evicts the coldest near pages: first those with nothing below them, then the others.

    It looks at near pages alone, so far pages stay however cold, unless they hang below one.
    """

    __slots__ = ("_with_others",)

    def __init__(
        self, ledger: Ledger, *, count: int, is_free: Callable[[int], bool], now: float
    ) -> None:
        super().__init__(ledger, count=count, is_free=is_free, now=now, counts=is_near)
        self._with_others = False

    def frontier(self, order: EvictionPolicy) -> Frontier:
        """Runs with near pages."""
        return order.near

    def relent(self) -> bool:
        """First far pages below near ones may go, then pinned ones."""
        if self._with_others:
            return super().relent()
        self._with_others = True
        return True

    def take(self, tree: Tree, run: Run) -> bool:
        """Evict from the tail of a run as far as there are near pages that may go."""
        slots = run.slots
        if tree.chains.pages.get(tree.chains.key_at(run, 0)) is not run:
            return True  # it went with a run above it
        if self._with_others:
            if not self._clear_below(tree, run):
                return not self._wanted
            least = next((at for at, place in enumerate(slots) if place < FAR_PLACES), len(slots))
        elif run.first_child is not None:
            return False
        else:
            least = len(slots)
            while least and slots[least - 1] < FAR_PLACES:
                least -= 1
        return not self.shorten(tree, run, least) or not self._wanted

    def _clear_below(self, tree: Tree, top: Run) -> bool:
        """Evict what hangs below a run, leaves first, until a page may not go or enough went."""
        run = top
        while self._wanted:
            while run.first_child is not None:
                run = run.first_child
            if run is top:
                return True
            above = run.parent
            assert above is not None
            if self.shorten(tree, run, 0):
                return False
            run = above
        return False


def cold_near(
    trees: list[Tree], limit: int, wants: Callable[[int], bool]
) -> list[tuple[Tree, bytes, int]]:
    """Up to `limit` of the coldest near pages for which `wants` holds, with tree and place.

    Fragments come first, in each run the last page. At most `COLD_NEAR_SCAN_MAX` runs that were set
    aside and as many others are looked at for each.
    """
    found: list[tuple[Tree, bytes, int]] = []
    for fragments in (True, False):
        for tree, run in _cold_runs(trees, fragments=fragments):
            for index in range(len(run.slots) - 1, -1, -1):
                place = run.slots[index]
                if place < FAR_PLACES and wants(place):
                    found.append((tree, tree.chains.key_at(run, index), place))
                    if len(found) == limit:
                        return found
    return found


def _cold_runs(trees: list[Tree], *, fragments: bool) -> Iterator[tuple[Tree, Run]]:
    nears: list[tuple[Tree, NearFrontier]] = []
    for tree in trees:
        if fragments and not tree.fragment_count:
            continue
        near = (tree.chains.fragments.order if fragments else tree.chains.rooted).near
        near.skip(COLD_NEAR_SCAN_MAX)
        nears.append((tree, near))
    for part in (
        [_named(tree, near.aside(COLD_NEAR_SCAN_MAX)) for tree, near in nears],
        [_named(tree, near) for tree, near in nears],
    ):
        merged = heapq.merge(*part, key=_touch)
        for _, each in zip(range(COLD_NEAR_SCAN_MAX), merged, strict=False):
            yield each


def _named(tree: Tree, runs: "NearFrontier | list[Run]") -> Iterator[tuple[Tree, Run]]:
    return ((tree, run) for run in runs)


def _touch(each: tuple[Tree, Run]) -> int:
    return each[1].touch
