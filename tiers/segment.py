"""One segment's two files: page bytes in `data-…`, slot records in `table-…`.

Both are sparse and sized once, at creation. They are never truncated, only unlinked: a client may
map them long after the daemon has gone. The table starts with `HEADER_BYTES` that describe the
geometry and identify the segment, then one record for every slot id.

Control thread, but for `populate`, which any thread may call at any time, also during `close`.
"""

import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import xxhash

from nexuskv.errors import ConfigError, OutOfSpace
from nexuskv.tiers.populate import Allocate, advise_huge, allocate, give_back
from nexuskv.tiers.record import (
    FORMAT_VERSION,
    GENERATION_OFFSET,
    RECORD_BYTES,
    RECORD_DTYPE,
    Batch,
)

MAGIC: Final = b"NEXUSKV\0"
HEADER_BYTES: Final = 4096
SLOT_ALIGN_BYTES: Final = 4096
INCARNATION_BYTES: Final = 8
INSTANCE_ID_BYTES: Final = 16
HOST_SEGMENT_ID: Final = 0
ABSENT: Final = 0xFFFF_FFFF
"""The slot id that stands for no slot."""

_HEADER: Final = struct.Struct("<8sIIIIIIQQQ8s16s")


@dataclass(frozen=True, slots=True)
class TableHeader:
    """What the first bytes of a table file say."""

    capacity_bytes: int  # of the data file
    chunk_bytes: int
    table_bytes: int  # of the table file, header included
    incarnation: bytes  # of the daemon that made it
    instance_id: bytes  # of this segment alone

    def encode(self) -> bytes:
        """The header with its own checksum, shorter than `HEADER_BYTES`; zeros follow."""
        raw = _HEADER.pack(
            MAGIC, FORMAT_VERSION, HEADER_BYTES, RECORD_BYTES, SLOT_ALIGN_BYTES, GENERATION_OFFSET,
            HOST_SEGMENT_ID, self.capacity_bytes, self.chunk_bytes, self.table_bytes,
            self.incarnation, self.instance_id,
        )  # fmt: skip
        return raw + xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")

    @classmethod
    def decode(cls, raw: bytes) -> "TableHeader | None":
        """Read a header; None when it is torn, foreign, or of another version or geometry."""
        body, own = raw[: _HEADER.size], raw[_HEADER.size : _HEADER.size + 8]
        if len(own) != 8 or int.from_bytes(own, "little") != xxhash.xxh3_64_intdigest(body):
            return None
        magic, *fixed, capacity, chunk, table, incarnation, instance = _HEADER.unpack(body)
        if magic != MAGIC or fixed[:-1] != [
            FORMAT_VERSION, HEADER_BYTES, RECORD_BYTES, SLOT_ALIGN_BYTES, GENERATION_OFFSET,
        ]:  # fmt: skip
            return None
        return cls(capacity, chunk, table, incarnation, instance)


class SegmentRow(NamedTuple):
    """What a reader must know to map a segment; the fields of docs/protocol.md, in its order."""

    segment_id: int
    data_path: str
    table_path: str
    capacity_bytes: int
    chunk_bytes: int
    table_bytes: int
    header_bytes: int
    record_bytes: int
    generation_offset: int
    instance_id: bytes


class Segment:
    """The two open files and the daemon's mapping of the table.

    `records` has one record for each slot id. Only rows in regions that `reserve_records`
    covered may be touched: beyond them lie holes.
    """

    def __init__(self, folder: Path, header: TableHeader, *, allocate: Allocate = allocate) -> None:
        """Create both files. They must not exist.

        Raises:
            ConfigError: a file exists or cannot be made.
        """
        name = header.incarnation[:4].hex()
        self.header = header
        self.data_path = folder / f"data-{name}"
        self.table_path = folder / f"table-{name}"
        self._allocate = allocate
        self._guard = threading.Lock()  # between close() here and populate() on another thread
        self._fds: list[int] = []
        try:
            self._data_fd = self._create(self.data_path, header.capacity_bytes)
            self._table_fd = self._create(self.table_path, header.table_bytes)
            self._allocate(self._table_fd, 0, HEADER_BYTES)
            os.pwrite(self._table_fd, header.encode(), 0)
            self._map = mmap.mmap(self._table_fd, header.table_bytes)
        except (OSError, OutOfSpace) as exc:
            self._close_files()
            self._unlink()
            raise ConfigError(f"cannot make a segment in {folder}: {exc}") from exc
        self._records: Batch | None = np.frombuffer(
            self._map, dtype=RECORD_DTYPE, offset=HEADER_BYTES
        )

    @property
    def records(self) -> Batch:
        """The record table, shape (slots,), shared with every client's read-only mapping."""
        assert self._records is not None, "the segment is closed"
        return self._records

    def row(self) -> SegmentRow:
        """What readers must know."""
        return SegmentRow(
            segment_id=HOST_SEGMENT_ID,
            data_path=str(self.data_path),
            table_path=str(self.table_path),
            capacity_bytes=self.header.capacity_bytes,
            chunk_bytes=self.header.chunk_bytes,
            table_bytes=self.header.table_bytes,
            header_bytes=HEADER_BYTES,
            record_bytes=RECORD_BYTES,
            generation_offset=GENERATION_OFFSET,
            instance_id=self.header.instance_id,
        )

    def reserve_records(self, first_slot: int, count: int) -> None:
        """Make the records of `count` slots safe to touch, here and through clients' mappings.

        Raises:
            OutOfSpace: the filesystem is full.
        """
        start = HEADER_BYTES + first_slot * RECORD_BYTES
        start -= start % mmap.PAGESIZE
        end = HEADER_BYTES + (first_slot + count) * RECORD_BYTES
        self._allocate(self._table_fd, start, end - start)

    def populate(self, offset_bytes: int, length_bytes: int, *, huge_pages: bool) -> None:
        """Reserve a region of the data file. Any thread; may take seconds.

        Raises:
            OutOfSpace: the filesystem is full, or the segment is closed.
        """
        with self._guard:
            if not self._fds:
                raise OutOfSpace(f"{self.data_path} is closed")
            fd = os.dup(self._data_fd)  # Ours until done, whatever close() does meanwhile.
        try:
            if huge_pages:
                advise_huge(fd, offset_bytes, length_bytes)
            self._allocate(fd, offset_bytes, length_bytes)
        finally:
            os.close(fd)

    def give_back(self, offset_bytes: int, length_bytes: int) -> None:
        """Return a populated region, which no descriptor may ever have named, to the filesystem.

        Raises:
            OutOfSpace: the filesystem cannot do that.
        """
        give_back(self._data_fd, offset_bytes, length_bytes)

    def close(self, *, unlink: bool) -> None:
        """Unmap and close, and with `unlink` remove both files. Idempotent."""
        self._records = None
        self._map.close()
        with self._guard:
            self._close_files()
        if unlink:
            self._unlink()

    def _create(self, path: Path, size_bytes: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        self._fds.append(fd)
        os.ftruncate(fd, size_bytes)
        return fd

    def _close_files(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _unlink(self) -> None:
        self.data_path.unlink(missing_ok=True)
        self.table_path.unlink(missing_ok=True)


def plan_segment(
    folder: Path, capacity_bytes: int, chunk_bytes: int, incarnation: bytes
) -> TableHeader:
    """The header of a new segment, its capacity rounded down to whole chunks.

    Raises:
        ConfigError: a size is wrong, or there are more slots than slot ids.
    """
    if chunk_bytes <= 0 or chunk_bytes % SLOT_ALIGN_BYTES:
        raise ConfigError(f"chunk_bytes {chunk_bytes} is not a multiple of {SLOT_ALIGN_BYTES}")
    chunk_count = capacity_bytes // chunk_bytes
    slot_count = chunk_count * (chunk_bytes // SLOT_ALIGN_BYTES)
    if chunk_count < 1 or slot_count >= ABSENT:
        raise ConfigError(
            f"host memory of {capacity_bytes} bytes is not between one chunk of {chunk_bytes} "
            f"bytes and {ABSENT} slots of {SLOT_ALIGN_BYTES} bytes"
        )
    if len(incarnation) != INCARNATION_BYTES:
        raise ConfigError(f"an incarnation has {INCARNATION_BYTES} bytes, got {len(incarnation)}")
    return TableHeader(
        capacity_bytes=chunk_count * chunk_bytes,
        chunk_bytes=chunk_bytes,
        table_bytes=HEADER_BYTES + slot_count * RECORD_BYTES,
        incarnation=incarnation,
        # An incarnation is random, so this names one segment; the folder tells machines' apart.
        instance_id=xxhash.xxh3_128_digest(incarnation + str(folder.absolute()).encode()),
    )
