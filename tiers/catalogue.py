"""Which page lies in which ssd slot: small fixed rows in RocksDB, durable before they are answered.

    b"p" + file u32 BE + slot u32 BE  →  256-byte record, file u32 LE, slot u32 LE
    b"n" + namespace id               →  XXH3-64 of id and the rest, epoch u64 LE, encoded namespace

A page row repeats its place, so that a row that got to another's key is seen. RocksDB is trusted
with nothing but atomic batches: every row is checked when it is read.

A damaged catalogue costs its pages, never a wrong one: it is moved aside as `catalogue.bad` and an
empty one takes its place. It must not be repaired: a repair could bring deleted rows back.

Worker process only. Any thread; calls exclude each other.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash

from nexuskv.errors import ConfigError, TransferFailed, Unavailable
from nexuskv.tiers.geometry import SlabGeometry
from nexuskv.tiers.record import (
    NAMESPACE_ID_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    Batch,
    SlotState,
    intact,
)
from nexuskv.tiers.rocks import Rocks, is_damage, move_aside

PAGE_PREFIX: Final = b"p"
NAMESPACE_PREFIX: Final = b"n"
ROW_BYTES: Final = RECORD_BYTES + 8
ROW_KEY_BYTES: Final = 9
NAMESPACE_HEAD_BYTES: Final = 16
NAMESPACES_MAX: Final = 1 << 20
"""Rows read at the start; control keeps far fewer."""

_AFTER_PAGES: Final = bytes((PAGE_PREFIX[0] + 1,))
_AFTER_NAMESPACES: Final = bytes((NAMESPACE_PREFIX[0] + 1,))
_FILES_MAX: Final = 1 << 32

_WHOLE: Final = np.dtype(f"V{RECORD_BYTES}")
_PLACE: Final = np.dtype([("file_index", "<u4"), ("slot_index", "<u4")])
_KEY: Final = np.dtype([("prefix", "V1"), ("file_index", ">u4"), ("slot_index", ">u4")])


class CatalogueRow(NamedTuple):
    """A page's row to be: its place and its 256-byte record, whose slot is the slot index."""

    file_index: int
    slot_index: int
    record: bytes


class RowPage(NamedTuple):
    """Rows in the order of their places. `cursor` continues behind them; empty at the end."""

    records: bytes  # 256 bytes a row
    places: bytes  # file u32 LE, slot u32 LE a row
    cursor: bytes


class NamespaceRow(NamedTuple):
    """A namespace that pages may belong to."""

    namespace_id: bytes
    record: bytes  # its encoding
    epoch: int


class _Judged(NamedTuple):
    """The rows of a page that can be trusted, joined, and the keys of the others."""

    records: bytes
    places: bytes
    bad_keys: list[bytes]


class Catalogue:
    """The rows of one ssd folder. Use `open` to make one; `close` is idempotent."""

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        geometry: SlabGeometry,
        files: Callable[[], Mapping[int, int]],
        start_over: bool,
    ) -> "Catalogue":
        """Open the database in `folder`, made when missing. Rows of files that are not there go.

        Args:
            folder: the database's own.
            geometry: of the slab files.
            files: the files there are now, index → slot size; asked again with every `rows`.
            start_over: begin with an empty catalogue if this one is damaged, and move it aside.

        Raises:
            TransferFailed: the database is damaged and `start_over` is False, or the disk fails.
        """
        try:
            return cls(folder, geometry, files, start_over=start_over)
        except TransferFailed as exc:
            if not start_over or not is_damage(exc):
                raise
            move_aside(folder)
            opened = cls(folder, geometry, files, start_over=True)
            opened.started_over = str(exc)
            return opened

    def __init__(
        self,
        folder: Path,
        geometry: SlabGeometry,
        files: Callable[[], Mapping[int, int]],
        *,
        start_over: bool,
    ) -> None:
        self._folder = folder
        self._geometry = geometry
        self._files = files
        self._may_start_over = start_over
        self._guard = threading.RLock()
        self._rocks = Rocks(folder)
        self._bad_rows = 0
        self.started_over: str | None = None
        """Why the catalogue was emptied, if it was."""
        try:
            self._namespaces = {row.namespace_id: row for row in self._read_namespaces()}
            self._drop_unknown_files()
        except Unavailable:
            self.close()
            raise

    # --- writing

    def put(self, rows: Iterable[CatalogueRow]) -> None:
        """Write rows in one atomic, durable batch. Their pages' bytes must be durable already.

        Raises:
            ConfigError: a record has a wrong length; nothing is written.
            TransferFailed: the database fails; whether the rows are there is unknown.
        """
        with self._guard, self._rocks.batch() as batch:
            for file_index, slot_index, record in rows:
                if len(record) != RECORD_BYTES:
                    raise ConfigError(f"a record has {RECORD_BYTES} bytes, got {len(record)}")
                place = file_index.to_bytes(4, "little") + slot_index.to_bytes(4, "little")
                batch.put(row_key(file_index, slot_index), record + place)

    def delete(self, places: Iterable[tuple[int, int]]) -> None:
        """Delete rows in one atomic, durable batch; rows that are not there do not matter.

        Args:
            places: (file index, slot index) of each.

        Raises:
            TransferFailed: the database fails; whether the rows are there is unknown.
        """
        with self._guard, self._rocks.batch() as batch:
            for file_index, slot_index in places:
                batch.delete(row_key(file_index, slot_index))

    def save_namespace(self, namespace_id: bytes, record: bytes, epoch: int) -> None:
        """Write a namespace and its epoch durably; an earlier row of it is replaced.

        Raises:
            ConfigError: the id has a wrong length.
            TransferFailed: the database fails.
        """
        if len(namespace_id) != NAMESPACE_ID_BYTES:
            raise ConfigError(
                f"a namespace id has {NAMESPACE_ID_BYTES} bytes, got {len(namespace_id)}"
            )
        row = NamespaceRow(namespace_id, record, epoch)
        with self._guard:
            with self._rocks.batch() as batch:
                batch.put(NAMESPACE_PREFIX + namespace_id, _encode_namespace(row))
            self._namespaces[namespace_id] = row

    def delete_namespaces(self, namespace_ids: Iterable[bytes]) -> None:
        """Forget namespaces, durably.

        Raises:
            TransferFailed: the database fails.
        """
        with self._guard:
            gone = list(namespace_ids)
            with self._rocks.batch() as batch:
                for namespace_id in gone:
                    batch.delete(NAMESPACE_PREFIX + namespace_id)
            for namespace_id in gone:
                self._namespaces.pop(namespace_id, None)

    # --- reading

    def namespaces(self) -> list[NamespaceRow]:
        """Every namespace that was saved."""
        with self._guard:
            return list(self._namespaces.values())

    @property
    def bad_rows(self) -> int:
        """Page rows that were skipped and deleted because they could not be trusted."""
        return self._bad_rows

    def rows(self, cursor: bytes, limit: int) -> RowPage:
        """The next page rows, in the order of their places.

        Rows that do not decode, lie under another row's key, or name a file or slot that is not
        there are left out, counted and deleted.

        Args:
            cursor: empty to begin, else from the last answer.
            limit: rows looked at.

        Raises:
            TransferFailed: the database fails or is damaged. When it may start over it does so
                instead, and this is the end.
        """
        with self._guard:
            try:
                keys, values = self._rocks.scan(cursor or PAGE_PREFIX, _AFTER_PAGES, limit)
                further = keys[-1] + b"\0" if len(keys) == limit else b""
                judged = self._judge(keys, values)
                if judged.bad_keys:
                    self._discard(judged.bad_keys)
            except TransferFailed as exc:
                if not self._may_start_over or not is_damage(exc):
                    raise
                self._begin_again(str(exc))
                return RowPage(b"", b"", b"")
        return RowPage(judged.records, judged.places, further)

    def flush(self) -> None:
        """Write what is in memory and in the log to a table, so that the next start reads less.

        Raises:
            TransferFailed: the database fails.
        """
        with self._guard:
            self._rocks.flush()

    def close(self) -> None:
        """Close the database. Idempotent."""
        with self._guard:
            self._rocks.close()

    # --- inside

    def _judge(self, keys: list[bytes], values: list[bytes]) -> _Judged:
        """Tell the rows that can be trusted from those that cannot."""
        if not keys or {*map(len, keys)} != {ROW_KEY_BYTES} or {*map(len, values)} != {ROW_BYTES}:
            keys, values, bad = _by_length(keys, values)
        else:
            bad = []
        raw = np.frombuffer(b"".join(values), dtype=np.uint8).reshape(-1, ROW_BYTES)
        records, places = raw[:, :RECORD_BYTES].tobytes(), raw[:, RECORD_BYTES:].tobytes()
        batch, said = np.frombuffer(records, RECORD_DTYPE), np.frombuffer(places, _PLACE)
        named = np.frombuffer(b"".join(keys), dtype=_KEY)
        trusted = intact(batch)
        trusted &= said["file_index"] == named["file_index"]
        trusted &= said["slot_index"] == named["slot_index"]
        trusted &= self._fits(said, batch)
        if trusted.all():
            return _Judged(records, places, bad)
        bad += [keys[at] for at in np.flatnonzero(~trusted)]
        return _Judged(
            np.frombuffer(records, _WHOLE)[trusted].tobytes(), said[trusted].tobytes(), bad
        )

    def _fits(self, places: npt.NDArray[np.void], batch: Batch) -> npt.NDArray[np.bool_]:
        """Whether each record is that of a page that may lie where its row says."""
        files = self._files()
        sizes = np.zeros(max(files, default=0) + 2, dtype=np.uint64)  # the last one stays 0
        for file_index, slot_bytes in files.items():
            sizes[file_index] = slot_bytes
        slot_bytes = sizes[np.minimum(places["file_index"], len(sizes) - 1)]
        counts = np.uint64(self._geometry.usable_bytes) // np.maximum(slot_bytes, np.uint64(1))
        fits: npt.NDArray[np.bool_] = slot_bytes > 0
        fits &= places["slot_index"] < counts
        fits &= batch["slot"] == places["slot_index"]
        fits &= batch["state"] == SlotState.READY.value
        fits &= (batch["size_bytes"] > 0) & (batch["size_bytes"] <= slot_bytes)
        return fits

    def _discard(self, keys: list[bytes]) -> None:
        self._bad_rows += len(keys)
        with self._rocks.batch() as batch:
            for key in keys:
                batch.delete(key)

    def _drop_unknown_files(self) -> None:
        """Delete the rows of files that are not there, before such a file can be made again."""
        first = 0
        for known in (*sorted(self._files()), _FILES_MAX):
            start = PAGE_PREFIX + first.to_bytes(4, "big")
            end = PAGE_PREFIX + known.to_bytes(4, "big") if known < _FILES_MAX else _AFTER_PAGES
            if first < known and self._rocks.scan(start, end, 1)[0]:
                with self._rocks.batch() as batch:
                    batch.delete_range(start, end)
            first = known + 1

    def _read_namespaces(self) -> list[NamespaceRow]:
        """Every namespace; a damaged one means that an epoch is lost, so all rows are."""
        keys, values = self._rocks.scan(NAMESPACE_PREFIX, _AFTER_NAMESPACES, NAMESPACES_MAX)
        return [_decode_namespace(key, value) for key, value in zip(keys, values, strict=True)]

    def _begin_again(self, reason: str) -> None:
        """An empty catalogue in place of a damaged one; the namespaces are known and stay."""
        self._rocks.close()
        move_aside(self._folder)
        self._rocks = Rocks(self._folder)
        self.started_over = reason
        with self._rocks.batch() as batch:
            for row in self._namespaces.values():
                batch.put(NAMESPACE_PREFIX + row.namespace_id, _encode_namespace(row))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _by_length(
    keys: list[bytes], values: list[bytes]
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Keys and values of the rows that have the right lengths, and keys of the others."""
    good: dict[bytes, bytes] = {}
    bad: list[bytes] = []
    for key, value in zip(keys, values, strict=True):
        if len(key) == ROW_KEY_BYTES and len(value) == ROW_BYTES:
            good[key] = value
        else:
            bad.append(key)
    return list(good), list(good.values()), bad


def row_key(file_index: int, slot_index: int) -> bytes:
    """The key of a page's row. Ordered as the places are."""
    return PAGE_PREFIX + file_index.to_bytes(4, "big") + slot_index.to_bytes(4, "big")


def _encode_namespace(row: NamespaceRow) -> bytes:
    body = row.epoch.to_bytes(8, "little") + row.record
    return xxhash.xxh3_64_intdigest(row.namespace_id + body).to_bytes(8, "little") + body


def _decode_namespace(key: bytes, value: bytes) -> NamespaceRow:
    namespace_id = key[len(NAMESPACE_PREFIX) :]
    own, body = value[:8], value[8:]
    wanted = xxhash.xxh3_64_intdigest(namespace_id + body).to_bytes(8, "little")
    if len(namespace_id) != NAMESPACE_ID_BYTES or len(body) < 8 or own != wanted:
        raise TransferFailed("Corruption: the catalogue's row of a namespace is damaged")
    return NamespaceRow(namespace_id, body[8:], int.from_bytes(body[:8], "little"))
