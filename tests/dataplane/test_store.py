import struct
import time
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from nexuskv.dataplane.checksum import page_checksum
from nexuskv.types import PageStatus

if TYPE_CHECKING:
    from tests.dataplane.conftest import Arena, MakeArena

STORED = PageStatus.STORED
NAMESPACE_ID = bytes(range(16))


def _fresh(arena: "Arena") -> list[bytes]:
    """Other payloads than the arena holds."""
    return [bytes(255 - byte for byte in payload) for payload in arena.payloads]


@pytest.mark.parametrize("size", [1, 240, 241, 4096, 65536, 65537, 300_000])
def test_stored_bytes_lie_in_the_slot_under_the_checksum_returned(
    moving: ModuleType, make_arena: "MakeArena", size: int
) -> None:
    arena = make_arena(size, 3)
    payloads = _fresh(arena)
    statuses, checksums = moving.store(arena.segment(moving), arena.pages(), payloads)
    assert statuses == bytes([STORED] * 3)
    assert struct.unpack("<3Q", checksums) == tuple(
        page_checksum(payload, NAMESPACE_ID, key)
        for payload, key in zip(payloads, arena.keys, strict=True)
    )
    for descriptor, payload in zip(arena.descriptors, payloads, strict=True):
        assert arena.data[descriptor.offset_bytes :][:size] == payload


def test_regions_are_one_stream(moving: ModuleType, make_arena: "MakeArena") -> None:
    arena = make_arena(8192, 1)
    (payload,) = _fresh(arena)
    parts = [payload[:1], b"", payload[1:5000], payload[5000:]]
    _, checksums = moving.store(arena.segment(moving), arena.pages(), [parts])
    assert struct.unpack("<Q", checksums)[0] == page_checksum(payload, NAMESPACE_ID, arena.keys[0])
    assert arena.data[:8192] == payload


def test_sources_may_overlap(moving: ModuleType, make_arena: "MakeArena") -> None:
    arena = make_arena(8192, 2)
    payload = bytes(8192)
    statuses, _ = moving.store(arena.segment(moving), arena.pages(), [payload, payload])
    assert statuses == bytes([STORED, STORED])


def test_a_descriptor_of_size_zero_is_skipped(moving: ModuleType, make_arena: "MakeArena") -> None:
    arena = make_arena(8192, 2)
    pages = arena.pages([None, arena.descriptors[1]])
    statuses, checksums = moving.store(arena.segment(moving), pages, _fresh(arena))
    assert statuses == bytes([PageStatus.MISS, STORED])
    assert checksums[:8] == bytes(8)
    assert arena.data[:8192] == arena.payloads[0]


def test_a_late_store_writes_nothing(moving: ModuleType, make_arena: "MakeArena") -> None:
    arena = make_arena(8192, 2)
    statuses, checksums = moving.store(
        arena.segment(moving), arena.pages(), _fresh(arena), deadline_s=time.monotonic()
    )
    assert statuses == bytes([PageStatus.UNAVAILABLE] * 2)
    assert checksums == bytes(16)
    assert arena.data[:8192] == arena.payloads[0]


def test_neighbouring_slots_are_left_alone(moving: ModuleType, make_arena: "MakeArena") -> None:
    arena = make_arena(5000, 3)
    pages = arena.pages([None, arena.descriptors[1], None])
    moving.store(arena.segment(moving), pages, _fresh(arena))
    assert arena.data[:5000] == arena.payloads[0]
    assert arena.data[8192 + 5000 : 16384] == bytes(16384 - 8192 - 5000)
    assert arena.data[16384 : 16384 + 5000] == arena.payloads[2]


def test_a_descriptor_past_the_end_is_refused_before_a_byte_moves(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena(8192, 2)
    pages = arena.pages([arena.descriptors[0], arena.other(1, offset_bytes=1 << 20)])
    with pytest.raises(IndexError, match="descriptor 1"):
        moving.store(arena.segment(moving), pages, _fresh(arena))
    assert arena.data[:8192] == arena.payloads[0]


def test_a_source_of_another_length_is_refused_before_a_byte_moves(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena(8192, 2)
    with pytest.raises(ValueError, match="item 1"):
        moving.store(arena.segment(moving), arena.pages(), [bytes(8192), bytes(8191)])
    assert arena.data[:8192] == arena.payloads[0]


def test_check_finds_the_damaged_page_where_it_lies(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena()
    arena.flip(1, 8191)
    pages = arena.pages([*arena.descriptors[:3], None])
    assert moving.check(arena.segment(moving), pages) == bytes(
        [PageStatus.HIT, PageStatus.CORRUPT, PageStatus.HIT, PageStatus.MISS]
    )


@pytest.mark.parametrize("threads", [1, 4])
def test_check_answers_in_the_order_of_the_pages(
    moving: ModuleType, make_arena: "MakeArena", threads: int
) -> None:
    arena = make_arena(4096, 256)
    arena.flip(200)
    statuses = moving.check(arena.segment(moving), arena.pages(), threads=threads)
    assert [at for at, status in enumerate(statuses) if status] == [200]
