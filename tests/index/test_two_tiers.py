"""Claims about pages in two tiers: moving, demoting, and making room in one of them."""

from array import array
from collections.abc import Callable

import pytest

from nexuskv import UNKNOWN
from nexuskv.errors import ConfigError
from nexuskv.index.demote import Demoted
from nexuskv.index.evict import Evicted
from nexuskv.index.ledger import EVICT_OTHERS_MAX, EVICT_REVISIT_MAX, EVICT_SCAN_MAX
from nexuskv.index.near import NEAR_ASIDE_MAX, is_near
from nexuskv.index.radix import RadixIndex, count_pages
from nexuskv.index.tree import ABSENT, Tree
from nexuskv.key import split_keys
from nexuskv.types import FAR_PLACES, Kind

KEY = 8
GROUP = 1024


def keys_of(name: int, count: int) -> list[bytes]:
    return [name.to_bytes(4, "little") + at.to_bytes(4, "little") for at in range(count)]


def blob(*keys: bytes) -> bytes:
    return b"".join(keys)


def far(*numbers: int) -> list[int]:
    return [FAR_PLACES + number for number in numbers]


def new_tree(kind: Kind = Kind.ATTENTION) -> tuple[RadixIndex, Tree]:
    index = RadixIndex(fragments_max=1000)
    return index, index.open(b"n" * 16, kind=kind, key_bytes=KEY, group=GROUP)


def put_under(tree: Tree, parent: bytes, leaf: list[bytes], places: list[int]) -> None:
    """A branch of its own: a second, colder one keeps the run above from growing."""
    tree.insert(parent, blob(*keys_of(1000, 1)), far(1_000_000))
    tree.insert(parent, blob(*leaf), places)
    tree.remove(keys_of(1000, 1)[0])


def demote(
    index: RadixIndex,
    count: int,
    *,
    copied: Callable[[int], bool] = lambda place: True,
    busy: frozenset[int] = frozenset(),
) -> list[Demoted]:
    return index.demote(
        count,
        far_of=lambda place: place + FAR_PLACES if copied(place) else ABSENT,
        is_free=lambda place: place not in busy,
        now=0.0,
    )


def near_of(demoted: list[Demoted]) -> list[int]:
    return [place for each in demoted for place in reversed(each.near)]


def places_of(evicted: list[Evicted]) -> list[int]:
    return [place for each in evicted for place in reversed(each.slots)]


def test_move_gives_pages_another_place_if_they_have_the_old_one_still():
    _, tree = new_tree()
    keys = keys_of(1, 4)
    tree.insert(None, blob(*keys), range(4))
    absent = keys_of(2, 1)
    moved = tree.move(blob(keys[3], keys[0], *absent, keys[1]), [3, 0, 0, 9], [*far(3), 40, 50, 60])
    assert moved == [True, True, False, False]
    assert list(tree.find(blob(*keys))) == [40, 1, 2, *far(3)]


@pytest.mark.parametrize("touch", [True, False])
def test_move_is_a_use_only_if_asked(touch: bool):
    index, tree = new_tree()
    one, two = keys_of(1, 3), keys_of(2, 3)
    tree.insert(None, blob(*one), range(3))
    tree.insert(None, blob(*two), range(3, 6))
    tree.move(blob(*one), range(3), range(10, 13), touch=touch)
    first = index.front_slots(GROUP, 1)
    assert first == ([5] if touch else [12])


def test_move_of_places_and_keys_of_different_number_is_an_error():
    _, tree = new_tree()
    with pytest.raises(ConfigError):
        tree.move(b"x" * 16, [1], [2])
    with pytest.raises(ConfigError):
        tree.move(b"x" * 9, [1], [2])


def test_demote_takes_the_coldest_page_with_a_copy_wherever_it_stands():
    index, tree = new_tree()
    trunk, leaf, other = keys_of(1, 3), keys_of(2, 3), keys_of(3, 3)
    tree.insert(None, blob(*trunk), range(3))
    put_under(tree, trunk[-1], leaf, [10, 11, 12])
    tree.insert(None, blob(*other), range(20, 23))
    copied = {1, 10, 11, 21}
    demoted = demote(index, 3, copied=copied.__contains__)
    assert demoted == [
        Demoted(tree, blob(*leaf[:2]), array("I", [10, 11]), array("I", far(10, 11))),
        Demoted(tree, trunk[1], array("I", [1]), array("I", far(1))),
    ]
    assert list(tree.find(blob(*trunk, *leaf))) == [0, *far(1), 2, *far(10, 11), 12]
    assert index.counters["demoted"] == 3
    assert tree.match(blob(*trunk, *leaf)) == 6


def test_demote_passes_over_busy_pages_and_takes_pinned_ones_last():
    index, tree = new_tree()
    one, two = keys_of(1, 4), keys_of(2, 2)
    tree.insert(None, blob(*one), range(4))
    tree.insert(None, blob(*two), range(10, 12))
    tree.pin(one[1], 5.0)
    assert near_of(demote(index, 99, busy=frozenset([3]))) == [2, 0, 11, 10, 1]


def test_fragments_are_demoted_before_rooted_pages():
    index, tree = new_tree()
    tree.insert(None, blob(*keys_of(1, 2)), range(2))
    tree.insert(UNKNOWN, blob(*keys_of(2, 2)), range(10, 12))
    assert near_of(demote(index, 3)) == [11, 10, 1]


def test_a_page_that_got_a_copy_later_is_demoted_then():
    index, tree = new_tree(Kind.STATE)
    tree.insert(None, blob(*keys_of(1, 2000)), range(2000))
    assert demote(index, 1, copied=lambda place: False) == []
    assert near_of(demote(index, 2, copied=lambda place: place == 7)) == [7]


def test_a_page_moved_back_without_a_use_is_demoted_again():
    index, tree = new_tree()
    keys = keys_of(1, 4)
    tree.insert(None, blob(*keys), range(4))
    tree.insert(None, blob(*keys_of(2, 4)), range(10, 14))
    assert len(near_of(demote(index, 6))) == 6
    tree.move(keys[2], far(2), [50])
    assert near_of(demote(index, 1)) == [50]


def test_far_only_runs_are_looked_at_once_a_use_not_once_a_call():
    index, tree = new_tree(Kind.STATE)
    tree.insert(None, blob(*keys_of(1, 3000)), far(*range(3000)))
    tree.insert(None, blob(*keys_of(2, 100)), range(100))
    order = tree.chains.rooted
    demote(index, 1)
    left = sum(1 for _ in order.near)
    assert left == 100
    assert len(order.near.aside(1000)) == 0


def test_many_pages_without_a_copy_are_asked_about_a_bounded_number_of_times():
    index, tree = new_tree(Kind.STATE)
    tree.insert(None, blob(*keys_of(1, 5000)), range(5000))
    tree.insert(None, blob(*keys_of(2, 100)), range(10_000, 10_100))
    asked = 0

    def copied(place: int) -> bool:
        nonlocal asked
        asked += 1
        return place >= 10_000

    assert len(demote(index, 1, copied=copied)) == 1
    asked = 0
    for _ in range(50):
        assert len(demote(index, 1, copied=copied)) == 1
    assert asked <= 50 * (EVICT_REVISIT_MAX + 2)


def test_pages_set_aside_are_bounded_and_none_is_lost():
    index, tree = new_tree(Kind.STATE)
    count = NEAR_ASIDE_MAX + 3000
    keys = keys_of(1, count)
    tree.insert(None, blob(*keys), range(count))
    for _ in range(3):
        assert demote(index, 1, copied=lambda place: False) == []
    near = tree.chains.rooted.near
    assert len(near.aside(count)) == NEAR_ASIDE_MAX
    tree.move(keys[0], [0], far(0))
    tree.move(keys[0], far(0), [0])
    gone: set[int] = set()
    for _ in range(200):
        gone.update(near_of(demote(index, count)))
    assert gone == set(range(count))


def test_a_page_noticed_when_too_many_are_set_aside_is_demoted_all_the_same():
    index, tree = new_tree(Kind.STATE)
    count = NEAR_ASIDE_MAX + 100
    keys = keys_of(1, count)
    tree.insert(None, blob(*keys), [*range(count - 1), *far(7)])
    for _ in range(3):
        demote(index, 1, copied=lambda place: False)
    tree.move(keys[-1], far(7), [count])
    found: list[int] = []
    for _ in range(10):
        found += near_of(demote(index, 1, copied=lambda place: place == count))
    assert found == [count]


def test_eviction_that_counts_near_pages_takes_the_coldest_leaves_of_both_tiers():
    index, tree = new_tree()
    keys = keys_of(1, 6)
    tree.insert(None, blob(*keys), [0, *far(1), 2, *far(3), 4, *far(5)])
    everything = {"is_free": lambda place: True, "now": 0.0}
    gone = index.evict(2, counts=is_near, **everything)  # type: ignore[arg-type]  # one dict
    assert places_of(gone) == [*far(5), 4, *far(3), 2]
    assert tree.match(blob(*keys)) == 2


def test_pages_that_do_not_count_are_evicted_in_bounded_steps_until_one_counts():
    index, tree = new_tree()
    for at in range(40):
        tree.insert(None, blob(*keys_of(at, 256)), far(*range(at * 256, at * 256 + 256)))
    tree.insert(None, blob(*keys_of(99, 1)), [7])
    calls = 0
    while tree.page_count:
        gone = index.evict(1, counts=is_near, is_free=lambda place: True, now=0.0)
        assert 0 < count_pages(gone) <= EVICT_OTHERS_MAX + 256
        calls += 1
    assert calls == 3


def test_a_leased_far_leaf_keeps_its_near_ancestors_and_nothing_else():
    index, tree = new_tree()
    trunk, leaf, other = keys_of(1, 2), keys_of(2, 2), keys_of(3, 2)
    tree.insert(None, blob(*trunk), range(2))
    put_under(tree, trunk[-1], leaf, far(10, 11))
    tree.insert(None, blob(*other), [*far(20), 21])
    busy = FAR_PLACES + 10
    gone = index.evict(9, counts=is_near, is_free=lambda place: place != busy, now=0.0)
    assert places_of(gone) == [*far(11), 21, *far(20)]
    gone = index.evict(9, counts=is_near, is_free=lambda place: True, now=0.0)
    assert places_of(gone) == [busy, 1, 0]


def test_eviction_of_near_pages_spares_colder_far_ones():
    index, tree = new_tree()
    cold, hot = keys_of(1, 3), keys_of(2, 3)
    tree.insert(None, blob(*cold), far(0, 1, 2))
    tree.insert(None, blob(*hot), range(10, 13))
    gone = index.evict_near(2, is_free=lambda place: True, now=0.0)
    assert places_of(gone) == [12, 11]
    assert tree.match(blob(*cold)) == 3


def test_near_pages_with_nothing_below_go_before_those_with_far_ones_below():
    index, tree = new_tree()
    trunk, leaf, other = keys_of(1, 2), keys_of(2, 3), keys_of(3, 2)
    tree.insert(None, blob(*trunk), range(2))
    put_under(tree, trunk[-1], leaf, far(10, 11, 12))
    tree.insert(None, blob(*other), range(20, 22))
    gone = index.evict_near(3, is_free=lambda place: True, now=0.0)
    assert places_of(gone) == [21, 20, *far(12, 11, 10), 1]
    assert tree.match(blob(*trunk)) == 1


def test_a_run_that_went_with_the_one_above_it_is_not_taken_twice():
    index, tree = new_tree()
    trunk, leaf = keys_of(1, 2), keys_of(2, 3)
    tree.insert(None, blob(*trunk), range(2))
    put_under(tree, trunk[-1], leaf, far(10, 11, 12))
    assert demote(index, 1, copied=lambda place: False) == []  # sets the trunk aside
    tree.move(leaf[0], far(10), [10])  # and then the leaf
    gone = index.evict_near(9, is_free=lambda place: True, now=0.0)
    assert places_of(gone) == [*far(12, 11), 10, 1, 0]


def test_eviction_of_near_pages_keeps_what_is_above_a_busy_far_page():
    index, tree = new_tree()
    trunk, leaf = keys_of(1, 2), keys_of(2, 3)
    tree.insert(None, blob(*trunk), range(2))
    put_under(tree, trunk[-1], leaf, far(10, 11, 12))
    busy = FAR_PLACES + 10
    index.evict_near(9, is_free=lambda place: place != busy, now=0.0)
    assert tree.match(blob(*trunk, *leaf)) >= 3


@pytest.mark.parametrize("busy_share", [0, 3])
def test_room_can_be_made_whatever_mix_of_tiers_and_leases(busy_share: int):
    index, tree = new_tree()
    number = 0
    for at in range(300):
        parent = keys_of(at // 3, 7)[-1] if at % 3 and at > 2 else None
        places = [FAR_PLACES + number + n if (at + n) % 4 else number + n for n in range(7)]
        tree.insert(parent, blob(*keys_of(at, 7)), places)
        number += 7
    leased = {n for n in range(number) if busy_share and n % (7 * busy_share) == 3}

    def is_free(place: int) -> bool:
        return place % FAR_PLACES not in leased

    while True:
        gone = index.evict(5, counts=is_near, is_free=is_free, now=0.0)
        if not gone:
            break
    left = [row.slot for row in tree.inspect(None, 10_000)[0]]
    assert bool(left) == bool(leased)
    while count_pages(index.evict(5, counts=is_near, is_free=lambda place: True, now=0.0)):
        pass
    assert tree.page_count == 0


def test_cold_near_names_the_coldest_pages_that_are_wanted_and_changes_nothing():
    index, tree = new_tree()
    one, two = keys_of(1, 3), keys_of(2, 3)
    tree.insert(None, blob(*one), [0, *far(1), 2])
    tree.insert(None, blob(*two), range(10, 13))
    before = index.front_slots(GROUP, 99)
    wants = {0, 11, 12}.__contains__
    expected = [(tree, one[0], 0), (tree, two[2], 12), (tree, two[1], 11)]
    assert index.cold_near(9, wants=wants) == expected
    assert index.cold_near(2, wants=wants, group=GROUP) == expected[:2]
    assert index.cold_near(9, wants=wants, group=GROUP + 1) == []
    assert index.cold_near(9, wants=wants, trees=[]) == []
    assert index.front_slots(GROUP, 99) == before
    assert near_of(demote(index, 1)) == [2]


def test_cold_near_sees_pages_beyond_many_far_ones_after_some_calls():
    index, tree = new_tree(Kind.STATE)
    tree.insert(None, blob(*keys_of(1, EVICT_SCAN_MAX)), far(*range(EVICT_SCAN_MAX)))
    tree.insert(None, blob(*keys_of(2, 1)), [5])
    found = [index.cold_near(4, wants=lambda place: True) for _ in range(10)]
    assert found[-1] == [(tree, keys_of(2, 1)[0], 5)]


def test_evict_subtrees_says_what_went_in_both_tiers_and_nothing_if_a_far_page_is_busy():
    index, tree = new_tree()
    keys = keys_of(1, 5)
    tree.insert(None, blob(*keys), [0, 1, *far(2), 3, *far(4)])
    busy = FAR_PLACES + 4
    refused = index.evict_subtrees(tree, [keys[1]], is_free=lambda place: place != busy)
    assert refused is None
    assert tree.match(blob(*keys)) == 5
    gone = index.evict_subtrees(tree, [keys[1]], is_free=lambda place: True)
    assert gone is not None
    assert [(split_keys(each.keys, KEY), list(each.slots)) for each in gone] == [
        (keys[1:], [1, *far(2), 3, *far(4)])
    ]
