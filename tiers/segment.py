"""One segment's two files: page bytes in `data-…`, slot records in `table-…`.

Both are sparse. They may grow at a later start, but are never truncated, only unlinked: a client
may map them long after the daemon has gone. A later daemon adopts them when their header is sound.
The table starts with `HEADER_BYTES` that describe the
geometry and identify the segment, then one record for every slot id.

Control thread, but for `populate`, which any thread may call at any time, also during `close`.
"""

import errno
import mmap
import os
import stat
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import xxhash

from nexuskv.errors import ConfigError, OutOfSpace
from nexuskv.tiers.folder import DATA_PREFIX, TABLE_PREFIX
from nexuskv.tiers.populate import Allocate, advise_huge, allocate, give_back
from nexuskv.tiers.record import (
    FORMAT_VERSION,
    GENERATION_OFFSET,
    RECORD_BYTES,
    RECORD_DTYPE,
    Batch,
    SlotState,
)

MAGIC: Final = b"NEXUSKV\0"
HEADER_BYTES: Final = 4096
SLOT_ALIGN_BYTES: Final = 4096
INCARNATION_BYTES: Final = 8
INSTANCE_ID_BYTES: Final = 16
HOST_SEGMENT_ID: Final = 0
ABSENT: Final = 0xFFFF_FFFF
"""The slot id that stands for no slot."""

MEMORY_OFFSET: Final = 1024
"""Where the table file notes which chunks have memory, one bit each, up to the first record."""

_CHUNKS_NOTED: Final = 8 * (HEADER_BYTES - MEMORY_OFFSET)

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
    """The two open files and the daemon's mapping of the table. Made by `create` or `adopt`.

    `records` has one record for each slot id. Only rows in regions that `reserve_records`
    covered may be touched: beyond them lie holes. `adopted` says whether an earlier run made it.
    """

    def __init__(self, files: "SegmentFiles", header: TableHeader, *, allocate: Allocate) -> None:
        """Use `create` or `adopt`. Writes the header, then maps the table."""
        self.header = header
        self.data_path = files.data_path
        self.table_path = files.table_path
        self.adopted = files.header is not None
        self._allocate = allocate
        self._guard = threading.Lock()  # between close() here and populate() on another thread
        self._fds = [files.data_fd, files.table_fd]
        self._data_fd, self._table_fd = self._fds
        # Written by one call into one page: whoever is killed leaves the old header or the new.
        os.pwrite(self._table_fd, header.encode(), 0)
        self._map = mmap.mmap(self._table_fd, header.table_bytes)
        self._records: Batch | None = np.frombuffer(
            self._map, dtype=RECORD_DTYPE, offset=HEADER_BYTES
        )

    @classmethod
    def create(
        cls, folder: Path, header: TableHeader, *, allocate: Allocate = allocate
    ) -> "Segment":
        """Make both files. They must not exist.

        Raises:
            ConfigError: a file exists or cannot be made.
        """
        name = header.incarnation[:4].hex()
        paths = folder / f"{DATA_PREFIX}{name}", folder / f"{TABLE_PREFIX}{name}"
        sizes = header.capacity_bytes, header.table_bytes
        fds: list[int] = []
        try:
            for path, size_bytes in zip(paths, sizes, strict=True):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fds.append(os.open(path, flags, 0o600))
                os.ftruncate(fds[-1], size_bytes)
            allocate(fds[1], 0, HEADER_BYTES)
            return cls(SegmentFiles(*paths, fds[0], fds[1], None), header, allocate=allocate)
        except (OSError, OutOfSpace) as exc:
            for fd, path in zip(fds, paths, strict=False):
                os.close(fd)
                path.unlink(missing_ok=True)
            raise ConfigError(f"cannot make a segment in {folder}: {exc}") from exc

    @classmethod
    def adopt(
        cls, files: "SegmentFiles", wanted: TableHeader, *, allocate: Allocate = allocate
    ) -> "Segment":
        """Take over the files of an earlier run, in the capacity and for the run of `wanted`.

        Raises:
            ConfigError: they cannot be grown or mapped; they are closed then.
        """
        assert files.header is not None
        header = replace(wanted, instance_id=files.header.instance_id)
        try:
            for fd, size_bytes in (
                (files.data_fd, header.capacity_bytes),
                (files.table_fd, header.table_bytes),
            ):
                if os.fstat(fd).st_size < size_bytes:
                    os.ftruncate(fd, size_bytes)
            return cls(files, header, allocate=allocate)
        except OSError as exc:
            files.close()
            raise ConfigError(f"cannot adopt the segment {files.data_path}: {exc}") from exc

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
        """Return populated chunks, which no descriptor may ever have named, to the filesystem.

        Raises:
            OutOfSpace: the filesystem cannot do that.
        """
        first, count = offset_bytes // self.header.chunk_bytes, length_bytes
        for chunk_index in range(first, first + count // self.header.chunk_bytes):
            self.note_memory(chunk_index, has=False)
        give_back(self._data_fd, offset_bytes, length_bytes)

    def rows_on_record(self) -> list[tuple[int, int]]:
        """Stretches of slot ids, [first, end), ascending, in which records may have been written.

        Asks the filesystem where the table has data, so it costs little however large the table.
        """
        found: list[tuple[int, int]] = []
        for start, end in _data_extents(self._table_fd, HEADER_BYTES, self.header.table_bytes):
            first = (start - HEADER_BYTES) // RECORD_BYTES
            found.append((first, -(-(end - HEADER_BYTES) // RECORD_BYTES)))
        return found

    def forget_surplus_pages(self) -> None:
        """Zero the records of committed pages above the capacity: no later run may find them.

        Records of slots that may still be written stay, for a run that raises the capacity again.
        """
        surplus_bytes = os.fstat(self._table_fd).st_size
        for start, end in _data_extents(self._table_fd, self.header.table_bytes, surplus_bytes):
            skipped = start % mmap.PAGESIZE
            length = end - start + skipped
            with mmap.mmap(self._table_fd, length, offset=start - skipped) as mapped:
                rows = np.frombuffer(mapped, dtype=RECORD_DTYPE, offset=skipped)
                rows[rows["state"] == SlotState.READY.value] = np.zeros(1, dtype=RECORD_DTYPE)
                del rows

    @property
    def has_surplus(self) -> bool:
        """Whether memory lies above the capacity, left by a run with a larger one."""
        return any(True for _ in self._surplus())

    def give_back_surplus(self) -> None:
        """Return memory above the capacity. Only when no process of an earlier run maps it.

        Raises:
            OutOfSpace: the filesystem cannot do that.
        """
        count = self.header.capacity_bytes // self.header.chunk_bytes
        for chunk_index in range(count, _CHUNKS_NOTED):
            self.note_memory(chunk_index, has=False)
        for fd, start, end in self._surplus():
            give_back(fd, start, end - start)

    def _surplus(self) -> Iterator[tuple[int, int, int]]:
        # Records first: a record says that its chunk has memory.
        for fd, start in (
            (self._table_fd, self.header.table_bytes),
            (self._data_fd, self.header.capacity_bytes),
        ):
            found = os.fstat(fd)
            # Reserved but untouched memory does not count as data, so the blocks must tell.
            if found.st_size > start and found.st_blocks:
                yield fd, start, found.st_size

    def note_memory(self, chunk_index: int, *, has: bool) -> None:
        """Note for a later run whether a chunk has memory: the filesystem would not tell.

        Memory that nobody has touched looks like a hole to whoever asks for data.
        """
        if chunk_index < _CHUNKS_NOTED:
            at, bit = MEMORY_OFFSET + chunk_index // 8, 1 << chunk_index % 8
            self._map[at] = self._map[at] | bit if has else self._map[at] & ~bit

    def chunks_with_memory(self) -> list[int]:
        """Chunks within the capacity that an earlier run noted; none where that cannot be true."""
        bits = np.frombuffer(self._map[MEMORY_OFFSET:HEADER_BYTES], dtype=np.uint8)
        noted: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        if os.fstat(self._data_fd).st_blocks * 512 < len(noted) * self.header.chunk_bytes:
            return []
        count = self.header.capacity_bytes // self.header.chunk_bytes
        return [chunk_index for chunk_index in noted if chunk_index < count]

    def close(self, *, unlink: bool) -> None:
        """Unmap and close, and with `unlink` remove both files. Idempotent."""
        self._records = None
        self._map.close()
        with self._guard:
            while self._fds:
                os.close(self._fds.pop())
        if unlink:
            self.data_path.unlink(missing_ok=True)
            self.table_path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class SegmentFiles:
    """A pair of open segment files; `header` is what their table said, None for new ones."""

    data_path: Path
    table_path: Path
    data_fd: int
    table_fd: int
    header: TableHeader | None

    def close(self) -> None:
        """Close both."""
        os.close(self.data_fd)
        os.close(self.table_fd)


def open_segment(table_path: Path, chunk_bytes: int) -> SegmentFiles | str:
    """Open what an earlier run left, if it can be adopted.

    Returns:
        The files, or why they cannot be adopted.
    """
    data_path = table_path.with_name(DATA_PREFIX + table_path.name.removeprefix(TABLE_PREFIX))
    fds: list[int] = []
    try:
        for path in (data_path, table_path):
            fds.append(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        header = TableHeader.decode(os.pread(fds[1], HEADER_BYTES, 0))
        reason = _why_not(header, [os.fstat(fd) for fd in fds], chunk_bytes)
    except OSError as exc:
        header, reason = None, str(exc)
    if header is None or reason:
        for fd in fds:
            os.close(fd)
        return reason
    return SegmentFiles(data_path, table_path, fds[0], fds[1], header)


def _why_not(header: TableHeader | None, found: list[os.stat_result], chunk_bytes: int) -> str:
    """Why files with this header cannot be adopted; empty when they can."""
    if header is None:
        return "its header is damaged, or of another program or version"
    if header.chunk_bytes != chunk_bytes:
        return f"it has chunks of {header.chunk_bytes} bytes, now {chunk_bytes} (chunk_bytes)"
    chunk_count, rest = divmod(header.capacity_bytes, chunk_bytes)
    slot_count = chunk_count * (chunk_bytes // SLOT_ALIGN_BYTES)
    if rest or header.table_bytes != HEADER_BYTES + slot_count * RECORD_BYTES:
        return "its header contradicts itself"
    for each, least_bytes in zip(found, (header.capacity_bytes, header.table_bytes), strict=True):
        if not stat.S_ISREG(each.st_mode) or each.st_uid != os.geteuid():
            return "a file of it is no regular file of this user"
        if each.st_size < least_bytes:
            return f"a file of it has {each.st_size} bytes, its header says {least_bytes}"
    return ""


def _data_extents(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where a file has data between two offsets, as (start, end)."""
    at = start
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                return
            raise
        if at >= end:
            return
        hole = min(end, os.lseek(fd, at, os.SEEK_HOLE))
        yield at, hole
        at = hole


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
