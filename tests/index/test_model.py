"""The index against a model: a dict of pages, each with its parent, place and last use.

The model knows nothing of runs. It says what is held, where and linked; the index must answer the
same after any sequence of commits, grafts, removals, clears, moves, demotions, evictions and pins.
"""

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nexuskv import UNKNOWN, Unknown
from nexuskv.index.chains import Chains, Parent
from nexuskv.index.evict import Evicted
from nexuskv.index.near import has_near, is_near
from nexuskv.index.radix import Demoted, RadixIndex
from nexuskv.index.run import Run
from nexuskv.index.tree import ABSENT, Tree
from nexuskv.key import split_keys
from nexuskv.types import FAR_PLACES, Kind

KEYS = [bytes([0, 0, at % 3, 0, 0, at, 0, 0]) for at in range(14)]
KINDS = (Kind.ATTENTION, Kind.ATTENTION, Kind.WINDOW, Kind.STATE)
ATTENTION_FIRST = 2  # trees of kind attention stand first in KINDS
RUN_PAGES_MAX = 4
FRAGMENTS_MAX = 3
GROUPS = (1, 1, 1, 2)


class Gone(NamedTuple):
    """One evicted page."""

    tree: Tree
    key: bytes
    slot: int


key_lists = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)
trees = st.integers(0, len(KINDS) - 1)
far_positions = st.sets(st.integers(0, 7), max_size=8)
parents = st.one_of(st.none(), st.just(UNKNOWN), st.sampled_from(KEYS))


@dataclass
class Page:
    """`linked`: the parent was held when it was recorded, and has been since; or it is a root."""

    slot: int
    parent: Parent
    linked: bool


@dataclass
class Model:
    """One tree, page by page."""

    chained: bool
    pages: dict[bytes, Page] = field(default_factory=lambda: dict[bytes, Page]())
    pins: dict[bytes, float] = field(default_factory=lambda: dict[bytes, float]())

    def insert(self, parent: Parent, keys: list[bytes], slots: list[int]) -> list[int]:
        lost: list[int] = []
        for key, slot in zip(keys, slots, strict=True):
            if key in self.pages:
                lost.append(slot)
            else:
                self.pages[key] = Page(slot, None, True)
                if self.chained:
                    held = parent is None or (parent in self.pages and parent != key)
                    self.pages[key] = Page(slot, parent, held)
                parent = key
                continue
            if self.chained:
                self.learn(parent, key)
            parent = key
        return lost

    def learn(self, parent: Parent, key: bytes) -> bool:
        """A request or commit says that `key` follows `parent`. Whether it does now."""
        page = self.pages[key]
        if page.linked:
            return page.parent == parent
        if isinstance(parent, Unknown) or page.parent not in (UNKNOWN, parent):
            return False
        if parent is None or parent in self.pages:
            if parent is not None and key in self.ancestry(parent):
                return False
            page.linked = True
        page.parent = parent
        return page.linked

    def ancestry(self, key: bytes) -> list[bytes]:
        """The page and every page it hangs under."""
        found = [key]
        while (page := self.pages[found[-1]]).linked and isinstance(page.parent, bytes):
            found.append(page.parent)
        return found

    def rooted(self, key: bytes) -> bool:
        return self.pages[self.ancestry(key)[-1]].linked

    def children(self, key: bytes) -> list[bytes]:
        return [k for k, page in self.pages.items() if page.linked and page.parent == key]

    def below(self, key: bytes) -> set[bytes]:
        return {key}.union(*(self.below(child) for child in self.children(key)))

    def walk(self, keys: list[bytes]) -> None:
        """What a touching lookup of `keys` learns."""
        for before, key in pairwise(keys):
            if self.chained and before in self.pages and key in self.pages:
                self.learn(before, key)

    def prefix(self, keys: list[bytes]) -> int:
        """The length of the longest held prefix; learns along it."""
        for at, key in enumerate(keys):
            if key not in self.pages:
                return at
            if self.chained and at and not self.learn(keys[at - 1], key):
                return at
        return len(keys)

    def remove(self, key: bytes) -> int:
        for child in self.children(key):
            self.pages[child].linked = False
        self.pins.pop(key, None)
        return self.pages.pop(key).slot


class IndexAgainstAModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex(
            fragments_max=FRAGMENTS_MAX, pins_max=100, run_pages_max=RUN_PAGES_MAX
        )
        self.trees: list[Tree] = [
            self.index.open(bytes([at]) * 16, kind=kind, key_bytes=8, group=GROUPS[at])
            for at, kind in enumerate(KINDS)
        ]
        self.models = [Model(chained=kind is Kind.ATTENTION) for kind in KINDS]
        self.next_slot = 0
        self.next_far = FAR_PLACES
        self.far_of: dict[int, int] = {}  # near place → the far one of its copy
        self.now = 0.0
        self.busy: set[int] = set()

    @rule(at=trees, parent=parents, keys=key_lists, far=far_positions, used=st.booleans())
    def insert(self, at: int, parent: Parent, keys: list[bytes], far: set[int], used: bool) -> None:
        places = [self.new_far() if n in far else self.new_slot() for n in range(len(keys))]
        lost = self.trees[at].insert(parent, b"".join(keys), places, used=used)
        assert lost == self.models[at].insert(parent, keys, places)

    @rule(
        at=trees,
        start=st.integers(0, 13),
        count=st.integers(1, 8),
        unknown=st.booleans(),
        far=far_positions,
        used=st.booleans(),
    )
    def insert_in_order(
        self, at: int, start: int, count: int, unknown: bool, far: set[int], used: bool
    ) -> None:
        before: Parent = UNKNOWN if unknown else KEYS[start - 1] if start else None
        self.insert(at, before, KEYS[start : start + count], far, used)

    def new_slot(self) -> int:
        self.next_slot += 1
        return self.next_slot - 1

    def new_far(self) -> int:
        self.next_far += 1
        return self.next_far - 1

    @rule(at=trees, keys=key_lists)
    def match(self, at: int, keys: list[bytes]) -> None:
        assert self.trees[at].match(b"".join(keys)) == self.models[at].prefix(keys)

    @rule(at=trees, start=st.integers(0, 13))
    def match_in_order(self, at: int, start: int) -> None:
        self.match(at, KEYS[start:])

    @rule(at=trees, keys=key_lists, touch=st.booleans())
    def find(self, at: int, keys: list[bytes], touch: bool) -> None:
        found = self.trees[at].find(b"".join(keys), touch=touch)
        pages = self.models[at].pages
        assert list(found) == [pages[k].slot if k in pages else ABSENT for k in keys]
        assert self.trees[at].missing(b"".join(keys)) == [
            n for n, key in enumerate(keys) if key not in pages
        ]
        if touch:
            self.models[at].walk(keys)

    @rule(at=trees, keys=st.lists(st.sampled_from(KEYS), max_size=3, unique=True))
    def remove(self, at: int, keys: list[bytes]) -> None:
        model = self.models[at]
        removed = self.trees[at].remove(b"".join(keys))
        expected = [model.remove(k) for k in reversed(keys) if k in model.pages]
        assert list(removed) == expected

    @rule(at=trees, key=st.sampled_from(KEYS), stale=st.booleans())
    def drop(self, at: int, key: bytes, stale: bool) -> None:
        model = self.models[at]
        held = key in model.pages
        slot = model.pages[key].slot if held else 0
        dropped = self.trees[at].drop(key, slot + stale)
        assert dropped == (held and not stale)
        if dropped:
            model.remove(key)

    @rule(at=trees)
    def clear(self, at: int) -> None:
        model, epoch = self.models[at], self.trees[at].epoch
        slots = sorted(page.slot for page in model.pages.values())
        assert sorted(self.trees[at].clear()) == slots
        assert self.trees[at].epoch == epoch + 1
        self.models[at] = Model(chained=model.chained)

    @rule(at=trees, keys=key_lists, ttl_s=st.integers(1, 3))
    def pin(self, at: int, keys: list[bytes], ttl_s: int) -> None:
        model = self.models[at]
        held = [key for key in keys if key in model.pages]
        assert self.trees[at].pin(b"".join(keys), self.now + ttl_s) == len(held)
        model.pins.update(dict.fromkeys(held, self.now + ttl_s))

    @rule(at=trees, key=st.sampled_from(KEYS))
    def unpin(self, at: int, key: bytes) -> None:
        pins = self.models[at].pins
        pinned = self.trees[at].is_pinned(key, self.now)
        assert pinned == (pins.get(key, self.now) > self.now)
        self.trees[at].unpin(key)
        pins.pop(key, None)

    @rule(seconds=st.integers(0, 2), busy=st.sets(st.integers(0, 60), max_size=8))
    def others_work(self, seconds: int, busy: set[int]) -> None:
        self.now += seconds
        self.busy = busy

    @rule(at=trees, but=st.sets(st.sampled_from(KEYS), max_size=3))
    def copy(self, at: int, but: set[bytes]) -> None:
        for key, page in self.models[at].pages.items():
            if is_near(page.slot) and page.slot not in self.far_of and key not in but:
                self.far_of[page.slot] = self.new_far()

    @rule(
        at=trees, keys=key_lists, stale=st.sets(st.integers(0, 20), max_size=3), touch=st.booleans()
    )
    def promote(self, at: int, keys: list[bytes], stale: set[int], touch: bool) -> None:
        pages = self.models[at].pages
        old = [pages[key].slot if key in pages else ABSENT for key in keys]
        for number in stale & set(range(len(old))):
            old[number] = FAR_PLACES - 1
        new = [self.new_slot() for _ in keys]
        expected: list[bool] = []
        for key, before, after in zip(keys, old, new, strict=True):
            expected.append(key in pages and pages[key].slot == before)
            if expected[-1]:
                self.far_of[after] = (
                    before if before >= FAR_PLACES else self.far_of.get(before, ABSENT)
                )
                pages[key].slot = after
        assert self.trees[at].move(b"".join(keys), old, new, touch=touch) == expected

    @rule(count=st.integers(1, 12), group=st.sampled_from([None, 1, 2]))
    def demote(self, count: int, group: int | None) -> None:
        chosen = self.of_group(group)
        could_go = sum(len(self.can_be_demoted(n, pins=False)) for n in chosen)
        unpinned = sum(len(self.can_be_demoted(n, pins=True)) for n in chosen)
        demoted = self.index.demote(
            count,
            far_of=lambda place: self.far_of.get(place, ABSENT),
            is_free=self.is_free,
            now=self.now,
            group=group,
        )
        went = [self.note_demoted(each) for each in demoted]
        assert sum(map(len, went)) == min(count, could_go)
        pinned = sum(
            self.models[self.trees.index(each.tree)].pins.get(key, self.now) > self.now
            for each, keys in zip(demoted, went, strict=True)
            for key in keys
        )
        assert pinned == max(0, min(count, could_go) - unpinned)

    def note_demoted(self, demoted: Demoted) -> list[bytes]:
        pages = self.models[self.trees.index(demoted.tree)].pages
        keys = split_keys(demoted.keys, 8)
        for key, near, far in zip(keys, demoted.near, demoted.far, strict=True):
            assert pages[key].slot == near
            assert self.far_of[near] == far
            assert self.is_free(near)
            pages[key].slot = far
        return keys

    @rule(limit=st.integers(1, 12), group=st.sampled_from([None, 1, 2]))
    def cold_near(self, limit: int, group: int | None) -> None:
        found = self.index.cold_near(
            limit, wants=lambda place: place not in self.far_of, group=group
        )
        wanted = {
            (self.trees[n], key, page.slot)
            for n in self.of_group(group)
            for key, page in self.models[n].pages.items()
            if is_near(page.slot) and page.slot not in self.far_of
        }
        assert set(found) <= wanted
        assert len(set(found)) == len(found) == min(limit, len(wanted))

    @rule(
        count=st.integers(1, 12),
        group=st.sampled_from([None, 1, 2]),
        counted=st.sampled_from(["all", "near", "far"]),
    )
    def evict(self, count: int, group: int | None, counted: str) -> None:
        counts = {"all": None, "near": is_near, "far": is_far}[counted]
        chosen = self.of_group(group)
        could_go = [
            key
            for n in chosen
            for key in self.can_go(n, pins=False)
            if counts is None or counts(self.models[n].pages[key].slot)
        ]
        gone = pages_of(
            self.index.evict(count, is_free=self.is_free, now=self.now, group=group, counts=counts)
        )
        went = [page for page in gone if counts is None or counts(page.slot)]
        assert len(went) == min(count, len(could_go))
        if len(went) == count:
            assert went[-1] is gone[-1]
        assert {page.tree for page in gone} <= {self.trees[n] for n in chosen}
        self.forget(gone, chosen)

    @rule(count=st.integers(1, 12), group=st.sampled_from([None, 1, 2]))
    def evict_near(self, count: int, group: int | None) -> None:
        chosen = self.of_group(group)
        could_go = sum(
            is_near(self.models[n].pages[key].slot)
            for n in chosen
            for key in self.can_go(n, pins=False)
        )
        gone = pages_of(
            self.index.evict_near(count, is_free=self.is_free, now=self.now, group=group)
        )
        assert sum(is_near(page.slot) for page in gone) == min(count, could_go)
        for page in gone:
            model = self.models[self.trees.index(page.tree)]
            assert any(is_near(model.pages[key].slot) for key in model.ancestry(page.key))
        for page in gone:
            assert self.is_free(page.slot)
            self.unlink([page])

    def of_group(self, group: int | None) -> list[int]:
        return [n for n in range(len(KINDS)) if group in (None, GROUPS[n])]

    @rule()
    def evict_overflow(self) -> None:
        every = list(range(len(KINDS)))
        gone = pages_of(self.index.evict_overflow(is_free=self.is_free, now=self.now))
        for page in gone:
            assert not self.models[self.trees.index(page.tree)].rooted(page.key)
        self.forget(gone, every)
        loose = [
            key
            for n in every
            for key in self.can_go(n, pins=True)
            if not self.models[n].rooted(key)
        ]
        assert not (self.index.fragments_over and loose)

    @rule(at=trees, keys=key_lists)
    def evict_subtrees(self, at: int, keys: list[bytes]) -> None:
        model = self.models[at]
        wanted = set[bytes]().union(*(model.below(key) for key in keys if key in model.pages))
        evicted = self.index.evict_subtrees(self.trees[at], keys, is_free=self.is_free)
        if not all(self.is_free(model.pages[key].slot) for key in wanted):
            assert evicted is None
            return
        assert evicted is not None
        gone = pages_of(evicted)
        assert {page.key for page in gone} == wanted
        assert len(gone) == len(wanted)
        self.unlink(gone)

    def is_free(self, slot: int) -> bool:
        return slot % FAR_PLACES not in self.busy

    def can_be_demoted(self, at: int, *, pins: bool) -> set[bytes]:
        """The near pages with a copy that are not busy; pinned ones stay if `pins`."""
        model = self.models[at]
        return {
            key
            for key, page in model.pages.items()
            if self.far_of.get(page.slot, ABSENT) != ABSENT
            and self.is_free(page.slot)
            and not (pins and model.pins.get(key, self.now) > self.now)
        }

    def can_go(self, at: int, *, pins: bool) -> set[bytes]:
        """The pages that neither are busy nor have a busy page below; pinned ones if `pins`."""
        model = self.models[at]
        stay: set[bytes] = set()
        for key, page in model.pages.items():
            pinned = pins and model.pins.get(key, self.now) > self.now
            if not self.is_free(page.slot) or pinned:
                stay.update(model.ancestry(key))
        return model.pages.keys() - stay

    def forget(self, gone: list[Gone], chosen: list[int]) -> None:
        """Check that what went could go, in an order that is allowed, and forget it."""
        pinned_went = False
        unpinned = {n: self.can_go(n, pins=True) for n in chosen}
        for page in gone:
            model = self.models[self.trees.index(page.tree)]
            pinned_went |= page.key not in unpinned[self.trees.index(page.tree)]
            assert self.is_free(page.slot)
            self.unlink([page])
            assert page.key not in model.pages
        if pinned_went:
            left = [n for n in chosen if self.can_go(n, pins=True) & unpinned[n]]
            assert left == []

    def unlink(self, gone: list[Gone]) -> None:
        for page in gone:
            model = self.models[self.trees.index(page.tree)]
            assert model.pages[page.key].slot == page.slot
            assert model.children(page.key) == []
            model.remove(page.key)

    @invariant()
    def every_page_is_shown_as_the_model_has_it(self) -> None:
        for tree, model in zip(self.trees, self.models, strict=True):
            rows, cursor = tree.inspect(None, 1000)
            assert cursor is None
            assert {row.key: (row.slot, row.parent, row.linked) for row in rows} == {
                key: (page.slot, page.parent, page.linked) for key, page in model.pages.items()
            }

    @invariant()
    def counts_agree(self) -> None:
        heads = 0
        for tree, model in zip(self.trees, self.models, strict=True):
            loose = [key for key in model.pages if not model.rooted(key)]
            assert tree.page_count == len(model.pages)
            assert tree.fragment_page_count == len(loose)
            assert tree.rooted_page_count == len(model.pages) - len(loose)
            assert tree.fragment_count == sum(not p.linked for p in model.pages.values())
            heads += tree.fragment_count
        assert self.index.counters["fragments"] == heads
        assert self.index.counters["pins"] >= 0

    @invariant()
    def runs_stand_before_their_ancestors_in_the_right_order(self) -> None:
        for tree in self.trees:
            check_shape(tree.chains)

    @invariant()
    def front_slots_are_all_pages_of_the_group(self) -> None:
        for group in set(GROUPS):
            slots = self.index.front_slots(group, 1000)
            assert sorted(slots) == sorted(
                page.slot
                for at, model in enumerate(self.models)
                if GROUPS[at] == group
                for page in model.pages.values()
            )


def check_shape(chains: Chains) -> None:
    """What chains.py and order.py promise of a tree's shape."""
    seen: set[Run] = set()
    for order in (chains.fragments.order, chains.rooted):
        touch = 0
        for run in order:
            seen.add(run)
            assert run.order is order
            assert run.touch >= touch
            touch = run.touch
            assert 0 < len(run.slots) <= RUN_PAGES_MAX
            assert len(run.blob) == 8 * len(run.slots)
            assert isinstance(run.slots, array)
            assert seen.issuperset(run.children())
            if run.parent is not None:
                assert run.parent not in seen
                assert run.parent.order is order
                assert run in run.parent.children()
            for at in range(len(run.slots)):
                assert chains.locate(chains.key_at(run, at)) == (run, at)
    assert sum(len(run.slots) for run in seen) == chains.page_count
    for order in (chains.fragments.order, chains.rooted):
        left_to_see = {*order.near, *order.near.aside(1000)}
        assert left_to_see.issuperset(run for run in order if has_near(run))


def is_far(place: int) -> bool:
    return not is_near(place)


TestIndexAgainstAModel = IndexAgainstAModel.TestCase
TestIndexAgainstAModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def pages_of(evicted: list[Evicted]) -> list[Gone]:
    """The single pages, children before parents."""
    return [
        Gone(each.tree, key, slot)
        for each in evicted
        for key, slot in reversed(
            list(zip(split_keys(each.keys, each.tree.key_bytes), each.slots, strict=True))
        )
    ]
