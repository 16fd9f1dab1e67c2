"""The pure-Python twin of `nexuskv.dataplane._native`: same functions, same results, no compiler.

Bytes are copied by process_vm_readv on the own process, up to 1024 regions a call, which neither
holds the GIL nor ends in a signal on a bad page. Threading rule: stateless, like the C module.
`threads` is accepted and checked but one thread does the work.
"""

import ctypes
import math
import struct
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import xxhash

from nexuskv.dataplane.batch import Buffer, Pages, Regions, Segment, SlotTable, Stored
from nexuskv.dataplane.checksum import mix
from nexuskv.dataplane.fallback_memory import (
    Region,
    address_of,
    advise_huge,
    bytes_at,
    copy,
    populate,
    region_of,
    touch,
)
from nexuskv.dataplane.fallback_socket import exchange
from nexuskv.key import KEY_BYTES_MAX, KEY_BYTES_MIN
from nexuskv.types import DESCRIPTOR_BYTES, DESCRIPTOR_FORMAT, PAGE_ALIGN_BYTES, PageStatus

__all__ = [
    "INSTRUCTION_SET",
    "address_of",
    "advise_huge",
    "check",
    "exchange",
    "load",
    "populate",
    "store",
    "touch",
]

INSTRUCTION_SET = "none"
STEP_BYTES: Final = 64 * 1024
THREADS_MAX: Final = 64
NAMESPACE_ID_BYTES_MAX: Final = 64


@dataclass(slots=True)
class _Page:
    """One descriptor, checked against its segment."""

    key: bytes
    size_bytes: int
    address: int
    checksum: int
    generation: int
    offset_bytes: int


def load(
    segment: Segment,
    table: SlotTable,
    pages: Pages,
    into: Sequence[Regions],
    *,
    threads: int = 1,
    deadline_s: float = math.inf,
) -> bytes:
    """See `nexuskv.dataplane.native`."""
    _check_limits(segment, threads, deadline_s)
    _check_table(table)
    found = _read_pages(segment, pages)
    places = [_generation_address(table, at, page) for at, page in enumerate(found)]
    with _holding(found, into, writable=True) as items:
        _check_overlap(segment, items)
        return bytes(
            _load_page(page, place, item, pages.namespace_id, deadline_s)
            for page, place, item in zip(found, places, items, strict=True)
        )


def store(
    segment: Segment,
    pages: Pages,
    from_: Sequence[Regions],
    *,
    threads: int = 1,
    deadline_s: float = math.inf,
) -> tuple[bytes, bytes]:
    """See `nexuskv.dataplane.native`."""
    _check_limits(segment, threads, deadline_s)
    found = _read_pages(segment, pages)
    with _holding(found, from_, writable=False) as items:
        done = [
            _store_page(page, item, pages.namespace_id, deadline_s)
            for page, item in zip(found, items, strict=True)
        ]
    checksums = struct.pack(f"<{len(done)}Q", *(checksum for _, checksum in done))
    return Stored(bytes(status for status, _ in done), checksums)


def check(
    segment: Segment, pages: Pages, *, threads: int = 1, deadline_s: float = math.inf
) -> bytes:
    """See `nexuskv.dataplane.native`."""
    _check_limits(segment, threads, deadline_s)
    found = _read_pages(segment, pages)
    return bytes(_check_page(page, pages.namespace_id, deadline_s) for page in found)


def _load_page(
    page: _Page, place: int, item: list[Region], namespace_id: bytes, deadline_s: float
) -> PageStatus:
    if page.size_bytes == 0:
        return PageStatus.MISS
    if time.monotonic() >= deadline_s:
        return PageStatus.UNAVAILABLE
    copy([Region(page.address, page.size_bytes)], item)
    hashed = xxhash.xxh3_64()
    for region in item:
        hashed.update(bytes_at(region))
    # Read after the copy: a slot given away meanwhile has another generation by now.
    if ctypes.c_uint64.from_address(place).value != page.generation:
        return PageStatus.STALE
    good = hashed.intdigest() ^ mix(namespace_id, page.key) == page.checksum
    return PageStatus.HIT if good else PageStatus.CORRUPT


def _store_page(
    page: _Page, item: list[Region], namespace_id: bytes, deadline_s: float
) -> tuple[PageStatus, int]:
    if page.size_bytes == 0:
        return PageStatus.MISS, 0
    if time.monotonic() >= deadline_s:
        return PageStatus.UNAVAILABLE, 0
    hashed = xxhash.xxh3_64()
    for region in item:
        hashed.update(bytes_at(region))
    copy(item, [Region(page.address, page.size_bytes)])
    return PageStatus.STORED, hashed.intdigest() ^ mix(namespace_id, page.key)


def _check_page(page: _Page, namespace_id: bytes, deadline_s: float) -> PageStatus:
    if page.size_bytes == 0:
        return PageStatus.MISS
    if time.monotonic() >= deadline_s:
        return PageStatus.UNAVAILABLE
    hashed = xxhash.xxh3_64_intdigest(bytes_at(Region(page.address, page.size_bytes)))
    good = hashed ^ mix(namespace_id, page.key) == page.checksum
    return PageStatus.HIT if good else PageStatus.CORRUPT


def _check_limits(segment: Segment, threads: int, deadline_s: float) -> None:
    if not 1 <= threads <= THREADS_MAX or math.isnan(deadline_s):
        raise ValueError("threads are 1-64 and deadline_s is a number")
    if not all(0 <= number < 2**64 for number in segment):
        raise ValueError(f"{segment} does not fit into 64 bits without a sign")
    if not segment.address or segment.address + segment.size_bytes >= 2**64:
        raise ValueError("the segment wraps around the address space")


def _check_table(table: SlotTable) -> None:
    eights = (table.address, table.header_bytes, table.record_bytes, table.generation_offset)
    aligned = not any(n % 8 for n in eights) and table.chunk_bytes % PAGE_ALIGN_BYTES == 0
    in_range = (
        all(0 <= number < 2**64 for number in table)
        and table.address > 0
        and table.address + table.size_bytes < 2**64
        and table.chunk_bytes > 0
        and 0 <= table.generation_offset <= table.record_bytes - 8
        and table.header_bytes <= table.size_bytes
    )
    if not aligned or not in_range:
        raise ValueError("the slot table's geometry is not aligned or in range")


def _read_pages(segment: Segment, pages: Pages) -> list[_Page]:
    descriptors, keys = bytes(memoryview(pages.descriptors)), bytes(memoryview(pages.keys))
    key_bytes = pages.key_bytes
    if len(descriptors) % DESCRIPTOR_BYTES:
        raise ValueError(f"{len(descriptors)} bytes are no whole number of descriptors")
    if not KEY_BYTES_MIN <= key_bytes <= KEY_BYTES_MAX:
        raise ValueError("keys have 8-64 bytes, a namespace id at most 64")
    if len(pages.namespace_id) > NAMESPACE_ID_BYTES_MAX:
        raise ValueError("keys have 8-64 bytes, a namespace id at most 64")
    count = len(descriptors) // DESCRIPTOR_BYTES
    if len(keys) != count * key_bytes:
        raise ValueError(f"{count} descriptors, but {len(keys)} bytes of keys of {key_bytes} each")
    rows = enumerate(DESCRIPTOR_FORMAT.iter_unpack(descriptors))
    return [_read_page(segment, at, row, keys[at * key_bytes :][:key_bytes]) for at, row in rows]


def _read_page(segment: Segment, at: int, row: tuple[int, ...], key: bytes) -> _Page:
    segment_id, size, offset, checksum, generation = row
    if size and segment_id != segment.segment_id:
        raise IndexError(f"descriptor {at} names another segment")
    if size and offset % PAGE_ALIGN_BYTES:
        raise IndexError(f"descriptor {at} has an offset that is not aligned to 4096 bytes")
    if size and offset + size > segment.size_bytes:
        raise IndexError(f"descriptor {at} reaches past the end of the segment")
    return _Page(key, size, segment.address + offset, checksum, generation, offset)


def _generation_address(table: SlotTable, at: int, page: _Page) -> int:
    if page.size_bytes == 0:
        return 0
    slot_bytes = -(-page.size_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
    chunk, inside = divmod(page.offset_bytes, table.chunk_bytes)
    if inside % slot_bytes or inside + slot_bytes > table.chunk_bytes:
        raise IndexError(f"descriptor {at} is at no slot of its chunk")
    slot = chunk * (table.chunk_bytes // PAGE_ALIGN_BYTES) + inside // slot_bytes
    if slot >= (table.size_bytes - table.header_bytes) // table.record_bytes:
        raise IndexError(f"descriptor {at} names a slot past the end of the slot table")
    record = table.address + table.header_bytes + slot * table.record_bytes
    return record + table.generation_offset


@contextmanager
def _holding(
    pages: list[_Page], items: Sequence[Regions], *, writable: bool
) -> Generator[list[list[Region]], None, None]:
    """The regions of each page, their buffers held for as long as the block runs."""
    if len(items) != len(pages):
        raise ValueError(f"{len(pages)} descriptors, but {len(items)} items")
    with ExitStack() as held:
        yield [
            _item_regions(held, at, page, item, writable=writable) if page.size_bytes else []
            for at, (page, item) in enumerate(zip(pages, items, strict=True))
        ]


def _item_regions(
    held: ExitStack, at: int, page: _Page, item: Regions, *, writable: bool
) -> list[Region]:
    parts: Sequence[Buffer] = item if isinstance(item, list | tuple) else (item,)  # type: ignore[assignment,unused-ignore]  # what is no list or tuple is a buffer
    regions = [held.enter_context(region_of(part, writable=writable)) for part in parts]
    total = sum(region.length for region in regions)
    if total != page.size_bytes:
        raise ValueError(f"item {at} has {total} bytes in all, its page {page.size_bytes}")
    return [region for region in regions if region.length]


def _check_overlap(segment: Segment, items: list[list[Region]]) -> None:
    regions = sorted(region for item in items for region in item)
    end = segment.address + segment.size_bytes
    inside = any(r.address < end and segment.address < r.address + r.length for r in regions)
    if inside or any(b.address < a.address + a.length for a, b in pairwise(regions)):
        raise ValueError("destinations overlap each other or the segment")
