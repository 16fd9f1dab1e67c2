"""The durable table of namespaces: which records and epochs an instance's host pages belong to.

One file beside the segment: a header, then rows that are only ever appended; of two rows with one
id the later holds. The header says how many bytes of rows hold and is written after them, so a
daemon killed in between leaves bytes that nobody reads. Everything the header covers must be sound:
a row lost from its middle or end could take a `clear` with it, so a damaged table is no table, and
the pages that it named are misses.

Invariant: what `save` returned from is found by the next `open`, whatever process is killed.
Control thread only.
"""

import logging
import os
import struct
from pathlib import Path
from typing import Final, NamedTuple, Self

import xxhash

from nexuskv.errors import ConfigError, OutOfSpace, translating
from nexuskv.tiers.folder import NAMESPACES_NAME
from nexuskv.tiers.record import NAMESPACE_ID_BYTES

_LOG = logging.getLogger("nexuskv.tiers")

MAGIC: Final = b"NEXUSKVN"
FORMAT_VERSION: Final = 0
HEADER: Final = struct.Struct("<8sIIQ")  # magic, version, header bytes, bytes of rows; then a hash
HEADER_BYTES: Final = 64
ROW: Final = struct.Struct(f"<QQI4x{NAMESPACE_ID_BYTES}s")  # own hash, epoch, record bytes, id

_RESERVE_BYTES: Final = 64 * 1024  # kept ahead, so that a full filesystem refuses no `clear`
_STALE_ROWS: Final = 256  # rows that no longer hold, before the file is written anew


class NamespaceRow(NamedTuple):
    """What is on record of one namespace."""

    record: bytes  # its encoded `NamespaceRecord`
    epoch: int


class NamespaceTable:
    """The open table. `rows` is what it says now; `close` is idempotent."""

    def __init__(self, path: Path, rows: dict[bytes, NamespaceRow], *, rows_max: int) -> None:
        """Use `open`."""
        self.rows = rows
        self._path = path
        self._rows_max = rows_max
        self._fd = -1
        self._end = 0  # of the rows, in bytes from the start of the file
        self._reserved_end = 0  # of the memory that the file has
        self._row_count = 0  # in the file, those that no longer hold among them

    @classmethod
    def open(cls, folder: Path, *, rows_max: int) -> Self:
        """Read the table of a folder, or begin one.

        Args:
            folder: the instance's own, locked.
            rows_max: namespaces it holds.

        Raises:
            ConfigError: it cannot be written.
        """
        path = folder / NAMESPACES_NAME
        rows = _read(path)
        if len(rows) > rows_max:
            _LOG.warning("%s has %d namespaces, %d are kept", path, len(rows), rows_max)
            rows = dict(list(rows.items())[-rows_max:])
        table = cls(path, rows, rows_max=rows_max)
        try:
            table._rewrite()
        except OutOfSpace as exc:
            raise ConfigError(f"cannot write {path}: {exc}") from exc
        return table

    def save(self, namespace_id: bytes, record: bytes, epoch: int) -> None:
        """Record a namespace, or another epoch of it. Durable when this returns.

        Raises:
            OutOfSpace: `rows_max` namespaces are on record, or the filesystem is full; nothing is
                changed.
        """
        row = NamespaceRow(record, epoch)
        if self.rows.get(namespace_id) == row:
            return
        if namespace_id not in self.rows and len(self.rows) >= self._rows_max:
            raise OutOfSpace(f"{self._rows_max} namespaces are on record (namespaces_max)")
        if self._row_count >= len(self.rows) + _STALE_ROWS:
            self._rewrite()
        with translating({OSError: OutOfSpace}):
            self._append(_encode(namespace_id, row))
        self.rows[namespace_id] = row

    def forget(self, namespace_id: bytes) -> None:
        """Drop a namespace that has no pages; the file loses it when it is next written anew."""
        self.rows.pop(namespace_id, None)

    def close(self) -> None:
        """Close the file; it stays. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, raw: bytes) -> None:
        end = self._end + len(raw)
        if end > self._reserved_end:
            os.posix_fallocate(self._fd, self._end, len(raw) + _RESERVE_BYTES)
            self._reserved_end = end + _RESERVE_BYTES
        _write(self._fd, raw, self._end)
        os.fdatasync(self._fd)
        _write(self._fd, _header(end - HEADER_BYTES), 0)
        os.fdatasync(self._fd)
        self._end = end
        self._row_count += 1

    def _rewrite(self) -> None:
        """Write the rows that hold to a new file and put it in the old one's place."""
        raw = b"".join(_encode(key, row) for key, row in self.rows.items())
        fresh = self._path.with_name(self._path.name + ".new")
        with translating({OSError: OutOfSpace}):
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(fd, 0, HEADER_BYTES + len(raw) + _RESERVE_BYTES)
                _write(fd, _header(len(raw)) + raw, 0)
                os.fdatasync(fd)
                fresh.rename(self._path)
            except OSError:
                os.close(fd)
                fresh.unlink(missing_ok=True)
                raise
        self.close()
        self._fd = fd
        self._end = HEADER_BYTES + len(raw)
        self._reserved_end = self._end + _RESERVE_BYTES
        self._row_count = len(self.rows)


def _header(rows_bytes: int) -> bytes:
    raw = HEADER.pack(MAGIC, FORMAT_VERSION, HEADER_BYTES, rows_bytes)
    return (raw + xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")).ljust(HEADER_BYTES, b"\0")


def _encode(namespace_id: bytes, row: NamespaceRow) -> bytes:
    raw = ROW.pack(0, row.epoch, len(row.record), namespace_id)[8:] + row.record
    return xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little") + raw


def _write(fd: int, raw: bytes, offset: int) -> None:
    done = os.pwrite(fd, raw, offset)
    if done < len(raw):
        raise OSError(f"only {done} of {len(raw)} bytes were written")


def _read(path: Path) -> dict[bytes, NamespaceRow]:
    """The rows of a table file; none when it is not there or damaged."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc
    rows = _decode(raw)
    if rows is None:
        _LOG.warning("%s is damaged or of another version: the pages it names are lost", path)
        return {}
    return rows


def _decode(raw: bytes) -> dict[bytes, NamespaceRow] | None:
    if len(raw) < HEADER_BYTES:
        return None
    _, _, _, rows_bytes = HEADER.unpack_from(raw)
    end = HEADER_BYTES + rows_bytes
    if raw[:HEADER_BYTES] != _header(rows_bytes) or end > len(raw):
        return None
    rows: dict[bytes, NamespaceRow] = {}
    at = HEADER_BYTES
    while at < end:
        if at + ROW.size > end:
            return None
        own, epoch, record_bytes, namespace_id = ROW.unpack_from(raw, at)
        after = at + ROW.size + record_bytes
        if after > end or own != xxhash.xxh3_64_intdigest(raw[at + 8 : after]):
            return None
        rows[namespace_id] = NamespaceRow(raw[at + ROW.size : after], epoch)
        at = after
    return rows
