"""The radix prefix index of one daemon: the trees of all namespaces, and eviction across them.

Owns the trees, the order in which their pages go, and the bounds they share. Pages are evicted
coldest first: fragments before rooted pages, a page of a chain only after its children, a pinned
page only when nothing else can go, a busy page never. Threading: one thread, the control loop.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from nexuskv.errors import ConfigError
from nexuskv.index.chains import Chains
from nexuskv.index.demote import Demoted, Demotion, NearEviction, cold_near
from nexuskv.index.evict import (
    Evicted,
    Eviction,
    count_descendants,
    count_pages,
    evict_subtrees,
)
from nexuskv.index.ledger import Ledger
from nexuskv.index.order import EvictionPolicy, LruOrder
from nexuskv.index.pins import PinTable
from nexuskv.index.run import Run
from nexuskv.index.tree import Tree
from nexuskv.key import check_key_bytes
from nexuskv.types import Kind

__all__ = ["Demoted", "Evicted", "RadixIndex", "count_pages"]


class RadixIndex:
    """All namespaces of one daemon.

    Args:
        policy: makes an eviction order; two a tree.
        fragments_max: heads of fragments; `evict_overflow` brings them back under it.
        pins_max: pinned pages.
        run_pages_max: pages one run holds: a cut moves at most half as many.
    """

    def __init__(
        self,
        *,
        policy: Callable[[], EvictionPolicy] = LruOrder,
        fragments_max: int,
        pins_max: int = 65536,
        run_pages_max: int = 256,
    ) -> None:
        self._policy = policy
        self._fragments_max = fragments_max
        self._ledger = Ledger(pins=PinTable(pins_max=pins_max), run_pages_max=run_pages_max)
        self._trees: dict[bytes, Tree] = {}
        self._groups: dict[int, list[Tree]] = {}
        self._opened = 0

    # --- trees

    def open(self, namespace_id: bytes, *, kind: Kind, key_bytes: int, group: int) -> Tree:
        """The tree of a namespace, made on the first call.

        Args:
            namespace_id: its 16 bytes.
            kind: what its pages hold.
            key_bytes: length of its keys.
            group: slot size in bytes; eviction works per group.

        Raises:
            ConfigError: a bad key length, or the namespace is open with other properties.
        """
        check_key_bytes(key_bytes)
        tree = self._trees.get(namespace_id)
        if tree is None:
            chains = Chains(
                key_bytes=key_bytes,
                number=self._opened,
                policy=self._policy,
                ledger=self._ledger,
            )
            tree = Tree(namespace_id, kind=kind, group=group, chains=chains)
            self._opened += 1
            self._trees[namespace_id] = tree
            self._groups.setdefault(group, []).append(tree)
        elif (tree.kind, tree.key_bytes, tree.group) != (kind, key_bytes, group):
            raise ConfigError(
                f"namespace {namespace_id.hex()} is open as {tree.kind.name.lower()} with keys of "
                f"{tree.key_bytes} and slots of {tree.group} bytes, asked for "
                f"{kind.name.lower()}, {key_bytes} and {group}"
            )
        return tree

    def close(self, namespace_id: bytes) -> None:
        """Forget a namespace that holds no pages; its tree may not be used again."""
        tree = self._trees[namespace_id]
        assert not tree.page_count, f"{tree.page_count} pages are held"
        del self._trees[namespace_id]
        self._groups[tree.group].remove(tree)
        tree.chains.close()

    def tree(self, namespace_id: bytes) -> Tree | None:
        """The tree of a namespace, if it was opened."""
        return self._trees.get(namespace_id)

    def trees(self) -> Collection[Tree]:
        """Every tree, in the order they were opened."""
        return self._trees.values()

    @property
    def page_count(self) -> int:
        """Pages held in all trees."""
        return sum(tree.page_count for tree in self._trees.values())

    @property
    def counters(self) -> Mapping[str, int]:
        """Grafts made and refused, cuts inside runs, fragments and pins now, pages evicted."""
        return self._ledger.counters()

    # --- eviction

    def evict(
        self,
        count: int,
        *,
        is_free: Callable[[int], bool],
        now: float,
        group: int | None = None,
        trees: Iterable[Tree] | None = None,
        counts: Callable[[int], bool] | None = None,
    ) -> list[Evicted]:
        """Unlink the coldest pages that may go, from all tiers, until `count` have gone.

        Work is bounded: at most `EVICT_SCAN_MAX` busy runs are passed over in a call. They keep
        their places and are looked at again a few a call, or when nothing else can go.

        Args:
            count: pages wanted.
            is_free: whether a slot's page may go now: not leased, not in transfer.
            now: seconds, on the clock of the pins' ends.
            group: only trees of this slot size.
            trees: only these trees.
            counts: whether a page at a place counts towards `count`; all do by default. At most
                about `EVICT_OTHERS_MAX` other pages go in a call.

        Returns:
            What was unlinked, each page after its children; fewer than `count` if no more can go
            or the bounds were reached. While this is not empty, calling again helps.
        """
        eviction = Eviction(self._ledger, count=count, is_free=is_free, now=now, counts=counts)
        eviction.run(self._to_walk(now, group, trees))
        return eviction.evicted

    def evict_near(
        self,
        count: int,
        *,
        is_free: Callable[[int], bool],
        now: float,
        group: int | None = None,
        trees: Iterable[Tree] | None = None,
    ) -> list[Evicted]:
        """Unlink the `count` coldest near pages that may go, for room in host memory.

        Unlike `evict` with near pages counted it spares colder far pages, which would give no such
        room: first near pages with nothing below them go, then others with all that is below them.
        Arguments, bounds and the result are those of `evict`.
        """
        eviction = NearEviction(self._ledger, count=count, is_free=is_free, now=now)
        eviction.run(self._to_walk(now, group, trees))
        return eviction.evicted

    def demote(
        self,
        count: int,
        *,
        far_of: Callable[[int], int],
        is_free: Callable[[int], bool],
        now: float,
        group: int | None = None,
        trees: Iterable[Tree] | None = None,
    ) -> list[Demoted]:
        """Hold the `count` coldest near pages that have a copy at their far places instead.

        A page may stand anywhere in its chain. Bounds are those of `evict`; runs without near pages
        are passed once and not looked at again until they are used or get some.

        Args:
            count: pages wanted.
            far_of: the far place of a near page's copy; `ABSENT` when it has none.
            is_free: whether a near place may be given up now: not leased, not in transfer.
            now: seconds, on the clock of the pins' ends; pinned pages come last.
            group: only trees of this slot size.
            trees: only these trees.

        Returns:
            What changed, by runs; fewer than `count` pages if there are no more.
        """
        demotion = Demotion(self._ledger, count=count, far_of=far_of, is_free=is_free, now=now)
        demotion.run(self._to_walk(now, group, trees))
        return demotion.demoted

    def cold_near(
        self,
        limit: int,
        *,
        wants: Callable[[int], bool],
        group: int | None = None,
        trees: Iterable[Tree] | None = None,
    ) -> list[tuple[Tree, bytes, int]]:
        """The coldest near pages for which `wants` holds, with tree, key and place.

        For copying ahead of eviction, and for telling what would go. `group` and `trees` are as in
        `evict`. Nothing that can be seen changes. At most `COLD_NEAR_SCAN_MAX` runs are looked at
        of each sort, so there may be more than are returned.
        """
        return cold_near(list(self._among(group, trees)), limit, wants)

    def _to_walk(self, now: float, group: int | None, trees: Iterable[Tree] | None) -> list[Tree]:
        self._ledger.pins.forget_expired(now)
        return [tree for tree in self._among(group, trees) if tree.page_count]

    @property
    def fragments_over(self) -> int:
        """How many fragments there are over `fragments_max`."""
        return max(0, self._ledger.fragments - self._fragments_max)

    def evict_overflow(
        self, *, is_free: Callable[[int], bool], now: float, pages_max: int = 4096
    ) -> list[Evicted]:
        """Unlink the coldest fragments over `fragments_max`. Call after insert and remove.

        At most `pages_max` pages go in a call; `fragments_over` says whether to call again.
        """
        evicted: list[Evicted] = []
        while self.fragments_over and (left := pages_max - count_pages(evicted)) > 0:
            # A fragment has at least one page, so this never takes more heads than are over.
            wanted = min(self.fragments_over, left)
            eviction = Eviction(self._ledger, count=wanted, is_free=is_free, now=now)
            eviction.run_fragments([tree for tree in self.trees() if tree.fragment_count])
            if not eviction.evicted:
                break
            evicted += eviction.evicted
        return evicted

    def coldest(
        self, group: int | None = None, *, trees: Iterable[Tree] | None = None
    ) -> int | None:
        """The touch number of the page that would go first; None when there is none."""
        return next((run.touch for run in self._coldest_first(self._among(group, trees))), None)

    def front_slots(self, group: int, limit: int) -> list[int]:
        """The slots of the `limit` coldest pages of a group, in eviction order, busy or not."""
        slots: list[int] = []
        for run in self._coldest_first(self._among(group, None)):
            slots.extend(reversed(run.slots))
            if len(slots) >= limit:
                break
        return slots[:limit]

    def coldness(self, tree: Tree, key: bytes) -> int | None:
        """The touch number of a held page: lower is colder. None when it is not held."""
        place = tree.chains.locate(key)
        return None if place is None else place[0].touch

    def descendant_count(self, tree: Tree, key: bytes, *, limit: int) -> int:
        """Pages below a held page; counting stops once there are `limit`."""
        return count_descendants(tree.chains, key, limit)

    def evict_subtrees(
        self, tree: Tree, keys: Iterable[bytes], *, is_free: Callable[[int], bool]
    ) -> list[Evicted] | None:
        """Unlink exactly these pages and everything below them, pinned or not.

        Returns:
            What was unlinked, each page after its children; None, and nothing was changed, when
            one of the pages is busy. Keys that are not held are skipped.
        """
        return evict_subtrees(tree, keys, is_free)

    def _among(self, group: int | None, trees: Iterable[Tree] | None) -> Iterable[Tree]:
        if trees is not None:
            return [tree for tree in trees if group is None or tree.group == group]
        return self.trees() if group is None else self._groups.get(group, [])

    def _coldest_first(self, trees: Iterable[Tree]) -> Iterator[Run]:
        """The runs of trees in eviction order: fragments, then rooted, each by touch."""
        chains = [tree.chains for tree in trees]
        yield from heapq.merge(*(each.fragments.order for each in chains), key=_touch)
        yield from heapq.merge(*(each.rooted for each in chains), key=_touch)


def _touch(run: Run) -> int:
    return run.touch
