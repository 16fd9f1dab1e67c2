"""The native module and its pure-Python twin give the same answer to the same question."""

import random
import struct
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexuskv.dataplane import _native, fallback
from nexuskv.dataplane.batch import Pages

if TYPE_CHECKING:
    from tests.dataplane.conftest import Arena, MakeArena

COUNT = 4
SEGMENT_ID = 7


def _cut(rng: random.Random, page: memoryview) -> list[memoryview]:
    cuts = sorted(rng.choices(range(len(page) + 1), k=rng.randrange(6)))
    return [page[a:b] for a, b in pairwise([0, *cuts, len(page)])]


def _spoil(rng: random.Random, arena: "Arena") -> None:
    for at, descriptor in enumerate(arena.descriptors):
        fate = rng.randrange(4)
        if fate == 0:
            arena.flip(at, rng.randrange(arena.page_bytes))
        elif fate == 1:
            arena.set_generation(descriptor, rng.randrange(1 << 64))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    page_bytes=st.integers(1, 20_000), key_bytes=st.integers(8, 64), seed=st.integers(0, 1 << 32)
)
def test_twins_agree_on_loads_of_damaged_pages(
    make_arena: "MakeArena", page_bytes: int, key_bytes: int, seed: int
) -> None:
    rng = random.Random(seed)
    arena: Arena = make_arena(page_bytes, COUNT, key_bytes)
    _spoil(rng, arena)
    named = [d if rng.randrange(4) else None for d in arena.descriptors]
    answers: list[bytes] = []
    arrived: list[list[bytearray]] = []
    for module in (_native, fallback):
        into = arena.buffers()
        cut = [_cut(rng, memoryview(page)) for page in into]
        answers.append(
            module.load(arena.segment(module), arena.slots(module), arena.pages(named), cut)
        )
        arrived.append(into)
    assert answers[0] == answers[1]
    assert arrived[0] == arrived[1]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(page_bytes=st.integers(1, 20_000), seed=st.integers(0, 1 << 32))
def test_twins_agree_on_stores(make_arena: "MakeArena", page_bytes: int, seed: int) -> None:
    rng = random.Random(seed)
    arena: Arena = make_arena(page_bytes, COUNT)
    payloads = [rng.randbytes(page_bytes) for _ in range(COUNT)]
    answers: list[tuple[bytes, bytes]] = []
    for module in (_native, fallback):
        cut = [_cut(rng, memoryview(page)) for page in payloads]
        answers.append(module.store(arena.segment(module), arena.pages(), cut))
    assert answers[0] == answers[1]


descriptor_bytes = st.builds(
    struct.Struct("<IIQQQ").pack,
    st.sampled_from([0, SEGMENT_ID, 2**32 - 1]),
    st.sampled_from([0, 1, 4095, 4096, 4097, 8192, 1 << 20, (1 << 20) + 1, 2**32 - 1]),
    st.integers(0, 300).map(lambda slot: slot * 4096) | st.integers(0, 2**64 - 1),
    st.just(0),
    st.just(0),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=descriptor_bytes)
def test_twins_refuse_the_same_descriptors(make_arena: "MakeArena", raw: bytes) -> None:
    arena: Arena = make_arena(4096, 1)
    pages = arena.pages()._replace(descriptors=raw)
    assert _judged(_native, arena, pages) == _judged(fallback, arena, pages)


def _judged(module: ModuleType, arena: "Arena", pages: Pages) -> object:
    """The status of the one page, or how it was refused."""
    size = int.from_bytes(bytes(memoryview(pages.descriptors))[4:8], "little")
    into = [bytearray(min(size, 2 << 20))]
    try:
        return module.load(arena.segment(module), arena.slots(module), pages, into)
    except (IndexError, ValueError) as exc:
        return type(exc), str(exc)
