"""The physical limit of shared-memory transfers: the same native calls on private memory.

A `BareSegment` is what a daemon's segment is to a client, without a daemon: a populated private
mapping of equal slots and a slot table. One thread.
"""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Final

from nexuskv.config import format_size
from nexuskv.dataplane import native
from nexuskv.dataplane.batch import Pages, Segment, SlotTable
from nexuskv.errors import NexusError
from nexuskv.types import PAGE_ALIGN_BYTES, Descriptor, PageStatus

RECORD_BYTES: Final = 64
NAMESPACE_ID: Final = bytes(16)
KEY_BYTES: Final = 32


class Memory:
    """A populated private mapping, cut into pages: what an engine's own memory is."""

    def __init__(self, size_bytes: int) -> None:
        self.map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = native.address_of(self.map)
        native.populate(self.address, size_bytes, write=True)

    def pages(self, page_bytes: int, count: int) -> list[memoryview]:
        """The first `count` pages."""
        whole = memoryview(self.map)
        return [whole[at * page_bytes : (at + 1) * page_bytes] for at in range(count)]


class BareSegment:
    """`slot_count` slots of `page_bytes` bytes, used in turn, a batch of pages at a time."""

    def __init__(self, *, page_bytes: int, slot_count: int) -> None:
        if page_bytes % PAGE_ALIGN_BYTES:
            raise NexusError(f"{page_bytes} is not a multiple of {PAGE_ALIGN_BYTES}")
        size_bytes = page_bytes * slot_count
        self._data = Memory(size_bytes)
        self._table = Memory(size_bytes // PAGE_ALIGN_BYTES * RECORD_BYTES)
        self._segment = Segment(0, self._data.address, size_bytes)
        self._slots = SlotTable(
            self._table.address,
            len(self._table.map),
            chunk_bytes=size_bytes,
            header_bytes=0,
            record_bytes=RECORD_BYTES,
            generation_offset=0,
        )
        self._page_bytes = page_bytes
        self._slot_count = slot_count
        # What a call is given is made once, the first time a batch is used: a warm-up.
        self._stores: dict[int, Pages] = {}
        self._loads: dict[int, Pages] = {}

    def store(self, turn: int, from_: Sequence[memoryview]) -> None:
        """The bare put: hash and copy a batch into the slots of this turn."""
        count = len(from_)
        first = self._first(turn, count)
        if first not in self._stores:
            self._stores[first] = self._pages(first, bytes(8 * count))
        statuses, checksums = native.store(self._segment, self._stores[first], from_)
        if statuses.count(PageStatus.STORED) != count:
            raise NexusError("the bare store failed")
        if first not in self._loads:
            self._loads[first] = self._pages(first, checksums)

    def load(self, turn: int, into: Sequence[memoryview]) -> None:
        """The bare get: copy and hash a batch that was stored in the slots of this turn."""
        pages = self._loads[self._first(turn, len(into))]
        statuses = native.load(self._segment, self._slots, pages, into)
        if statuses.count(PageStatus.HIT) != len(into):
            raise NexusError("the bare load failed")

    def copy(self, turn: int, into: Memory, count: int) -> None:
        """The same bytes as `load`, by one memcpy without a hash; the GIL is released."""
        start = self._first(turn, count) * self._page_bytes
        ctypes.memmove(into.address, self._data.address + start, count * self._page_bytes)

    def _first(self, turn: int, count: int) -> int:
        return turn % (self._slot_count // count) * count

    def _pages(self, first: int, checksums: bytes) -> Pages:
        descriptors = [
            Descriptor(
                segment_id=0,
                offset_bytes=slot * self._page_bytes,
                size_bytes=self._page_bytes,
                checksum=int.from_bytes(checksums[8 * at : 8 * at + 8], "little"),
                generation=0,
            ).encode()
            for at, slot in enumerate(range(first, first + len(checksums) // 8))
        ]
        keys = bytes(KEY_BYTES * len(descriptors))
        return Pages(b"".join(descriptors), keys, KEY_BYTES, NAMESPACE_ID)


def batch_name(page_bytes: int, count: int) -> str:
    """`1MiB x32`."""
    return f"{format_size(page_bytes)} x{count}"
