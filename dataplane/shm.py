"""The shared-memory transport: a client's mapping of one segment and of its slot table.

Owns the two mappings and one thread that fills the page tables of a chunk when a descriptor first
names it; no copy ever waits for that thread. Invariants: never maps past a file's end (that would
be a SIGBUS later), never unmaps memory that a view or a running copy still uses. Thread-safe.
"""

import math
import mmap
import os
import stat
import struct
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Final, Self

from nexuskv.dataplane import native
from nexuskv.dataplane.batch import Pages, Regions, Segment, SlotTable, Stored
from nexuskv.dataplane.population import Populator
from nexuskv.errors import (
    SHORTAGE,
    ConfigError,
    NexusError,
    OutOfSpace,
    ProtocolError,
    TransferFailed,
    translating,
)
from nexuskv.types import DESCRIPTOR_BYTES, DESCRIPTOR_FORMAT, PAGE_ALIGN_BYTES, Descriptor

_GENERATION: Final = struct.Struct("=Q")
_BATCH_ERRORS: Final[dict[type[BaseException], type[NexusError]]] = {
    IndexError: ProtocolError,
    ValueError: ConfigError,
    BufferError: ConfigError,
    TypeError: ConfigError,
    OSError: TransferFailed,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSpec:
    """Where a segment and its slot table lie and how they are cut; the daemon tells it at hello."""

    segment_id: int
    data_path: str
    table_path: str
    capacity_bytes: int
    chunk_bytes: int
    header_bytes: int
    record_bytes: int
    generation_offset: int
    table_bytes: int
    incarnation: bytes = b""  # of the daemon that described it


class SegmentMap:
    """One mapped segment. A `Transport` for pages on this machine; also lends read-only views."""

    name: ClassVar[str] = "shm"

    def __init__(self, spec: SegmentSpec, data: mmap.mmap, table: mmap.mmap, *, writable: bool):
        """Use `open`."""
        self.spec = spec
        self.writable = writable
        self._lock = threading.Lock()
        self._data: mmap.mmap | None = data
        self._table: mmap.mmap | None = table
        self._segment = Segment(spec.segment_id, native.address_of(data), len(data))
        self._slots = SlotTable(
            native.address_of(table),
            len(table),
            spec.chunk_bytes,
            spec.header_bytes,
            spec.record_bytes,
            spec.generation_offset,
        )
        self._populator = Populator(self._segment, data, spec.chunk_bytes, write=writable)

    @classmethod
    def open(cls, spec: SegmentSpec, *, writable: bool) -> Self:
        """Map the segment, for writing if `writable`, and its slot table for reading.

        Raises:
            TransferFailed: a file is missing or may not be opened.
            OutOfSpace: this process can open or map no more.
            ProtocolError: a file is no regular file or not as large as `spec` says.
        """
        with _saying_what_failed():
            data = _map(spec.data_path, spec.capacity_bytes, writable=writable)
            try:
                table = _map(spec.table_path, spec.table_bytes, writable=False)
            except BaseException:
                data.close()
                raise
        return cls(spec, data, table, writable=writable)

    def load(
        self,
        pages: Pages,
        into: Sequence[Regions],
        *,
        deadline_s: float = math.inf,
        threads: int = 1,
    ) -> bytes:
        """Copy pages into the caller's memory; see `native.load`. One status byte a page.

        Raises:
            ConfigError: an item of `into` does not fit its page; nothing was copied.
            ProtocolError: a descriptor leaves the segment; nothing was copied.
            TransferFailed: closed.
        """
        with self._in_use(), translating(_BATCH_ERRORS):
            self._populator.want(pages.descriptors)
            return native.load(
                self._segment, self._slots, pages, into, threads=threads, deadline_s=deadline_s
            )

    def store(
        self,
        pages: Pages,
        from_: Sequence[Regions],
        *,
        deadline_s: float = math.inf,
        threads: int = 1,
    ) -> Stored:
        """Hash the caller's memory and copy it into slots; see `native.store`. Errors as `load`."""
        if not self.writable:
            raise ConfigError(f"segment {self.spec.segment_id} is mapped for reading only")
        with self._in_use(), translating(_BATCH_ERRORS):
            self._populator.want(pages.descriptors)
            return Stored(
                *native.store(self._segment, pages, from_, threads=threads, deadline_s=deadline_s)
            )

    def check(self, pages: Pages, *, deadline_s: float = math.inf, threads: int = 1) -> bytes:
        """Hash pages where they lie; see `native.check`. Errors as `load`."""
        with self._in_use(), translating(_BATCH_ERRORS):
            return native.check(self._segment, pages, threads=threads, deadline_s=deadline_s)

    def page_view(self, descriptor: Descriptor) -> memoryview:
        """The page's bytes in place, read-only and unchecked. Keeps the mapping alive.

        Raises:
            ProtocolError: the descriptor leaves the segment.
            TransferFailed: closed.
        """
        start, end = descriptor.offset_bytes, descriptor.offset_bytes + descriptor.size_bytes
        if descriptor.segment_id != self.spec.segment_id or end > self._segment.size_bytes:
            raise ProtocolError(f"{descriptor} is not in segment {self.spec.segment_id}")
        with self._in_use() as (data, _):
            return memoryview(data)[start:end].toreadonly()

    def slot(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """The bytes of the slot at an offset, its size rounded up to `PAGE_ALIGN_BYTES`.

        Writable where the segment is mapped so: for whoever fills slots from elsewhere.

        Raises:
            ProtocolError: it is no slot of the segment.
            TransferFailed: closed.
        """
        end = offset_bytes + -(-size_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
        if offset_bytes % PAGE_ALIGN_BYTES or end > self._segment.size_bytes:
            raise ProtocolError(f"{size_bytes} bytes at {offset_bytes} are no slot of the segment")
        with self._in_use() as (data, _):
            return memoryview(data)[offset_bytes:end]

    def generation(self, descriptor: Descriptor) -> int:
        """The generation that the descriptor's slot has now.

        Raises:
            ProtocolError: the descriptor names no slot of the table.
            TransferFailed: closed.
        """
        if descriptor.segment_id != self.spec.segment_id:
            raise ProtocolError(f"{descriptor} is not in segment {self.spec.segment_id}")
        record = _record_offset(self._slots, descriptor)
        with self._in_use() as (_, table):
            (now,) = struct.unpack_from("=Q", table, record + self._slots.generation_offset)
            return int(now)

    def page_views(self, descriptors: bytes) -> list[memoryview | None]:
        """`page_view` of many pages; None where a descriptor names none. Errors the same."""
        views: list[memoryview | None] = []
        segment_id, end = self._segment.segment_id, self._segment.size_bytes
        with self._in_use() as (data, _):
            whole = memoryview(data).toreadonly()
            for segment, size, offset, _sum, _generation in DESCRIPTOR_FORMAT.iter_unpack(
                descriptors
            ):
                if size and (segment != segment_id or offset + size > end):
                    raise ProtocolError(f"{size} bytes at {offset} are not in segment {segment_id}")
                views.append(whole[offset : offset + size] if size else None)
        return views

    def unchanged(self, descriptors: bytes) -> bool:
        """Whether every slot named has its descriptor's generation still. Errors: `generation`."""
        at = self._slots.generation_offset
        with self._in_use() as (_, table):
            for raw in _split(descriptors):
                descriptor = Descriptor.decode(raw)
                if descriptor.size_bytes:
                    record = _record_offset(self._slots, descriptor)
                    if _GENERATION.unpack_from(table, record + at)[0] != descriptor.generation:
                        return False
        return True

    def wait_populated(self, timeout_s: float) -> bool:
        """Whether every chunk named so far has its page tables filled within `timeout_s`."""
        return self._populator.wait_idle(timeout_s)

    def close(self) -> None:
        """Stop the thread and unmap. Idempotent; memory in use is unmapped by its last user."""
        with self._lock:
            data, self._data = self._data, None
            table, self._table = self._table, None
        self._populator.close()
        for mapping in (data, table):
            if mapping is not None:
                _unmap(mapping)

    @contextmanager
    def _in_use(self) -> Generator[tuple[memoryview, memoryview], None, None]:
        """Both mappings, held: a `close` meanwhile leaves them mapped until the block ends."""
        with self._lock:
            if self._data is None or self._table is None:
                raise TransferFailed(f"segment {self.spec.segment_id} is closed")
            data, table = memoryview(self._data), memoryview(self._table)
        with data, table:
            yield data, table

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _saying_what_failed() -> Generator[None]:
    try:
        yield
    except OSError as exc:
        kind = OutOfSpace if exc.errno in SHORTAGE else TransferFailed
        raise kind(str(exc)) from exc


def _map(path: str, size_bytes: int, *, writable: bool) -> mmap.mmap:
    access = os.O_RDWR if writable else os.O_RDONLY
    fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ProtocolError(f"{path} is no regular file")
        if size_bytes <= 0 or found.st_size < size_bytes:
            raise ProtocolError(f"{path} has {found.st_size} bytes, {size_bytes} were announced")
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=prot)
    finally:
        os.close(fd)


def _unmap(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:
        return  # a view or a copy still uses it; the last reference that goes unmaps it


def _split(descriptors: bytes) -> list[bytes]:
    starts = range(0, len(descriptors), DESCRIPTOR_BYTES)
    return [descriptors[start : start + DESCRIPTOR_BYTES] for start in starts]


def _record_offset(slots: SlotTable, descriptor: Descriptor) -> int:
    slot_bytes = -(-descriptor.size_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
    chunk, inside = divmod(descriptor.offset_bytes, slots.chunk_bytes)
    if not slot_bytes or inside % slot_bytes:
        raise ProtocolError(f"{descriptor} is at no slot of its chunk")
    slot = chunk * (slots.chunk_bytes // PAGE_ALIGN_BYTES) + inside // slot_bytes
    record = slots.header_bytes + slot * slots.record_bytes
    if record + slots.record_bytes > slots.size_bytes:
        raise ProtocolError(f"{descriptor} names a slot past the end of the slot table")
    return record
