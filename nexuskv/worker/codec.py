"""Commands, answers and news as frames of the socket between control and the worker.

A frame is a little-endian u32 length and a msgpack array `[sequence, number, field…]`. `sequence`
is control's number of a command, repeated in its answers; news and settings have 0. `number` is the
record's place in the closed table below. Pure functions; all that the other side says is checked.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final, TypeAlias, get_args, get_origin

import msgpack

from nexuskv.errors import ProtocolError
from nexuskv.worker import commands
from nexuskv.worker.commands import Command, Result

LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is told before anything else."""

    data_path: str
    table_path: str
    capacity_bytes: int
    chunk_bytes: int
    table_bytes: int
    header_bytes: int
    record_bytes: int
    generation_offset: int
    huge_pages: bool
    nice: int
    stop_timeout_ms: int
    ssd_dir: str  # empty: no ssd tier
    ssd_capacity: int
    ssd_file_bytes: int
    ssd_slot_bytes_min: int
    ssd_threads: int
    ssd_open_files: int
    ssd_errors_max: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there?"""


@dataclass(frozen=True, slots=True)
class Pong:
    """Yes."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Take nothing more, finish what runs within the time told, and end."""


Record: TypeAlias = Command | Result | WorkerSettings | Ping | Pong | Finish

_TABLE: Final[dict[int, type[Record]]] = {
    1: WorkerSettings,
    2: Ping,
    3: Pong,
    4: Finish,
    10: commands.PopulateChunk,
    11: commands.CheckPages,
    12: commands.MakeFile,
    13: commands.CopyOut,
    14: commands.CopyIn,
    15: commands.CheckCopies,
    16: commands.DropCopies,
    17: commands.SaveNamespace,
    18: commands.LoadRows,
    30: commands.ChunkPopulated,
    31: commands.PagesChecked,
    32: commands.FileMade,
    33: commands.CopiedOut,
    34: commands.CopiedIn,
    35: commands.CopiesChecked,
    36: commands.CopiesDropped,
    37: commands.NamespaceSaved,
    38: commands.RowsLoaded,
    50: commands.WorkerReady,
    51: commands.SsdFailed,
}
NUMBERED: Final = frozenset(_TABLE.values())
"""The records that may be sent."""

_NUMBERS: Final = {record: number for number, record in _TABLE.items()}

Reader: TypeAlias = Callable[[object], object]


def _reads_int(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise TypeError(f"{value!r:.40} is no u64")
    return value


def _reads(wanted: type) -> Reader:
    def read(value: object) -> object:
        if type(value) is not wanted:
            raise TypeError(f"{value!r:.40} is no {wanted.__name__}")
        return value

    return read


def _reads_text_or_none(value: object) -> object:
    if value is not None and type(value) is not str:
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _reads_rows(row: type, readers: list[Reader]) -> Reader:
    def read(value: object) -> object:
        if not isinstance(value, list):
            raise TypeError(f"{value!r:.40} is no list")
        return tuple(
            row(*(read(item) for read, item in zip(readers, each, strict=True))) for each in value
        )

    return read


_WORDS: Final[dict[object, Reader]] = {
    int: _reads_int,
    str: _reads(str),
    bytes: _reads(bytes),
    bool: _reads(bool),
    str | None: _reads_text_or_none,
}


def _reader_of(annotation: object) -> Reader:
    """How a field of this type is read; a record with another type of field is a defect."""
    if get_origin(annotation) is tuple:
        row = get_args(annotation)[0]
        return _reads_rows(row, [_WORDS[kind] for kind in row.__annotations__.values()])
    return _WORDS[annotation]


_READERS: Final = {
    record: tuple(_reader_of(spec.type) for spec in fields(record)) for record in _TABLE.values()
}
_NAMES: Final = {record: tuple(spec.name for spec in fields(record)) for record in _TABLE.values()}


def encode(sequence: int, record: Record) -> bytes:
    """A whole frame, its length included."""
    kind = type(record)
    values = [getattr(record, name) for name in _NAMES[kind]]
    payload = msgpack.packb([sequence, _NUMBERS[kind], *values])
    return LENGTH.pack(len(payload)) + payload


def decode(payload: bytes) -> tuple[int, Record]:
    """The sequence and the record of a frame's payload.

    Raises:
        ProtocolError: it is none.
    """
    try:
        sequence, number, *values = msgpack.unpackb(payload, raw=False)
        record = _TABLE[number]
        found = [read(value) for read, value in zip(_READERS[record], values, strict=True)]
        return _reads_int(sequence), _make(record, found)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as exc:
        raise ProtocolError(f"a message of {len(payload)} bytes is malformed: {exc}") from exc


def _make(make: Callable[..., Record], values: list[object]) -> Record:
    """The record of these values, each of its field's type."""
    return make(*values)
