"""The records a batch of pages is described by, for the native module and for its twin.

Plain data. Addresses are numbers: whoever makes a `Segment` or `SlotTable` keeps the mapping alive
while a call uses it (`nexuskv.dataplane.shm` does).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer  # of collections.abc from Python 3.12 on
else:
    Buffer = object

Regions: TypeAlias = Buffer | Sequence[Buffer]
"""Memory of one page: one buffer, or several that follow each other as one stream."""


class Segment(NamedTuple):
    """A mapped segment: `size_bytes` from `address` on."""

    segment_id: int
    address: int
    size_bytes: int


class SlotTable(NamedTuple):
    """A mapped slot table, and how a slot's generation is found in it.

    A slot is its page's size rounded up to 4096 bytes. Chunk `c` has records
    `c * (chunk_bytes // 4096)` and following; the record of a slot is that plus the slot's index in
    its chunk, `record_bytes` each, behind `header_bytes`. The generation is the little-endian u64
    at `generation_offset` of the record.
    """

    address: int
    size_bytes: int
    chunk_bytes: int
    header_bytes: int
    record_bytes: int
    generation_offset: int


class Pages(NamedTuple):
    """Which pages: n descriptors of 32 bytes joined, n keys of `key_bytes` joined, one namespace.

    A descriptor of size 0 names no page; its place in every result is MISS, its checksum 0.
    """

    descriptors: Buffer
    keys: Buffer
    key_bytes: int
    namespace_id: bytes


class Stored(NamedTuple):
    """What a store did: one status byte a page, and one little-endian u64 checksum a page."""

    statuses: bytes
    checksums: bytes
