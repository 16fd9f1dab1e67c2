"""Blocks are found by strides: every byte of a block once, none of another."""

import ctypes
from collections.abc import Iterator
from itertools import permutations, product

import pytest

from nexuskv.adapters.vllm.layout import (
    PageMemory,
    TensorFacts,
    block_layout,
    describe_expected,
    describe_tensor,
)
from nexuskv.errors import ConfigError

BLOCKS, HEADS, TOKENS, CONTENT, ITEM_BYTES = 3, 2, 4, 5, 2
SHAPE = (BLOCKS, HEADS, TOKENS, CONTENT)


def strides_of(order: tuple[int, ...], shape: tuple[int, ...] = SHAPE) -> tuple[int, ...]:
    """Strides in items of a dense tensor whose axes lie in memory as `order` says."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def tensor(
    order: tuple[int, ...] = (0, 1, 2, 3),
    *,
    address: int = 0,
    shape: tuple[int, ...] = SHAPE,
    strides: tuple[int, ...] | None = None,
) -> TensorFacts:
    return TensorFacts(
        layer="layers.0",
        address=address,
        dtype="float16",
        item_bytes=ITEM_BYTES,
        shape=shape,
        strides=strides_of(order) if strides is None else strides,
    )


def bytes_of_block(facts: TensorFacts, block: int) -> Iterator[int]:
    """Every byte address of a block, straight from the meaning of strides."""
    for place in product(*(range(size) for size in facts.shape[1:])):
        item = block * facts.strides[0] + sum(
            index * stride for index, stride in zip(place, facts.strides[1:], strict=True)
        )
        yield from range(item * facts.item_bytes, (item + 1) * facts.item_bytes)


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_regions_are_exactly_the_bytes_of_a_block(order: tuple[int, ...]) -> None:
    facts = tensor(order)
    layout = block_layout(facts, block_count=BLOCKS)
    found = [
        byte
        for offset in layout.offsets_bytes
        for byte in range(
            layout.stride_bytes + offset, layout.stride_bytes + offset + layout.region_bytes
        )
    ]
    assert sorted(found) == sorted(bytes_of_block(facts, 1))


@pytest.mark.parametrize(
    ("order", "region_count"),
    [((0, 1, 2, 3), 1), ((0, 2, 1, 3), 1), ((1, 0, 2, 3), HEADS)],
    ids=["LBHNC", "LBNHC", "LHBNC"],
)
def test_a_block_has_no_more_regions_than_its_layout_needs(
    order: tuple[int, ...], region_count: int
) -> None:
    assert len(block_layout(tensor(order), block_count=BLOCKS).offsets_bytes) == region_count


def test_regions_of_a_block_come_in_the_order_of_memory() -> None:
    offsets = block_layout(tensor((1, 0, 2, 3)), block_count=BLOCKS).offsets_bytes
    assert list(offsets) == sorted(offsets)


@pytest.mark.parametrize(
    ("order", "text"),
    [((0, 1, 2, 3), "H2 N4 C10"), ((0, 2, 1, 3), "N4 H2 C10")],
    ids=["heads first", "tokens first"],
)
def test_description_tells_layouts_of_one_shape_apart(order: tuple[int, ...], text: str) -> None:
    assert describe_tensor(tensor(order)) == text


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_promise_and_tensor_have_one_description(order: tuple[int, ...]) -> None:
    promised = describe_expected(SHAPE[1:], order=order, item_bytes=ITEM_BYTES)
    assert describe_tensor(tensor((0, *(axis + 1 for axis in order)))) == promised


def test_axis_of_length_one_has_no_place() -> None:
    shape = (BLOCKS, 1, TOKENS, CONTENT)
    first = tensor(shape=shape, strides=strides_of((0, 1, 2, 3), shape))
    second = tensor(shape=shape, strides=strides_of((0, 2, 1, 3), shape))
    assert describe_tensor(first) == describe_tensor(second)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((BLOCKS + 1, HEADS, TOKENS, CONTENT), (40, 20, 5, 1)),
        (SHAPE, (40, 20, 5, 0)),
        (SHAPE, (40, 1, 5, 1)),
        (SHAPE, (1, 20, 5, 1)),
    ],
    ids=["other block count", "broadcast", "overlap", "blocks overlap"],
)
def test_tensor_that_is_not_understood_is_refused(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError):
        block_layout(tensor(shape=shape, strides=strides), block_count=BLOCKS)


def test_description_of_a_tensor_with_other_axes_is_refused() -> None:
    with pytest.raises(ConfigError, match="not \\(blocks, H, N, C\\)"):
        describe_tensor(tensor(shape=(2, *SHAPE), strides=(120, *strides_of((0, 1, 2, 3)))))


def test_page_joins_all_layers_of_one_block() -> None:
    memories = [ctypes.create_string_buffer(bytes(range(120)) * 2, 240) for _ in range(2)]
    tensors = [
        tensor(order, address=ctypes.addressof(memory))
        for memory, order in zip(memories, [(0, 1, 2, 3), (1, 0, 2, 3)], strict=True)
    ]
    page = PageMemory(tensors, block_count=BLOCKS).page(1)
    dense = memories[0].raw[80:160]
    by_heads = memories[1].raw[40:80] + memories[1].raw[160:200]
    assert b"".join(page) == dense + by_heads


def test_writing_a_page_writes_the_tensor() -> None:
    memory = ctypes.create_string_buffer(240)
    page = PageMemory([tensor(address=ctypes.addressof(memory))], block_count=BLOCKS).page(2)
    page[0][:] = b"\x07" * 80
    assert memory.raw == bytes(160) + b"\x07" * 80


@pytest.mark.parametrize("block_id", [-1, BLOCKS])
def test_block_outside_the_tensor_is_refused(block_id: int) -> None:
    memory = ctypes.create_string_buffer(240)
    pages = PageMemory([tensor(address=ctypes.addressof(memory))], block_count=BLOCKS)
    with pytest.raises(ConfigError, match="not one of 3"):
        pages.page(block_id)
