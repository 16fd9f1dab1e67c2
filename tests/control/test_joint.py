"""match over several namespaces equals a model that tries every length."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexuskv.protocol import Type
from nexuskv.types import Kind
from tests.control.conftest import StartRig
from tests.control.raw import KIB, MIB, Group, RawLocal, chain
from tests.control.rig import Rig

PAGES_MAX = 12


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[Kind, int, int, list[bool]]]:
    """For each chain: kind, page tokens, window pages, which pages are held."""
    found: list[tuple[Kind, int, int, list[bool]]] = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(Kind))
        window = draw(st.integers(1, 5)) if kind is Kind.WINDOW else 0
        tokens = draw(st.sampled_from([2, 4, 6, 16]))
        held = draw(st.lists(st.booleans() | st.just(True), min_size=1, max_size=PAGES_MAX))
        found.append((kind, tokens, window, held))
    return found


def serves(kind: Kind, page_tokens: int, window: int, held: list[bool], length: int) -> bool:
    """Whether a chain can serve a hit of `length` tokens, by the definition of its kind."""
    if length % page_tokens or length // page_tokens > len(held):
        return False
    pages = length // page_tokens
    if kind is Kind.ATTENTION:
        return all(held[:pages])
    if kind is Kind.WINDOW:
        return all(held[max(0, pages - window) : pages])
    return held[pages - 1]


def needed(kind: Kind, page_tokens: int, window: int, length: int) -> int:
    pages = length // page_tokens
    return {Kind.ATTENTION: pages, Kind.WINDOW: min(pages, window), Kind.STATE: min(pages, 1)}[kind]


@pytest.fixture
def roomy(start_rig: StartRig) -> Rig:
    return start_rig(host_memory=16 * MIB, namespaces_max=10_000, session_namespaces_max=10_000)


def test_the_joint_hit_is_the_longest_that_every_kind_can_serve(roomy: Rig) -> None:
    client = roomy.local()
    numbers = iter(range(10**6))

    @given(chains())
    @settings(max_examples=60, deadline=None)
    def check(drawn: list[tuple[Kind, int, int, list[bool]]]) -> None:
        asked = [ask(client, f"{next(numbers)}", *each) for each in drawn]
        longest = max(length for length in range(200) if length == 0 or all(
            serves(*each, length) for each in drawn
        ))  # fmt: skip
        counts = [needed(*each[:3], longest) for each in drawn]
        tokens, rows = client.call(Type.MATCH, asked)
        assert (tokens, [row[0] for row in rows]) == (longest, counts)
        group = Group(client.call(Type.ACQUIRE, asked, b"request", 0, 1000, 0, 0))
        assert (group.tokens, group.counts) == (longest, counts)
        for at, (_, _, _, held) in enumerate(drawn):
            assert sorted(group.pages(at)) == [page for page, there in enumerate(held) if there]
        client.release(group.lease)

    check()


def ask(
    client: RawLocal, name: str, kind: Kind, page_tokens: int, window: int, held: list[bool]
) -> list[Any]:
    """Hold these pages in a namespace of their own; the chain to ask for."""
    space = client.open(
        model=name, kind=kind, page_tokens=page_tokens, window_pages=window, page_bytes=4 * KIB
    )
    keys = chain(name, len(held))
    for at, there in enumerate(held):
        if there:
            client.put(space, keys[at : at + 1], parent=keys[at - 1] if at else None)
    return [space, b"".join(keys)]


@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.STATE], ids=lambda kind: kind.name.lower())
def test_leaves_are_held_without_what_came_before(roomy: Rig, kind: Kind) -> None:
    client = roomy.local()
    chain_ = ask(client, "a", kind, 16, 2 if kind is Kind.WINDOW else 0, [False] * 6 + [True] * 2)
    assert client.call(Type.MATCH, [chain_])[0] == 8 * 16


def test_a_joint_match_is_a_use_of_the_pages_it_found(start_rig: StartRig) -> None:
    rig = start_rig(host_memory=MIB)
    client = rig.local()
    spaces = [client.open(model=name) for name in "xy"]
    for space in spaces:
        client.put(space, chain("old", 4))
        client.put(space, chain("other", 4))
    client.call(Type.MATCH, [[space, b"".join(chain("old", 4))] for space in spaces])
    client.put(spaces[0], chain("new", 8))
    assert [client.match(space, chain("old", 4)) for space in spaces] == [4, 4]
    assert [client.match(space, chain("other", 4)) for space in spaces] == [0, 0]


def test_two_chains_of_which_one_is_empty_hit_nothing(rig: Rig) -> None:
    client = rig.local()
    one, two = client.open(model="x"), client.open(model="y")
    client.put(one, chain("a", 4))
    tokens, rows = client.call(
        Type.MATCH, [[one, b"".join(chain("a", 4))], [two, b"".join(chain("a", 4))]]
    )
    assert (tokens, [row[0] for row in rows]) == (0, [0, 0])
