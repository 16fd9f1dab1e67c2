"""The worker's hands on the host tier: introduces the tier's memory to the data plane.

Holds its own mapping of the segment, the same one that clients make, so that a page is checked the
way they see it. Worker thread, but for `open` and `close`.
"""

from typing import Self

from nexuskv.dataplane import native
from nexuskv.dataplane.batch import Pages
from nexuskv.dataplane.shm import SegmentMap, SegmentSpec
from nexuskv.tiers.host import HostTier
from nexuskv.types import Descriptor, PageStatus


class HostTools:
    """`WorkerTools` for one host tier. `close` is idempotent; the tier stays its owner's."""

    def __init__(self, tier: HostTier, segment: SegmentMap) -> None:
        """Use `open`."""
        self._tier = tier
        self._segment = segment

    @classmethod
    def open(cls, tier: HostTier) -> Self:
        """Map the tier's segment for reading.

        Raises:
            Unavailable: a file cannot be mapped.
        """
        (row,) = tier.segments()
        spec = SegmentSpec(
            segment_id=row.segment_id,
            data_path=row.data_path,
            table_path=row.table_path,
            capacity_bytes=row.capacity_bytes,
            chunk_bytes=row.chunk_bytes,
            header_bytes=row.header_bytes,
            record_bytes=row.record_bytes,
            generation_offset=row.generation_offset,
            table_bytes=row.table_bytes,
        )
        return cls(tier, SegmentMap.open(spec, writable=False))

    @property
    def native(self) -> str:
        """Which copying code is in use."""
        return native.NAME

    def populate_chunk(self, chunk_index: int) -> None:
        """Reserve one chunk's memory.

        Raises:
            OutOfSpace: the filesystem is full.
        """
        self._tier.populate_chunk(chunk_index)

    def check_page(self, descriptor: bytes, namespace_id: bytes, key: bytes) -> PageStatus:
        """Hash a page where it lies: HIT, CORRUPT, or STALE when its slot changed owner.

        Raises:
            ProtocolError: the descriptor leaves the segment.
            TransferFailed: closed.
        """
        found = self._segment.check(Pages(descriptor, key, len(key), namespace_id))
        wanted = Descriptor.decode(descriptor)
        # Read after the hash: a slot given away meanwhile has another generation by now.
        if self._segment.generation(wanted) != wanted.generation:
            return PageStatus.STALE
        return PageStatus(found[0])

    def close(self) -> None:
        """Unmap the segment."""
        self._segment.close()
