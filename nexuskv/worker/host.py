"""The worker's hands on the host tier: takes its memory, hashes its pages, lends its slots.

Holds a mapping of the segment of its own, the same one that clients make, so that a page is checked
the way they see it. Thread-safe, but for `open` and `close`.
"""

import os
from typing import Self

from nexuskv.dataplane import native
from nexuskv.dataplane.batch import Pages, Segment
from nexuskv.dataplane.shm import SegmentMap, SegmentSpec
from nexuskv.errors import OutOfSpace, TransferFailed, translating
from nexuskv.tiers.populate import advise_huge, allocate
from nexuskv.types import Descriptor, PageStatus
from nexuskv.worker.codec import WorkerSettings

_SEGMENT_ID = 0  # control has one host segment


class HostMemory:
    """One host segment, mapped for reading and writing. `close` is idempotent."""

    def __init__(self, segment: SegmentMap, fd: int, *, huge_pages: bool) -> None:
        """Use `open`."""
        self._segment = segment
        self._fd = fd
        self._huge_pages = huge_pages

    @classmethod
    def open(cls, settings: WorkerSettings) -> Self:
        """Map the segment that the settings describe.

        Raises:
            Unavailable: a file cannot be opened or mapped.
            ProtocolError: a file is not what the settings say.
        """
        spec = SegmentSpec(
            segment_id=_SEGMENT_ID,
            data_path=settings.data_path,
            table_path=settings.table_path,
            capacity_bytes=settings.capacity_bytes,
            chunk_bytes=settings.chunk_bytes,
            header_bytes=settings.header_bytes,
            record_bytes=settings.record_bytes,
            generation_offset=settings.generation_offset,
            table_bytes=settings.table_bytes,
        )
        with translating({OSError: TransferFailed}):
            fd = os.open(settings.data_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            segment = SegmentMap.open(spec, writable=True)
        except BaseException:
            os.close(fd)
            raise
        return cls(segment, fd, huge_pages=settings.huge_pages)

    @property
    def native(self) -> str:
        """Which copying code is in use."""
        return native.NAME

    def populate_chunk(self, chunk_index: int) -> None:
        """Reserve one chunk's memory; may take seconds, without the GIL.

        Raises:
            OutOfSpace: the filesystem is full, or there is no such chunk.
        """
        chunk_bytes = self._segment.spec.chunk_bytes
        start = chunk_index * chunk_bytes
        if start + chunk_bytes > self._segment.spec.capacity_bytes:
            raise OutOfSpace(f"there is no chunk {chunk_index}")
        if self._huge_pages:
            advise_huge(self._fd, start, chunk_bytes)
        allocate(self._fd, start, chunk_bytes)

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

    def check_landed(
        self, offset_bytes: int, size_bytes: int, checksum: int, namespace_id: bytes, key: bytes
    ) -> PageStatus:
        """Hash a page that was just read into a slot: HIT or CORRUPT. Errors as `check_page`."""
        descriptor = Descriptor(_SEGMENT_ID, offset_bytes, size_bytes, checksum, 0)
        pages = Pages(descriptor.encode(), key, len(key), namespace_id)
        return PageStatus(self._segment.check(pages)[0])

    def check_apart(
        self, data: memoryview, checksum: int, namespace_id: bytes, key: bytes
    ) -> PageStatus:
        """Hash a page that lies in other memory, page aligned: HIT or CORRUPT."""
        segment = Segment(_SEGMENT_ID, native.address_of(data), data.nbytes)
        descriptor = Descriptor(_SEGMENT_ID, 0, data.nbytes, checksum, 0)
        pages = Pages(descriptor.encode(), key, len(key), namespace_id)
        return PageStatus(native.check(segment, pages)[0])

    def slot(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """The slot that starts at an offset, writable, as long as its page rounded up to 4096.

        Raises:
            ProtocolError: it leaves the segment.
            TransferFailed: closed.
        """
        return self._segment.slot(offset_bytes, size_bytes)

    def close(self) -> None:
        """Unmap the segment."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._segment.close()
