import math
import random
import time
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from nexuskv.dataplane.batch import Pages, Segment
from nexuskv.types import PageStatus

if TYPE_CHECKING:
    from tests.dataplane.conftest import Arena, MakeArena

HIT, MISS, CORRUPT, STALE = (
    PageStatus.HIT,
    PageStatus.MISS,
    PageStatus.CORRUPT,
    PageStatus.STALE,
)
STEP = 64 * 1024
SIZES = [
    *(1, 2, 3, 8, 9, 16, 17, 128, 129, 240, 241, 255, 256, 257, 511, 1023, 1024, 1025, 4095, 4096),
    *(STEP - 1, STEP, STEP + 1, 2 * STEP - 255, 2 * STEP, 2 * STEP + 256, 3 * STEP + 7, 300_000),
]


def _load(module: ModuleType, arena: "Arena", into: list[bytearray], **options: float) -> bytes:
    statuses = module.load(
        arena.segment(module), arena.slots(module), arena.pages(), into, **options
    )
    assert isinstance(statuses, bytes)
    return statuses


@pytest.mark.parametrize("size", SIZES)
def test_loaded_bytes_are_the_committed_bytes(
    moving: ModuleType, make_arena: "MakeArena", size: int
) -> None:
    arena = make_arena(size, 3)
    into = arena.buffers()
    assert _load(moving, arena, into) == bytes([HIT] * 3)
    assert into == arena.payloads


@pytest.mark.parametrize("key_bytes", [8, 13, 64])
def test_keys_of_every_length_are_mixed_into_the_checksum(
    moving: ModuleType, make_arena: "MakeArena", key_bytes: int
) -> None:
    arena = make_arena(key_bytes=key_bytes)
    assert _load(moving, arena, arena.buffers()) == bytes([HIT] * 4)


@pytest.mark.parametrize("region_count", [1, 2, 7, 1024, 1025, 5000])
def test_regions_cut_anywhere_are_one_stream(
    moving: ModuleType, make_arena: "MakeArena", region_count: int
) -> None:
    arena = make_arena(300_000, 2)
    rng = random.Random(region_count)
    flat = [memoryview(bytearray(300_000)) for _ in range(2)]
    cuts = [
        [0, *sorted(rng.choices(range(300_001), k=region_count - 1)), 300_000] for _ in range(2)
    ]
    into = [[f[a:b] for a, b in pairwise(c)] for f, c in zip(flat, cuts, strict=True)]
    statuses = moving.load(arena.segment(moving), arena.slots(moving), arena.pages(), into)
    assert statuses == bytes([HIT, HIT])
    assert [bytes(f) for f in flat] == arena.payloads


def test_regions_may_lie_in_any_order_of_addresses(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena(8192, 2)
    memory = memoryview(bytearray(16384))
    into = [[memory[12288:], memory[:4096]], [memory[8192:12288], memory[4096:8192]]]
    statuses = moving.load(arena.segment(moving), arena.slots(moving), arena.pages(), into)
    assert statuses == bytes([HIT, HIT])
    assert bytes(memory[12288:]) + bytes(memory[:4096]) == arena.payloads[0]


def test_a_descriptor_of_size_zero_is_a_miss_and_leaves_its_item_alone(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena()
    pages = arena.pages([arena.descriptors[0], None, arena.descriptors[2], None])
    into = [bytearray(8192), bytearray(b"as it was"), bytearray(8192), bytearray()]
    statuses = moving.load(arena.segment(moving), arena.slots(moving), pages, into)
    assert statuses == bytes([HIT, MISS, HIT, MISS])
    assert into[1] == b"as it was"


def test_an_empty_batch_is_fine(moving: ModuleType, make_arena: "MakeArena") -> None:
    arena = make_arena()
    assert moving.load(arena.segment(moving), arena.slots(moving), arena.pages([]), []) == b""


@pytest.mark.parametrize("byte", [0, 4095, 8191])
def test_a_flipped_bit_is_corrupt(moving: ModuleType, make_arena: "MakeArena", byte: int) -> None:
    arena = make_arena()
    arena.flip(2, byte)
    assert _load(moving, arena, arena.buffers()) == bytes([HIT, HIT, CORRUPT, HIT])


def test_a_page_under_another_key_is_corrupt(moving: ModuleType, make_arena: "MakeArena") -> None:
    arena = make_arena()
    arena.keys[0], arena.keys[1] = arena.keys[1], arena.keys[0]
    assert _load(moving, arena, arena.buffers()) == bytes([CORRUPT, CORRUPT, HIT, HIT])


def test_a_page_under_another_namespace_is_corrupt(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena()
    pages = arena.pages()._replace(namespace_id=bytes(16))
    statuses = moving.load(arena.segment(moving), arena.slots(moving), pages, arena.buffers())
    assert statuses == bytes([CORRUPT] * 4)


def test_a_slot_that_changed_owner_is_stale_even_if_its_bytes_differ(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena()
    arena.set_generation(arena.descriptors[1], 5)
    arena.set_generation(arena.descriptors[3], 5)
    arena.flip(3)
    assert _load(moving, arena, arena.buffers()) == bytes([HIT, STALE, HIT, STALE])


def test_slots_of_later_chunks_have_their_own_generations(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena(400_000, 7)  # two slots a chunk
    arena.set_generation(arena.descriptors[5], 5)
    into = arena.buffers()
    assert _load(moving, arena, into) == bytes([HIT] * 5 + [STALE, HIT])
    assert into[6] == arena.payloads[6]


@pytest.mark.parametrize("threads", [2, 3, 64])
def test_threads_change_nothing_but_speed(
    moving: ModuleType, make_arena: "MakeArena", threads: int
) -> None:
    arena = make_arena(8192, 500)
    arena.flip(77)
    into = arena.buffers()
    statuses = _load(moving, arena, into, threads=threads)
    assert statuses == bytes([HIT] * 77 + [CORRUPT] + [HIT] * 422)
    assert into[78:] == arena.payloads[78:]


def test_pages_not_begun_by_the_deadline_are_unavailable_and_untouched(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena()
    into = arena.buffers()
    statuses = _load(moving, arena, into, deadline_s=time.monotonic())
    assert statuses == bytes([PageStatus.UNAVAILABLE] * 4)
    assert into == arena.buffers()


@pytest.mark.parametrize(
    "changes",
    [
        {"offset_bytes": 1 << 20},
        {"offset_bytes": 2**64 - 4096},
        {"size_bytes": (1 << 20) + 1},
        {"segment_id": 8},
        {"offset_bytes": (1 << 20) - 4096},
        {"offset_bytes": 4096},
    ],
    ids=["past-end", "wraps", "too-large", "other-segment", "over-the-end", "between-slots"],
)
def test_a_descriptor_that_leaves_its_place_is_refused_before_a_byte_moves(
    moving: ModuleType, make_arena: "MakeArena", changes: dict[str, int]
) -> None:
    arena = make_arena()
    pages = arena.pages([arena.descriptors[0], arena.other(1, **changes)])
    size = changes.get("size_bytes", 8192)
    into = [bytearray(8192), bytearray(size)]
    with pytest.raises(IndexError, match="descriptor 1"):
        moving.load(arena.segment(moving), arena.slots(moving), pages, into)
    assert into[0] == bytes(8192)


def test_an_unaligned_offset_is_refused(moving: ModuleType, make_arena: "MakeArena") -> None:
    arena = make_arena(8192, 1)
    raw = bytearray(arena.descriptors[0].encode())
    raw[8] = 8
    pages = arena.pages()._replace(descriptors=raw)
    with pytest.raises(IndexError, match="aligned"):
        moving.load(arena.segment(moving), arena.slots(moving), pages, arena.buffers())


def test_a_slot_past_the_end_of_the_table_is_refused(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena()
    slots = arena.slots(moving)._replace(size_bytes=4096 + 3 * 256)
    with pytest.raises(IndexError, match="descriptor 3"):
        moving.load(arena.segment(moving), slots, arena.pages(), arena.buffers())


@pytest.mark.parametrize(
    "changes",
    [
        {"address": 0},
        {"chunk_bytes": 0},
        {"chunk_bytes": 4095},
        {"record_bytes": 0},
        {"record_bytes": 44},
        {"generation_offset": 41},
        {"generation_offset": 256},
        {"generation_offset": 2**64 - 8},
        {"header_bytes": 2**40},
        {"size_bytes": 2**64 - 1},
    ],
    ids=lambda c: "-".join(f"{name}={value}" for name, value in c.items()),
)
def test_a_geometry_out_of_range_is_refused(
    moving: ModuleType, make_arena: "MakeArena", changes: dict[str, int]
) -> None:
    arena = make_arena()
    slots = arena.slots(moving)._replace(**changes)
    with pytest.raises(ValueError, match="geometry"):
        moving.load(arena.segment(moving), slots, arena.pages(), arena.buffers())


@pytest.mark.parametrize("length", [0, 8191, 8193])
def test_an_item_of_another_length_than_its_page_is_refused(
    moving: ModuleType, make_arena: "MakeArena", length: int
) -> None:
    arena = make_arena()
    into = arena.buffers()
    into[3] = bytearray(length)
    with pytest.raises(ValueError, match=f"item 3 has {length} bytes in all, its page 8192"):
        _load(moving, arena, into)
    assert into[0] == bytes(8192)


def test_fewer_items_than_descriptors_are_refused(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena()
    with pytest.raises(ValueError, match="4 descriptors, but 3 items"):
        _load(moving, arena, arena.buffers()[:3])


def test_a_read_only_destination_is_refused(moving: ModuleType, make_arena: "MakeArena") -> None:
    arena = make_arena(8192, 1)
    with pytest.raises(BufferError):
        moving.load(arena.segment(moving), arena.slots(moving), arena.pages(), [bytes(8192)])


def test_a_destination_with_gaps_is_refused(moving: ModuleType, make_arena: "MakeArena") -> None:
    arena = make_arena(8192, 1)
    gaps = memoryview(bytearray(16384))[::2]
    with pytest.raises(BufferError):
        moving.load(arena.segment(moving), arena.slots(moving), arena.pages(), [gaps])


def test_something_that_is_no_buffer_is_refused(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena(8192, 1)
    with pytest.raises(TypeError):
        moving.load(arena.segment(moving), arena.slots(moving), arena.pages(), [None])


def test_destinations_that_overlap_are_refused(moving: ModuleType, make_arena: "MakeArena") -> None:
    arena = make_arena(8192, 2)
    memory = memoryview(bytearray(16384))
    with pytest.raises(ValueError, match="overlap"):
        moving.load(
            arena.segment(moving),
            arena.slots(moving),
            arena.pages(),
            [memory[4096:12288], memory[:8192]],
        )


def test_a_destination_inside_the_segment_is_refused(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena(8192, 1)
    with (
        memoryview(arena.data) as whole,
        whole[65536 : 65536 + 8192] as inside,
        pytest.raises(ValueError, match="overlap"),
    ):
        moving.load(arena.segment(moving), arena.slots(moving), arena.pages(), [inside])


@pytest.mark.parametrize("key_bytes", [0, 7, 65])
def test_a_key_length_out_of_bounds_is_refused(
    moving: ModuleType, make_arena: "MakeArena", key_bytes: int
) -> None:
    arena = make_arena(8192, 1)
    pages = arena.pages()._replace(key_bytes=key_bytes, keys=bytes(key_bytes))
    with pytest.raises(ValueError, match="8-64"):
        moving.load(arena.segment(moving), arena.slots(moving), pages, arena.buffers())


@pytest.mark.parametrize(
    "changes",
    [{"descriptors": 31}, {"keys": 33}, {"namespace_id": 65}],
    ids=lambda c: next(iter(c)),
)
def test_a_malformed_batch_is_refused(
    moving: ModuleType, make_arena: "MakeArena", changes: dict[str, int]
) -> None:
    arena = make_arena(8192, 1)
    descriptors, keys, key_bytes, namespace_id = arena.pages()
    pages = Pages(
        bytes(changes["descriptors"]) if "descriptors" in changes else descriptors,
        bytes(changes["keys"]) if "keys" in changes else keys,
        key_bytes,
        bytes(changes["namespace_id"]) if "namespace_id" in changes else namespace_id,
    )
    with pytest.raises(ValueError, match="bytes"):
        moving.load(arena.segment(moving), arena.slots(moving), pages, arena.buffers())


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"threads": 65}, {"deadline_s": math.nan}], ids=str
)
def test_options_out_of_range_are_refused(
    moving: ModuleType, make_arena: "MakeArena", options: dict[str, float]
) -> None:
    arena = make_arena()
    with pytest.raises(ValueError, match="threads are 1-64"):
        _load(moving, arena, arena.buffers(), **options)


@pytest.mark.parametrize("segment", [(7, -1, 4096), (7, 4096, 2**64), (7, 2**64 - 4096, 8192)])
def test_a_segment_outside_the_address_space_is_refused(
    moving: ModuleType, make_arena: "MakeArena", segment: tuple[int, int, int]
) -> None:
    arena = make_arena(8192, 1)
    with pytest.raises(ValueError, match=r"address space|64 bits"):
        moving.load(Segment(*segment), arena.slots(moving), arena.pages(), arena.buffers())


def test_buffers_are_let_go_after_success_and_after_refusal(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena()
    into = arena.buffers()
    _load(moving, arena, into)
    into[3] = bytearray(5)
    with pytest.raises(ValueError, match="item 3"):
        _load(moving, arena, into)
    for buffer in into:
        buffer.append(0)  # a held bytearray could not grow
    assert len(into[0]) == 8193
