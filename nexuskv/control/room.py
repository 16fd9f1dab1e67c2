"""Making room in host memory: free slots, fresh chunks, eviction, a chunk of another slot size.

With an ssd tier eviction means: pages with a copy there are demoted, wherever they stand in their
chain; of the others the coldest leaves are lost.

`take` decides; the index knows the order of eviction, the tier knows the slots. Work is bounded:
a chunk is weighed against eviction only once for each chunk's worth of evicted pages.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.copies import Copies
from nexuskv.control.counters import Counters
from nexuskv.control.namespaces import Namespace, Namespaces
from nexuskv.control.pages import Pages
from nexuskv.index.radix import Demoted, RadixIndex, count_pages
from nexuskv.index.tree import Tree
from nexuskv.tiers.host import HostTier, SlotArray
from nexuskv.tiers.record import SlotState
from nexuskv.types import FAR_PLACES

_NOTHING: Final = frozenset[int]()
_NOMINATING_PAGES: Final = 64  # coldest pages of another slot size whose chunks are weighed
_CANDIDATES_MAX: Final = 4  # chunks weighed before none is given up
_AHEAD_PAGES_MAX: Final = 512  # free slots kept ahead for one slot size
_AHEAD_SHARE: Final = 128  # and at most one for so many used ones
_DESCENDANTS_MAX: Final = 65536  # counting the pages below a chunk stops here


class Writer(NamedTuple):
    """Who will write into slots: a client's process, or the worker, which has no session."""

    pid: int
    start_time: int
    session: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk that may be given to another slot size, and what that would cost."""

    chunk_index: int
    keys: dict[Tree, list[bytes]]
    page_count: int
    descendant_count: int
    mean_touch: float


class Room:
    """Finds slots for new pages."""

    def __init__(
        self,
        *,
        config: Config,
        clock: Clock,
        index: RadixIndex,
        pages: Pages,
        namespaces: Namespaces,
        counters: Counters,
    ) -> None:
        self._config = config
        self._clock = clock
        self._index = index
        self._pages = pages
        self._namespaces = namespaces
        self._counters = counters
        self._kept: frozenset[int] = _NOTHING
        self._ahead: dict[int, SlotArray] = {}  # slot size → slots of its last put
        # Slot size → pages evicted for it since a chunk was last weighed.
        self._evicted_since: defaultdict[int, int] = defaultdict(int)

    def take(
        self,
        namespace: Namespace,
        count: int,
        *,
        writer: Writer,
        held: Iterable[int] = _NOTHING,
    ) -> SlotArray:
        """Lend up to `count` slots to a writer, making room as far as it can be made.

        `held` are places of the pages before and between the new ones: without them these could
        not be matched, so they are not evicted to make room.
        """
        self._kept = frozenset(held)
        count = self._within_cap(namespace, count)
        self._make(namespace.slot_bytes, count)
        self._kept = _NOTHING
        return self._tier.take(
            namespace.slot_bytes,
            count,
            pid=writer.pid,
            start_time=writer.start_time,
            session=writer.session,
            page_bytes=namespace.page_bytes,
        )

    def committed(self, namespace: Namespace, slots: SlotArray) -> None:
        """Pages were published: as many will be wanted next, and likely under these."""
        self._ahead[namespace.slot_bytes] = slots

    def make_ahead(self) -> None:
        """Free slots for the next puts. Call it once replies are out: a put need not wait then.

        As many as the last put of each slot size took, within bounds that keep the store full.
        """
        while self._ahead:
            slot_bytes, last = self._ahead.popitem()
            usage = self._tier.usage_of(slot_bytes)
            wanted = min(len(last), _AHEAD_PAGES_MAX, usage.used // _AHEAD_SHARE)
            if usage.free < wanted and not self._tier.spare_chunks:
                self._kept = frozenset(last.tolist())
                evicted = self._evict(wanted - usage.free, group=slot_bytes)
                self._kept = _NOTHING
                self._evicted_since[slot_bytes] += evicted

    def trim(self) -> None:
        """Evict fragments over fragments_max: call it after pages came or went."""
        if self._index.fragments_over:
            self._pages.evicted(
                self._index.evict_overflow(is_free=self._pages.is_free, now=self._clock.now())
            )

    def _may_go(self, slot: int) -> bool:
        """Whether a page may be evicted now."""
        return self._pages.is_free(slot) and slot not in self._kept

    @property
    def _tier(self) -> HostTier:
        return self._pages.tier

    def _within_cap(self, namespace: Namespace, count: int) -> int:
        """Keep a namespace under namespace_bytes_max by evicting its own coldest pages."""
        if not self._config.namespace_bytes_max:
            return count
        most = self._config.namespace_bytes_max // namespace.slot_bytes - namespace.reserved_count
        over = namespace.near_count + count - most
        if over > 0:
            self._evict(over, trees=[namespace.tree])
        return max(0, min(count, most - namespace.near_count))

    def _make(self, slot_bytes: int, count: int) -> None:
        """Bring the number of free slots of a size to `count`, if it can be."""
        tier = self._tier
        while tier.free_count(slot_bytes) < count:
            if tier.carve(slot_bytes):
                continue
            # A spare chunk that cannot be carved has no memory for its records: no other would.
            stuck = tier.spare_chunks > 0
            short = count - tier.free_count(slot_bytes)
            if not stuck and self._should_weigh(slot_bytes) and self._take_chunk(slot_bytes):
                continue
            evicted = self._evict(short, group=slot_bytes)
            self._evicted_since[slot_bytes] += evicted
            if not evicted and (stuck or not self._take_chunk(slot_bytes, any_age=True)):
                return

    def _evict(
        self, count: int, *, group: int | None = None, trees: list[Tree] | None = None
    ) -> int:
        """Free the slots of up to `count` pages, coldest first; how many."""
        if self._pages.copies is not None:
            return self._evict_near(self._pages.copies, count, group=group, trees=trees)
        evicted = self._index.evict(
            count, is_free=self._may_go, now=self._clock.now(), group=group, trees=trees
        )
        self._pages.evicted(evicted)
        return count_pages(evicted)

    # --- with a second tier

    def _evict_near(
        self, copies: Copies, count: int, *, group: int | None, trees: list[Tree] | None
    ) -> int:
        """The same where pages may have copies: those are demoted, others are lost (I3).

        Cold pages without a copy would fill host memory if copied ones were demoted first however
        hot, so as many of these go as there are among the coldest. One with something below it
        goes only when nothing else does: with it that would be lost, far pages too.
        """
        cold = self._index.cold_near(count, wants=self._may_go, group=group, trees=trees)
        bare = [(tree, key) for tree, key, slot in cold if not copies.has(slot)]
        if bare and self._demotes_first(copies, *bare[0], group=group, trees=trees):
            cold, bare = [], []
        freed = 0
        if bare and len(bare) == len(cold):
            freed = self._evict_bare({tree for tree, _key in bare}, count)
        if not freed:
            freed = self._lose_leaves(bare)
        if freed < count:
            freed += self._demote(copies, count - freed, group=group, trees=trees)
        if freed < count:
            cold = self._index.cold_near(
                count - freed,
                wants=lambda slot: self._may_go(slot) and not copies.has(slot),
                group=group,
                trees=trees,
            )
            freed += sum(self._lose(tree, [key]) for tree, key, _slot in cold)
        return freed

    def _demotes_first(
        self,
        copies: Copies,
        tree: Tree,
        key: bytes,
        *,
        group: int | None,
        trees: list[Tree] | None,
    ) -> bool:
        """Whether a page with a copy is as cold as this one without.

        So it is in a chain that grows, whose last pages have none yet: it was touched as a whole.
        """
        copied = self._index.cold_near(
            1,
            wants=lambda slot: self._may_go(slot) and copies.has(slot),
            group=group,
            trees=trees,
        )
        if not copied:
            return False
        ours, theirs = (
            self._index.coldness(tree, key),
            self._index.coldness(copied[0][0], copied[0][1]),
        )
        return ours is not None and theirs is not None and theirs <= ours

    def _evict_bare(self, trees: set[Tree], count: int) -> int:
        """Evict in bulk from trees without any far page: nothing far can be lost there."""
        near = [tree for tree in trees if not self._pages.namespace_of(tree).far_count]
        if len(near) < len(trees):
            return 0
        evicted = self._index.evict(
            count, is_free=self._may_go_bare, now=self._clock.now(), trees=near
        )
        self._pages.evicted(evicted)
        return count_pages(evicted)

    def _demote(
        self, copies: Copies, count: int, *, group: int | None, trees: list[Tree] | None
    ) -> int:
        demoted = self._index.demote(
            count,
            far_of=copies.far_of,
            is_free=self._may_go,
            now=self._clock.now(),
            group=group,
            trees=trees,
        )
        return self._pages.demoted(demoted)

    def _lose_leaves(self, cold: list[tuple[Tree, bytes]]) -> int:
        """Evict those of some cold pages, last of a chain first, that have nothing below them.

        What hangs below a page may go with it if it is among them. Pinned pages stay.
        """
        now_s = self._clock.now()
        leaves: dict[Tree, list[bytes]] = {}
        below = 0  # pages of one chain, taken one after another from its end
        for tree, key in cold:
            names = leaves.setdefault(tree, [])
            count = self._index.descendant_count(tree, key, limit=below + 1)
            follows = count and names and count == below and tree.parent_of(names[-1]) == key
            if (count and not follows) or tree.is_pinned(key, now_s):
                continue
            below = below + 1 if follows else 1
            names.append(key)
        return sum(self._lose(tree, names) for tree, names in leaves.items() if names)

    def _lose(self, tree: Tree, names: list[bytes]) -> int:
        """Evict pages with all that is below them, unless any of it is busy."""
        evicted = self._index.evict_subtrees(tree, names, is_free=self._may_go) or []
        self._pages.evicted(evicted)
        return sum(sum(place < FAR_PLACES for place in each.slots) for each in evicted)

    def _may_go_bare(self, slot: int) -> bool:
        """Whether a page may be evicted and is lost then."""
        copies = self._pages.copies
        return self._may_go(slot) and copies is not None and not copies.has(slot)

    # --- giving memory to another slot size

    def _should_weigh(self, slot_bytes: int) -> bool:
        if self._evicted_since[slot_bytes] < self._tier.chunk_bytes // slot_bytes:
            return False
        self._evicted_since[slot_bytes] = 0
        return True

    def _take_chunk(self, slot_bytes: int, *, any_age: bool = False) -> bool:
        """Free a chunk of another size when its pages are colder than what else would go.

        With `any_age` the coldest chunk goes whatever its age: this size has nothing to evict.
        While memory is still being populated none goes: after a restart a whole chunk of pages
        would be lost for want of a moment's patience.
        """
        if self._tier.chunk_to_populate() is not None:
            return False
        own = self._coldest(slot_bytes)
        candidates = [
            candidate
            for candidate in self._candidates(slot_bytes)
            if any_age or own is None or candidate.mean_touch < own
        ]
        for candidate in sorted(candidates, key=_cost):
            if self._empty(candidate):
                self._tier.release_chunk(candidate.chunk_index)
                self._counters.add("chunks_moved")
                return True
        return False

    def _candidates(self, slot_bytes: int) -> list[Candidate]:
        """The chunks that the coldest pages of other sizes lie in, and empty ones."""
        nominated: dict[int, None] = {}
        others = [u.slot_bytes for u in self._tier.usage_by_size() if u.slot_bytes != slot_bytes]
        for chunk in self._tier.chunks():
            in_use = chunk.used + chunk.writing + chunk.quarantined + chunk.unlinked
            if chunk.slot_bytes in others and not in_use:
                nominated[chunk.chunk_index] = None
                break
        for size in others:
            for slot in self._cold_slots(size):
                nominated.setdefault(self._tier.chunk_of(slot))
        found = (self._weigh(index) for index in list(nominated)[: 2 * _CANDIDATES_MAX])
        return [candidate for candidate in found if candidate is not None][:_CANDIDATES_MAX]

    def _coldest(self, slot_bytes: int) -> int | None:
        """The touch number of the page of a size that would go first; None when there is none."""
        if self._pages.copies is None:
            return self._index.coldest(slot_bytes)
        cold = self._index.cold_near(1, wants=_any, group=slot_bytes)
        return self._index.coldness(cold[0][0], cold[0][1]) if cold else None

    def _cold_slots(self, slot_bytes: int) -> list[int]:
        """The host slots of the coldest pages of a size."""
        if self._pages.copies is None:
            return self._index.front_slots(slot_bytes, _NOMINATING_PAGES)
        cold = self._index.cold_near(_NOMINATING_PAGES, wants=_any, group=slot_bytes)
        return [slot for _tree, _key, slot in cold]

    def _weigh(self, chunk_index: int) -> Candidate | None:
        """What it takes to empty a chunk; None when somebody writes or reads there."""
        used = self._tier.slots_of_chunk(chunk_index)
        if (used.states != SlotState.READY).any():
            return None
        keys: defaultdict[Tree, list[bytes]] = defaultdict(list)
        touches = descendants = 0
        for slot in used.slots.tolist():
            place = self._tier.page_of(slot)
            if place is None or not self._may_go(slot):
                return None
            tree = self._namespaces.by_id[place[0]].tree
            keys[tree].append(place[1])
            touch = self._index.coldness(tree, place[1])
            if touch is None:
                return None  # An earlier run's page that recovery has not put into the index yet.
            touches += touch
        for tree, names in keys.items():
            descendants += sum(
                self._index.descendant_count(tree, name, limit=_DESCENDANTS_MAX) for name in names
            )
        count = len(used.slots)
        return Candidate(chunk_index, dict(keys), count, descendants, touches / max(1, count))

    def _empty(self, candidate: Candidate) -> bool:
        """Free a chunk's slots; False when one of its pages is busy.

        Pages with a copy are demoted, others are evicted with what hangs below them.
        """
        for tree, names in candidate.keys.items():
            bare = names if self._pages.copies is None else self._demote_of(tree, names)
            evicted = self._index.evict_subtrees(tree, bare, is_free=self._may_go)
            if evicted is None:
                return False
            self._pages.evicted(evicted)
        return True

    def _demote_of(self, tree: Tree, names: list[bytes]) -> list[bytes]:
        """Demote those of some free pages that have a copy; the others' keys."""
        copies = self._pages.copies
        assert copies is not None
        places = [(name, tree.slot_of(name)) for name in names]
        moving = [(name, slot) for name, slot in places if slot is not None and copies.has(slot)]
        if moving:
            keys = b"".join(name for name, _slot in moving)
            near = array("I", [slot for _name, slot in moving])
            far = array("I", [copies.far_of(slot) for slot in near])
            moved = tree.move(keys, near, far)
            assert all(moved)
            self._pages.demoted([Demoted(tree, keys, near, far)])
        gone = {name for name, _slot in moving}
        return [name for name in names if name not in gone]


def _any(_slot: int) -> bool:
    return True


def _cost(candidate: Candidate) -> tuple[int, float]:
    """Fewest pages first, then coldest."""
    return candidate.page_count + candidate.descendant_count, candidate.mean_touch
