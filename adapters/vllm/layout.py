"""Where a block's bytes lie in an engine's tensors, by strides and not by shape.

A registered tensor has its blocks on axis 0 and heads, tokens and content on the rest, in any
order of memory. `block_layout` finds the contiguous regions of one block; `PageMemory` cuts the
buffers of a page (one block, all layers) out of the tensors' memory without copying.

Pure over plain values; `PageMemory` borrows memory that its caller keeps alive. Not thread-safe.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from nexuskv.errors import ConfigError

AXES: Final = "HNC"
"""Axes of a block after axis 0: KV heads, tokens (states), content (K and V of one head)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """One registered tensor in plain values; strides in items, as torch counts them."""

    layer: str
    address: int
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where block b lies: regions at `b * stride_bytes + offset`, in the order they are stored."""

    stride_bytes: int
    offsets_bytes: tuple[int, ...]
    region_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.region_bytes * len(self.offsets_bytes)


def describe(shape: Sequence[int], *, order: Sequence[int], item_bytes: int) -> str:
    """Name the order and sizes inside a block, outermost first: `H2 N16 C64`, C in bytes.

    Args:
        shape: heads, tokens, content items.
        order: positions of `shape` from the outermost to the innermost in memory.
        item_bytes: bytes of one item.
    """
    sizes = (*shape[:-1], shape[-1] * item_bytes)
    return " ".join(f"{AXES[axis]}{sizes[axis]}" for axis in order)


def describe_tensor(tensor: TensorFacts) -> str:
    """`describe` for a registered tensor, its order taken from the strides.

    Axes of length 1 have no place in memory; they keep their usual one.

    Raises:
        ConfigError: the tensor has not the four axes that are understood.
    """
    if len(tensor.shape) != 1 + len(AXES):
        raise ConfigError(f"{tensor.layer} has shape {tensor.shape}, not (blocks, H, N, C)")
    order = [axis for axis in range(len(AXES)) if tensor.shape[1 + axis] > 1]
    order.sort(key=lambda axis: -tensor.strides[1 + axis])
    return _describe_long_axes(tensor.shape[1:], order, tensor.item_bytes)


def describe_expected(shape: Sequence[int], *, order: Sequence[int], item_bytes: int) -> str:
    """`describe` for what a configuration promises, comparable with `describe_tensor`."""
    long_axes = [axis for axis in order if shape[axis] > 1]
    return _describe_long_axes(shape, long_axes, item_bytes)


def _describe_long_axes(shape: Sequence[int], order: list[int], item_bytes: int) -> str:
    single = [axis for axis in range(len(AXES)) if axis not in order]
    return describe(shape, order=[*single, *order], item_bytes=item_bytes)


def block_layout(tensor: TensorFacts, *, block_count: int) -> BlockLayout:
    """The regions of one block, joined as far as they are contiguous.

    Raises:
        ConfigError: axis 0 does not count blocks, or items of a block share memory.
    """
    if not tensor.shape or tensor.shape[0] != block_count:
        raise ConfigError(f"{tensor.layer} has shape {tensor.shape}, not {block_count} blocks")
    axes = [
        (stride * tensor.item_bytes, size)
        for stride, size in zip(tensor.strides[1:], tensor.shape[1:], strict=True)
        if size > 1
    ]
    axes.sort()
    region_bytes = extent_bytes = tensor.item_bytes
    outer: list[tuple[int, int]] = []
    for stride_bytes, size in axes:
        if stride_bytes < extent_bytes:
            raise ConfigError(f"{tensor.layer} with strides {tensor.strides} overlaps itself")
        if not outer and stride_bytes == region_bytes:
            region_bytes *= size
        else:
            outer.insert(0, (stride_bytes, size))
        extent_bytes = stride_bytes * (size - 1) + extent_bytes
    steps = [range(0, stride_bytes * size, stride_bytes) for stride_bytes, size in outer]
    offsets = tuple(sum(place) for place in product(*steps))
    stride_bytes = tensor.strides[0] * tensor.item_bytes
    if block_count > 1 and stride_bytes < region_bytes:
        raise ConfigError(f"{tensor.layer} with strides {tensor.strides} overlaps itself")
    return BlockLayout(stride_bytes, offsets, region_bytes)


class PageMemory:
    """Buffers of any block's page over the registered tensors' memory.

    The memory must outlive this object; whoever registers the tensors holds them.
    """

    def __init__(self, tensors: Sequence[TensorFacts], *, block_count: int) -> None:
        self._layers: list[tuple[memoryview, BlockLayout]] = []
        self.block_count = block_count
        for tensor in tensors:
            layout = block_layout(tensor, block_count=block_count)
            last = layout.stride_bytes * (block_count - 1) + layout.offsets_bytes[-1]
            memory = (ctypes.c_ubyte * (last + layout.region_bytes)).from_address(tensor.address)
            self._layers.append((memoryview(memory).cast("B"), layout))
        self.page_bytes = sum(layout.block_bytes for _, layout in self._layers)

    def page(self, block_id: int) -> list[memoryview]:
        """The regions of one block, layer by layer; their lengths add up to `page_bytes`.

        Raises:
            ConfigError: there is no such block.
        """
        if not 0 <= block_id < self.block_count:
            raise ConfigError(f"block {block_id} is not one of {self.block_count}")
        regions: list[memoryview] = []
        for memory, layout in self._layers:
            start = block_id * layout.stride_bytes
            for offset in layout.offsets_bytes:
                at = start + offset
                regions.append(memory[at : at + layout.region_bytes])
        return regions
