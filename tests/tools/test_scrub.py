"""A scrub asks for every page in each tier that holds it, in bounded batches, and adds up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest

from nexuskv.tools import scrub
from nexuskv.tools.pace import Pace
from nexuskv.tools.scrub import Tally
from nexuskv.types import PageStatus

if TYPE_CHECKING:
    from nexuskv.client.store import Store

NAMES = [b"a" * 16, b"b" * 16]
PAGE_BYTES = 1 << 20


@dataclass
class Shelf:
    """Stands for a store: pages by namespace, what each check answers, what was asked."""

    pages: dict[bytes, list[tuple[bytes, list[str]]]]
    bad: dict[tuple[bytes, str], PageStatus] = field(default_factory=dict)
    asked: list[tuple[bytes, str, list[bytes]]] = field(default_factory=list)

    def inspect(self, what: str, namespace_id: bytes = b"") -> Iterator[list[object]]:
        assert what == "pages"
        for key, residency in self.pages[namespace_id]:
            yield [key, b"", 0, True, residency, PAGE_BYTES, 0, False]

    def verify(self, namespace_id: bytes, keys: bytes, *, tier: str) -> list[PageStatus]:
        names = [keys[at : at + 8] for at in range(0, len(keys), 8)]
        self.asked.append((namespace_id, tier, names))
        return [self.bad.get((name, tier), PageStatus.HIT) for name in names]


def keys(count: int) -> list[bytes]:
    return [n.to_bytes(8, "big") for n in range(count)]


def run(shelf: Shelf, *tiers: str, rate: int = 0) -> Sequence[Tally]:
    return scrub.scrub(
        cast("Store", shelf),
        NAMES,
        tiers=tiers,
        pace=Pace(rate, wait=lambda _: None),
        progress=lambda *_: None,
    )


@pytest.fixture
def shelf() -> Shelf:
    both = [(key, ["host", "ssd"]) for key in keys(3)]
    return Shelf({NAMES[0]: both, NAMES[1]: [(key, ["ssd"]) for key in keys(100)]})


def test_each_page_is_asked_for_once_in_each_tier_that_holds_it(shelf: Shelf) -> None:
    host, ssd = run(shelf, "host", "ssd")
    assert (host.pages, ssd.pages) == (3, 103)
    assert (host.good, ssd.bytes) == (3, 103 * PAGE_BYTES)
    asked = [(name, tier, key) for name, tier, batch in shelf.asked for key in batch]
    assert len(asked) == len(set(asked)) == 106


def test_other_tiers_are_left_alone(shelf: Shelf) -> None:
    (host,) = run(shelf, "host")
    assert host.pages == 3
    assert {tier for _, tier, _ in shelf.asked} == {"host"}


def test_a_batch_is_bounded_in_bytes(shelf: Shelf) -> None:
    run(shelf, "ssd")
    assert max(len(batch) for *_, batch in shelf.asked) == scrub.BATCH_BYTES // PAGE_BYTES


def test_a_rate_makes_batches_small(shelf: Shelf) -> None:
    shelf.pages[NAMES[1]] = shelf.pages[NAMES[1]][:3]
    run(shelf, "ssd", rate=scrub.BATCHES_PER_S * 2 * PAGE_BYTES)
    assert max(len(batch) for *_, batch in shelf.asked) == 2


def test_what_was_found_is_told_apart(shelf: Shelf) -> None:
    corrupt, gone, unreadable = keys(3)
    shelf.bad = {
        (corrupt, "host"): PageStatus.CORRUPT,
        (gone, "host"): PageStatus.MISS,
        (unreadable, "host"): PageStatus.UNAVAILABLE,
    }
    (host,) = run(shelf, "host")
    assert (host.good, host.corrupt, host.gone, host.unreadable, host.bad) == (0, 1, 1, 1, 2)
    assert host.bytes == PAGE_BYTES
