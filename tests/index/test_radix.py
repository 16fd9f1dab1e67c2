"""Claims about lookups, commits and removals in one tree."""

import random
from array import array

import pytest

from nexuskv import UNKNOWN
from nexuskv.errors import ConfigError
from nexuskv.index.radix import RadixIndex
from nexuskv.index.tree import ABSENT, Tree
from nexuskv.types import Kind

KEY = 8


def chain(name: str, count: int, key_bytes: int = KEY) -> list[bytes]:
    source = random.Random(name)
    return [source.randbytes(key_bytes) for _ in range(count)]


def blob(*keys: bytes) -> bytes:
    return b"".join(keys)


def new_index(fragments_max: int = 1000, run_pages_max: int = 256) -> RadixIndex:
    return RadixIndex(fragments_max=fragments_max, run_pages_max=run_pages_max)


def new_tree(kind: Kind = Kind.ATTENTION, key_bytes: int = KEY, run_pages_max: int = 256) -> Tree:
    index = new_index(run_pages_max=run_pages_max)
    return index.open(b"n" * 16, kind=kind, key_bytes=key_bytes, group=1)


def put(tree: Tree, keys: list[bytes], first_slot: int, parent: object = None) -> list[int]:
    slots = range(first_slot, first_slot + len(keys))
    return tree.insert(parent, blob(*keys), slots)  # type: ignore[arg-type]  # any parent


def test_find_answers_the_slot_each_key_was_inserted_with():
    tree, keys = new_tree(), chain("a", 600)
    assert put(tree, keys, 100) == []
    assert tree.find(blob(*keys)) == array("I", range(100, 700))


def test_find_answers_absent_for_a_key_that_is_not_held_and_goes_on_after_it():
    tree, keys = new_tree(), chain("a", 5)
    put(tree, keys[:2], 0)
    put(tree, keys[3:], 3, UNKNOWN)
    assert list(tree.find(blob(*keys))) == [0, 1, ABSENT, 3, 4]


def test_find_without_touch_changes_nothing():
    tree, keys = new_tree(), chain("a", 40)
    put(tree, keys[:20], 0)
    put(tree, keys[20:], 20, UNKNOWN)
    tree.find(blob(*keys), touch=False)
    assert tree.fragment_page_count == 20


@pytest.mark.parametrize("run_pages_max", [1, 3, 256])
def test_match_counts_the_pages_of_the_longest_held_prefix(run_pages_max: int):
    tree, keys = new_tree(run_pages_max=run_pages_max), chain("a", 100)
    put(tree, keys[:70], 0)
    assert tree.match(blob(*keys)) == 70
    assert tree.match(blob(*keys[:9])) == 9
    assert tree.match(blob(*keys[:9], *chain("other", 3))) == 9
    assert tree.match(b"") == 0


def test_match_may_begin_at_any_page_of_a_chain():
    tree, keys = new_tree(), chain("a", 100)
    put(tree, keys, 0)
    assert tree.match(blob(*keys[37:])) == 63


def test_branches_of_one_prefix_all_match():
    tree, trunk = new_tree(), chain("trunk", 50)
    for cut in (10, 49, 1, 25, 50):
        branch = chain(f"branch{cut}", 7)
        put(tree, trunk[:cut] + branch, 1000 * cut)
    for cut in (10, 49, 1, 25, 50):
        assert tree.match(blob(*trunk[:cut], *chain(f"branch{cut}", 7))) == cut + 7


def test_match_of_a_50_000_page_chain_is_whole():
    tree, keys = new_tree(), chain("long", 50_000)
    put(tree, keys, 0)
    assert tree.match(blob(*keys)) == 50_000
    assert tree.find(blob(*keys)) == array("I", range(50_000))


@pytest.mark.parametrize("order", ["first half first", "second half first"])
def test_two_halves_put_in_either_order_match_as_one(order: str):
    tree, keys = new_tree(), chain("a", 256)
    if order == "first half first":
        put(tree, keys[:128], 0)
        put(tree, keys[128:], 128, UNKNOWN)
    else:
        put(tree, keys[128:], 128, UNKNOWN)
        put(tree, keys[:128], 0)
    assert tree.match(blob(*keys)) == 256
    assert tree.fragment_page_count == 0


def test_a_fragment_matches_from_where_its_chain_is_whole():
    tree, keys = new_tree(), chain("a", 20)
    put(tree, keys[10:], 10, keys[9])
    assert tree.match(blob(*keys)) == 0
    assert tree.match(blob(*keys[10:])) == 10
    assert (tree.fragment_count, tree.fragment_page_count, tree.rooted_page_count) == (1, 10, 0)


def test_a_fragment_is_grafted_in_the_middle_of_a_run():
    tree, keys, branch = new_tree(), chain("a", 20), chain("b", 5)
    put(tree, keys, 0)
    put(tree, branch, 100, UNKNOWN)
    assert tree.match(blob(*keys[:10], *branch)) == 15
    assert tree.match(blob(*keys)) == 20


def test_a_lying_parent_is_refused_and_counted_and_the_page_stays_findable():
    index = new_index()
    tree = index.open(b"n" * 16, kind=Kind.ATTENTION, key_bytes=KEY, group=1)
    keys, other = chain("a", 6), chain("b", 6)
    put(tree, keys, 0)
    put(tree, other, 10)
    assert put(tree, other[3:], 20, keys[2]) == [20, 21, 22]
    assert index.counters["grafts_refused"] == 1
    assert tree.match(blob(*keys[:3], *other[3:])) == 3
    assert list(tree.find(blob(*keys[:3], *other[3:]))) == [0, 1, 2, 13, 14, 15]


def test_a_parent_recorded_while_absent_is_held_against_a_later_lie():
    tree, keys, other = new_tree(), chain("a", 4), chain("b", 2)
    put(tree, keys[2:], 2, keys[1])
    put(tree, other, 10)
    assert tree.match(blob(*other, *keys[2:])) == 2
    put(tree, keys[:2], 0)
    assert tree.match(blob(*keys)) == 4


def test_a_cyclic_parent_is_refused_and_counted():
    index = new_index()
    tree = index.open(b"n" * 16, kind=Kind.ATTENTION, key_bytes=KEY, group=1)
    a, b, c = chain("a", 3)
    put(tree, [a, b, c], 0, UNKNOWN)
    assert tree.match(blob(c, a)) == 1
    assert index.counters["grafts_refused"] == 1
    put(tree, [a], 9, a)
    assert list(tree.find(blob(a, b, c))) == [0, 1, 2]


def test_a_page_may_name_itself_or_its_child_as_its_absent_parent():
    tree = new_tree()
    a, b = chain("a", 2)
    put(tree, [a], 0, a)
    put(tree, [b], 1, a)
    assert tree.match(blob(a, a)) == 1
    assert tree.match(blob(b, a)) == 1
    assert tree.match(blob(a, b)) == 2


def test_a_commit_that_knows_the_parent_of_a_fragment_roots_it():
    tree, keys = new_tree(), chain("a", 5)
    put(tree, keys, 0, UNKNOWN)
    assert put(tree, keys, 10) == [10, 11, 12, 13, 14]
    assert (tree.fragment_count, tree.rooted_page_count) == (0, 5)


def test_losers_keep_their_slots():
    tree, keys = new_tree(), chain("a", 10)
    put(tree, keys[:6], 0)
    assert put(tree, keys, 100) == list(range(100, 106))
    assert list(tree.find(blob(*keys))) == [0, 1, 2, 3, 4, 5, 106, 107, 108, 109]


@pytest.mark.parametrize("kind", list(Kind))
def test_a_key_twice_in_one_commit_wins_once(kind: Kind):
    tree = new_tree(kind)
    a, b = chain("a", 2)
    assert put(tree, [a, b, a, b, b], 0) == [2, 3, 4]
    assert tree.page_count == 2


def test_missing_answers_the_positions_of_keys_not_held():
    tree, keys = new_tree(), chain("a", 6)
    put(tree, keys[1:3], 0, UNKNOWN)
    put(tree, keys[5:], 5, UNKNOWN)
    assert tree.missing(blob(*keys)) == [0, 3, 4]


@pytest.mark.parametrize("key_bytes", [8, 16, 33, 64])
def test_keys_that_share_their_first_bytes_are_told_apart(key_bytes: int):
    tree = new_tree(key_bytes=key_bytes)
    keys = [b"\0" * (key_bytes - 2) + at.to_bytes(2, "little") for at in range(20_000)]
    for at in range(0, 20_000, 50):
        put(tree, keys[at : at + 50], at)
    for at in range(0, 20_000, 50):
        assert tree.find(blob(*keys[at : at + 50])) == array("I", range(at, at + 50))


def test_a_key_whose_bytes_straddle_two_others_is_not_taken_for_held():
    tree = new_tree()
    first, second, third = b"AAAABBBB", b"CCCCDDDD", b"BBBBCCCC"
    put(tree, [first, second], 0)
    assert list(tree.find(third)) == [ABSENT]
    put(tree, [third], 7, second)
    assert list(tree.find(blob(third, second, first))) == [7, 1, 0]
    assert tree.match(blob(third)) == 1


def test_a_key_that_also_straddles_two_earlier_keys_of_its_run_is_found_at_its_own_place():
    tree = new_tree()
    keys = [b"AAAAAAAA", b"xxxxBBBB", b"CCCCxxxx", b"BBBBCCCC", b"ZZZZZZZZ"]
    put(tree, keys, 0)
    assert [tree.slot_of(key) for key in keys] == [0, 1, 2, 3, 4]
    assert tree.match(blob(*keys[3:])) == 2


def test_keys_of_one_repeated_byte_are_found_where_they_are():
    tree = new_tree()
    keys = [b"\0\0\0\0\0\0\0\1", b"\0" * 8, b"\1\0\0\0\0\0\0\0", b"\0\0\0\0\1\0\0\0"]
    put(tree, keys, 0)
    assert [tree.slot_of(key) for key in keys] == [0, 1, 2, 3]


@pytest.mark.parametrize("key_bytes", [0, 7, 65])
def test_a_key_length_outside_its_bounds_is_an_error(key_bytes: int):
    with pytest.raises(ConfigError):
        new_index().open(b"n" * 16, kind=Kind.ATTENTION, key_bytes=key_bytes, group=1)


def test_a_blob_that_is_no_whole_number_of_keys_is_an_error():
    tree = new_tree()
    for call in (tree.find, tree.match, tree.missing, tree.remove):
        with pytest.raises(ConfigError):
            call(b"x" * 9)


def test_slots_and_keys_of_different_number_are_an_error():
    tree = new_tree()
    with pytest.raises(ConfigError):
        tree.insert(None, b"x" * 16, [1])
    with pytest.raises(ConfigError):
        tree.insert(b"short", b"x" * 8, [1])
    assert tree.page_count == 0


def test_opening_a_namespace_again_answers_the_same_tree():
    index = new_index()
    tree = index.open(b"n" * 16, kind=Kind.STATE, key_bytes=8, group=1)
    assert index.open(b"n" * 16, kind=Kind.STATE, key_bytes=8, group=1) is tree
    assert index.tree(b"n" * 16) is tree
    assert index.tree(b"m" * 16) is None
    with pytest.raises(ConfigError):
        index.open(b"n" * 16, kind=Kind.STATE, key_bytes=16, group=1)


def test_namespaces_do_not_share_pages():
    index, keys = new_index(), chain("a", 3)
    one = index.open(b"1" * 16, kind=Kind.ATTENTION, key_bytes=8, group=1)
    two = index.open(b"2" * 16, kind=Kind.ATTENTION, key_bytes=8, group=1)
    put(one, keys, 0)
    assert two.match(blob(*keys)) == 0
    assert (one.page_count, two.page_count, index.page_count) == (3, 0, 3)


@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.STATE])
def test_pages_of_window_and_state_are_independent(kind: Kind):
    tree, keys = new_tree(kind), chain("a", 6)
    put(tree, keys, 0)
    assert tree.match(blob(*keys)) == 6
    assert list(tree.remove(keys[2])) == [2]
    assert tree.match(blob(*keys)) == 2
    assert list(tree.find(blob(*keys))) == [0, 1, ABSENT, 3, 4, 5]
    assert tree.fragment_count == 0


def test_remove_turns_children_into_fragments_and_returns_the_slots():
    tree, keys, branch = new_tree(), chain("a", 10), chain("b", 3)
    put(tree, keys, 0)
    put(tree, branch, 20, keys[4])
    assert sorted(tree.remove(blob(keys[4], *chain("absent", 1)))) == [4]
    assert tree.match(blob(*keys)) == 4
    assert tree.fragment_count == 2
    assert tree.fragment_page_count == 8
    assert tree.parent_of(keys[5]) == keys[4]
    put(tree, [keys[4]], 44, keys[3])
    assert tree.match(blob(*keys)) == 10
    assert tree.match(blob(*keys[:5], *branch)) == 8


def test_drop_unlinks_only_the_slot_that_was_meant():
    tree, keys = new_tree(), chain("a", 3)
    put(tree, keys, 0)
    assert not tree.drop(keys[1], 7)
    assert tree.drop(keys[1], 1)
    assert not tree.drop(keys[1], 1)
    assert list(tree.find(blob(*keys))) == [0, ABSENT, 2]


def test_clear_returns_every_slot_and_begins_an_epoch():
    tree, keys = new_tree(), chain("a", 300)
    put(tree, keys[:200], 0)
    put(tree, keys[250:], 250, UNKNOWN)
    assert sorted(tree.clear()) == [*range(200), *range(250, 300)]
    assert (tree.epoch, tree.page_count, tree.fragment_count) == (1, 0, 0)
    assert tree.match(blob(*keys)) == 0
    put(tree, keys, 0)
    assert tree.match(blob(*keys)) == 300


def test_parent_of_tells_key_root_and_unknown():
    tree, keys, lone = new_tree(), chain("a", 3), chain("b", 1)
    put(tree, keys, 0)
    put(tree, lone, 9, UNKNOWN)
    assert tree.parent_of(keys[0]) is None
    assert tree.parent_of(keys[2]) == keys[1]
    assert tree.parent_of(lone[0]) is UNKNOWN
    with pytest.raises(KeyError):
        tree.parent_of(b"z" * 8)


@pytest.mark.parametrize("count", [50, 12_000])
def test_inspect_shows_each_page_held_throughout_once_under_change(count: int):
    tree, keys = new_tree(), chain("a", count)
    put(tree, keys, 0)
    seen: list[bytes] = []
    cursor, rounds = None, 0
    while True:
        rows, cursor = tree.inspect(cursor, 7 if count < 100 else 999)
        seen += [row.key for row in rows]
        put(tree, chain(f"new{rounds}", 3), 100_000 + rounds * 3)
        tree.remove(keys[-1 - rounds])
        rounds += 1
        if cursor is None:
            break
    assert len(seen) == len(set(seen))
    assert set(seen) >= set(keys[: count - rounds])


def test_inspect_shows_slot_and_parent():
    tree, keys = new_tree(), chain("a", 3)
    put(tree, keys[:2], 0)
    put(tree, keys[2:], 2, b"absent..")
    rows, cursor = tree.inspect(None, 10)
    assert cursor is None
    assert {(row.key, row.parent, row.slot, row.linked) for row in rows} == {
        (keys[0], None, 0, True),
        (keys[1], keys[0], 1, True),
        (keys[2], b"absent..", 2, False),
    }
