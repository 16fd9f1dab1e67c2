"""The joint hit of several namespaces: how many tokens every one of them can serve, by its kind."""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from nexuskv.control.namespaces import Namespace
from nexuskv.index.tree import ABSENT
from nexuskv.types import Kind

_HOLE: Final = array("I", [ABSENT]).tobytes()


@dataclass(frozen=True, slots=True)
class Held:
    """What one namespace holds of one chain: a slot a page, ABSENT where none."""

    namespace: Namespace
    slots: "array[int]"

    @property
    def page_tokens(self) -> int:
        """Tokens of one page."""
        return self.namespace.record.page_tokens


def has_holes(slots: "array[int]") -> bool:
    """Whether a page is not held; quick when all are, as they are in a get that follows a match."""
    # A slot's number may hold these bytes across two items only in pools of 64 GiB and more.
    return _HOLE in slots.tobytes() and ABSENT in slots


def leading(slots: "array[int]") -> int:
    """How many pages are held from the chain's start."""
    return slots.index(ABSENT) if has_holes(slots) else len(slots)


def joint_tokens(chains: Sequence[Held]) -> int:
    """The longest L such that every chain can serve [0, L): a multiple of each page_tokens."""
    if not chains:
        return 0
    step = math.lcm(*(chain.page_tokens for chain in chains))
    tests = [_test_of(chain) for chain in chains]
    longest = min(
        (leading(c.slots) if c.namespace.record.kind is Kind.ATTENTION else len(c.slots))
        * c.page_tokens
        for c in chains
    )
    for tokens in range(longest // step * step, 0, -step):
        if all(test(tokens) for test in tests):
            return tokens
    return 0


def pages_needed(namespace: Namespace, tokens: int) -> int:
    """How many pages of this namespace a hit of `tokens` tokens needs."""
    pages = tokens // namespace.record.page_tokens
    kind = namespace.record.kind
    if kind is Kind.STATE:
        return min(pages, 1)
    return min(pages, namespace.record.window_pages) if kind is Kind.WINDOW else pages


def _test_of(chain: Held) -> Callable[[int], bool]:
    """Whether a chain can serve a hit of that many tokens."""
    page_tokens, slots = chain.page_tokens, chain.slots
    if chain.namespace.record.kind is Kind.ATTENTION:
        longest = leading(slots) * page_tokens
        return lambda tokens: tokens <= longest
    if chain.namespace.record.kind is Kind.STATE:
        return lambda tokens: slots[tokens // page_tokens - 1] != ABSENT
    window_pages = chain.namespace.record.window_pages
    held_before = _consecutive(slots)

    def serves(tokens: int) -> bool:
        pages = tokens // page_tokens
        return held_before[pages] >= min(window_pages, pages)

    return serves


def _consecutive(slots: "array[int]") -> list[int]:
    """At i: how many pages directly before page i are held."""
    counts = [0]
    for slot in slots:
        counts.append(0 if slot == ABSENT else counts[-1] + 1)
    return counts
