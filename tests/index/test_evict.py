"""Claims about which pages go, in which order, and which never do."""

import gc
import random
from array import array

import pytest

from nexuskv import UNKNOWN
from nexuskv.errors import OutOfSpace
from nexuskv.index.chains import Parent
from nexuskv.index.evict import Evicted
from nexuskv.index.ledger import EVICT_REVISIT_MAX
from nexuskv.index.radix import RadixIndex
from nexuskv.index.tree import Tree
from nexuskv.types import Kind

KEY = 8
KIB = 1024


def chain(name: str, count: int) -> list[bytes]:
    source = random.Random(name)
    return [source.randbytes(KEY) for _ in range(count)]


def blob(*keys: bytes) -> bytes:
    return b"".join(keys)


def new_index(fragments_max: int = 1000, pins_max: int = 100) -> RadixIndex:
    return RadixIndex(fragments_max=fragments_max, pins_max=pins_max)


def new_tree(index: RadixIndex, name: bytes = b"n", kind: Kind = Kind.ATTENTION) -> Tree:
    return index.open(name * 16, kind=kind, key_bytes=KEY, group=KIB)


def put(tree: Tree, keys: list[bytes], first_slot: int, parent: Parent = None) -> None:
    assert tree.insert(parent, blob(*keys), range(first_slot, first_slot + len(keys))) == []


def evict(index: RadixIndex, count: int, busy: set[int] | None = None, now: float = 0.0):
    held = busy or set()
    return index.evict(count, is_free=lambda slot: slot not in held, now=now)


def slots_of(evicted: list[Evicted]) -> list[int]:
    return [slot for each in evicted for slot in reversed(each.slots)]


def test_the_least_recently_used_chain_goes_first_from_its_tail():
    index = new_index()
    tree = new_tree(index)
    one, two = chain("1", 4), chain("2", 4)
    put(tree, one, 10)
    put(tree, two, 20)
    tree.match(blob(*one))
    assert evict(index, 6) == [
        Evicted(tree, blob(*two), array("I", [20, 21, 22, 23])),
        Evicted(tree, blob(*one[2:]), array("I", [12, 13])),
    ]
    assert tree.match(blob(*one)) == 2
    assert tree.page_count == 2


def test_a_page_goes_only_after_its_children():
    index = new_index()
    tree = new_tree(index)
    trunk, left, right = chain("t", 20), chain("l", 20), chain("r", 20)
    put(tree, trunk, 0)
    put(tree, left, 100, trunk[-1])
    put(tree, right, 200, trunk[9])
    tree.match(blob(*trunk))
    gone = slots_of(evict(index, 50))
    assert gone == [*range(119, 99, -1), *range(219, 199, -1), *range(19, 9, -1)]


def test_a_use_that_ends_inside_a_run_lets_the_rest_age():
    index = new_index()
    tree = new_tree(index)
    keys, other = chain("a", 40), chain("b", 10)
    put(tree, keys, 0)
    put(tree, other, 100)
    tree.match(blob(*keys[:20]))
    assert slots_of(evict(index, 20)) == list(range(39, 19, -1))


def test_fragments_go_before_rooted_pages():
    index = new_index()
    tree = new_tree(index)
    put(tree, chain("old", 5), 0)
    put(tree, chain("new", 5), 100, UNKNOWN)
    assert slots_of(evict(index, 6)) == [104, 103, 102, 101, 100, 4]
    assert index.counters["evicted_fragment"] == 5
    assert index.counters["evicted"] == 6


def test_the_coldest_of_several_namespaces_of_a_group_goes_first():
    index = new_index()
    one, two = new_tree(index, b"1"), new_tree(index, b"2")
    keys = [chain(str(at), 2) for at in range(4)]
    for at in range(4):
        put((one, two)[at % 2], keys[at], 10 * at)
    one.find(blob(*keys[0]))
    assert slots_of(evict(index, 8)) == [11, 10, 21, 20, 31, 30, 1, 0]


def test_eviction_keeps_to_its_group_and_its_trees():
    index = new_index()
    small = index.open(b"s" * 16, kind=Kind.ATTENTION, key_bytes=KEY, group=1)
    large = index.open(b"l" * 16, kind=Kind.ATTENTION, key_bytes=KEY, group=2)
    other = index.open(b"o" * 16, kind=Kind.ATTENTION, key_bytes=KEY, group=2)
    for at, tree in enumerate((small, large, other)):
        put(tree, chain(str(at), 3), 10 * at)
    everything = {"is_free": lambda slot: True, "now": 0.0}
    assert slots_of(index.evict(1, group=2, **everything)) == [12]  # type: ignore[arg-type]
    assert slots_of(index.evict(9, trees=[other], **everything)) == [22, 21, 20]  # type: ignore[arg-type]
    assert small.page_count == 3


@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.STATE])
def test_independent_pages_go_one_by_one_tail_first(kind: Kind):
    index = new_index()
    tree = new_tree(index, kind=kind)
    keys = chain("a", 5)
    put(tree, keys, 0)
    tree.find(keys[4])
    assert slots_of(evict(index, 4)) == [3, 2, 1, 0]


def test_a_busy_page_and_its_ancestors_stay():
    index = new_index()
    tree = new_tree(index)
    trunk, leaf, other = chain("t", 4), chain("l", 4), chain("o", 4)
    put(tree, trunk, 0)
    put(tree, leaf, 10, trunk[-1])
    put(tree, other, 20)
    assert slots_of(evict(index, 99, busy={11})) == [13, 12, 23, 22, 21, 20]
    assert slots_of(evict(index, 99)) == [11, 10, 3, 2, 1, 0]


def test_runs_that_were_busy_keep_their_place_in_the_order():
    index = new_index()
    tree = new_tree(index)
    for at in range(6):
        put(tree, chain(str(at), 1), at)
    assert slots_of(evict(index, 1, busy={0, 1, 2})) == [3]
    assert index.front_slots(KIB, 9) == [0, 1, 2, 4, 5]
    assert slots_of(evict(index, 3)) == [0, 1, 2]


def test_many_busy_runs_are_asked_about_a_bounded_number_of_times():
    index = new_index()
    tree = new_tree(index, kind=Kind.STATE)
    put(tree, chain("busy", 5000), 0)
    put(tree, chain("free", 100), 10_000)
    asked = 0

    def is_free(slot: int) -> bool:
        nonlocal asked
        asked += 1
        return slot >= 10_000

    assert len(index.evict(1, is_free=is_free, now=0.0)) == 1
    asked = 0
    for _ in range(50):
        assert len(index.evict(1, is_free=is_free, now=0.0)) == 1
    assert asked <= 50 * (EVICT_REVISIT_MAX + 1)


def test_every_page_is_evicted_in_the_end_although_all_were_busy():
    index = new_index()
    tree = new_tree(index, kind=Kind.STATE)
    put(tree, chain("busy", 5000), 0)
    assert evict(index, 1, busy=set(range(5000))) == []
    gone: list[int] = []
    for _ in range(20):
        gone += slots_of(evict(index, 5000))
    assert sorted(gone) == list(range(5000))


def test_a_pinned_page_and_its_ancestors_go_last():
    index = new_index()
    tree = new_tree(index)
    pinned, other = chain("p", 4), chain("o", 4)
    put(tree, pinned, 0)
    put(tree, other, 10)
    assert tree.pin(blob(pinned[1]), 5.0) == 1
    assert slots_of(evict(index, 7)) == [3, 2, 13, 12, 11, 10, 1]
    assert index.counters["evicted_pinned"] == 1
    assert index.counters["pins"] == 0


@pytest.mark.parametrize("end", ["expired", "unpinned"])
def test_a_pin_that_ended_holds_nothing(end: str):
    index = new_index()
    tree = new_tree(index)
    old, new = chain("p", 1), chain("o", 1)
    put(tree, old, 0)
    put(tree, new, 1)
    tree.pin(old[0], 5.0)
    assert tree.is_pinned(old[0], 4.9)
    if end == "unpinned":
        assert tree.unpin(old[0]) == 1
    assert slots_of(evict(index, 1, now=5.0)) == [0]


def test_a_busy_pinned_page_never_goes():
    index = new_index()
    tree = new_tree(index)
    keys = chain("p", 2)
    put(tree, keys, 0)
    tree.pin(blob(*keys), 5.0)
    assert slots_of(evict(index, 2, busy={0})) == [1]


def test_pins_are_bounded_and_only_held_pages_are_pinned():
    index = new_index(pins_max=2)
    tree = new_tree(index)
    keys = chain("p", 3)
    put(tree, keys, 0)
    assert tree.pin(blob(*chain("absent", 5)), 5.0) == 0
    with pytest.raises(OutOfSpace):
        tree.pin(blob(*keys), 5.0)
    tree.remove(keys[0])
    assert index.counters["pins"] == 1
    tree.clear()
    assert index.counters["pins"] == 0


def test_fragments_over_their_bound_are_handed_out_coldest_first():
    index = new_index(fragments_max=3)
    tree = new_tree(index)
    for at in range(5):
        put(tree, chain(str(at), 2), 10 * at, UNKNOWN)
    assert index.fragments_over == 2
    gone = index.evict_overflow(is_free=lambda slot: slot != 10, now=0.0)
    assert slots_of(gone) == [1, 0, 11, 21, 20]
    assert index.fragments_over == 0


def test_overflow_of_busy_fragments_ends_without_evicting_them():
    index = new_index(fragments_max=1)
    tree = new_tree(index)
    for at in range(3):
        put(tree, chain(str(at), 2), 10 * at, UNKNOWN)
    assert index.evict_overflow(is_free=lambda slot: False, now=0.0) == []
    assert tree.page_count == 6


def test_front_slots_and_coldness_follow_the_order_of_eviction():
    index = new_index()
    tree = new_tree(index)
    one, two, loose = chain("1", 3), chain("2", 3), chain("f", 2)
    put(tree, one, 0)
    put(tree, two, 10)
    put(tree, loose, 20, UNKNOWN)
    tree.find(blob(*one))
    order = index.front_slots(KIB, 100)
    assert order == [21, 20, 12, 11, 10, 2, 1, 0]
    assert index.front_slots(KIB, 3) == order[:3]
    coldness = index.coldness(tree, two[0])
    assert coldness is not None
    assert coldness < (index.coldness(tree, one[0]) or 0)
    assert index.coldness(tree, b"absent..") is None
    assert index.coldest(trees=[tree]) == index.coldness(tree, loose[0])
    assert index.coldest(KIB + 1) is None
    assert slots_of(evict(index, 100)) == order


def test_evict_subtrees_takes_exactly_the_pages_and_what_hangs_below():
    index = new_index()
    tree = new_tree(index)
    trunk, left, right = chain("t", 10), chain("l", 5), chain("r", 5)
    put(tree, trunk, 0)
    put(tree, left, 20, trunk[7])
    put(tree, right, 30, trunk[2])
    assert index.descendant_count(tree, trunk[5], limit=99) == 9
    assert index.descendant_count(tree, trunk[5], limit=4) == 4
    keys = [trunk[8], trunk[5], left[3], right[4], b"absent.."]
    gone = index.evict_subtrees(tree, keys, is_free=lambda slot: True)
    assert gone is not None
    assert sorted(slots_of(gone)) == [5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 34]
    assert slots_of(gone).index(24) < slots_of(gone).index(7)
    assert tree.match(blob(*trunk)) == 5
    assert tree.match(blob(*trunk[:3], *right)) == 7


def test_evict_subtrees_changes_nothing_when_a_page_is_busy():
    index = new_index()
    tree = new_tree(index)
    keys = chain("t", 10)
    put(tree, keys, 0)
    assert index.evict_subtrees(tree, [keys[3]], is_free=lambda slot: slot != 9) is None
    assert tree.match(blob(*keys)) == 10


def test_churn_leaves_nothing_for_the_cyclic_collector():
    index = new_index()
    tree = new_tree(index)
    source = random.Random(7)
    roots = [chain(f"root{at}", 20) for at in range(8)]

    def churn(rounds: int) -> None:
        for at in range(rounds):
            root = source.choice(roots)
            cut = source.randrange(1, 20)
            keys = root[:cut] + chain(f"leaf{source.random()}", 10)
            tree.insert(None, blob(*keys), range(len(keys)))
            tree.insert(UNKNOWN, blob(*chain(f"f{source.random()}", 3)), range(3))
            tree.match(blob(*root))
            tree.remove(root[source.randrange(20)])
            evict(index, max(0, tree.page_count - 500))
            if at % 50 == 49:
                tree.clear()

    churn(20)
    gc.collect()
    gc.disable()
    try:
        churn(300)
        tree.clear()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_closed_namespace_leaves_nothing_for_the_cyclic_collector():
    index = new_index()
    gc.collect()
    gc.disable()
    try:
        for at in range(50):
            tree = new_tree(index, bytes([at]))
            put(tree, chain("a", 5), 0)
            tree.clear()
            index.close(bytes([at]) * 16)
            del tree
        assert gc.collect() == 0
    finally:
        gc.enable()
