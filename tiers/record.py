"""The one record layout: what a slot holds, in the host table and in any later catalogue.

256 bytes, little-endian, at fixed offsets. The first eight bytes are XXH3-64 of the other 248, so a
record that was torn by a crash, flipped or never written decodes to nothing. `generation` lies at
an address divisible by eight: readers in other processes load it whole.

Pure functions; any thread.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from nexuskv.errors import ConfigError
from nexuskv.key import KEY_BYTES_MAX

RECORD_BYTES: Final = 256
FORMAT_VERSION: Final = 0
NAMESPACE_ID_BYTES: Final = 16

OWN_CHECKSUM_OFFSET: Final = 0
GENERATION_OFFSET: Final = 8
EPOCH_OFFSET: Final = 16
CHECKSUM_OFFSET: Final = 24
WRITER_START_TIME_OFFSET: Final = 32
SIZE_OFFSET: Final = 40
SLOT_OFFSET: Final = 44
WRITER_PID_OFFSET: Final = 48
FORMAT_VERSION_OFFSET: Final = 52
STATE_OFFSET: Final = 54
KEY_BYTES_OFFSET: Final = 55
PARENT_STATE_OFFSET: Final = 56
NAMESPACE_ID_OFFSET: Final = 64
WRITER_SESSION_OFFSET: Final = 80
KEY_OFFSET: Final = 128
PARENT_OFFSET: Final = 192

_HASHED_FROM: Final = GENERATION_OFFSET
_FORMAT: Final = struct.Struct("<QQQQQIIIHBBB7x16sQ40x64s64s")

RECORD_DTYPE: Final = np.dtype(
    {
        "names": [
            "own_checksum", "generation", "epoch", "checksum", "writer_start_time", "size_bytes",
            "slot", "writer_pid", "format_version", "state", "key_bytes", "parent_state",
            "namespace_id", "writer_session", "key", "parent",
        ],
        "formats": [
            "<u8", "<u8", "<u8", "<u8", "<u8", "<u4",
            "<u4", "<u4", "<u2", "u1", "u1", "u1",
            "V16", "<u8", ("u1", (KEY_BYTES_MAX,)), ("u1", (KEY_BYTES_MAX,)),
        ],
        "offsets": [
            OWN_CHECKSUM_OFFSET, GENERATION_OFFSET, EPOCH_OFFSET, CHECKSUM_OFFSET,
            WRITER_START_TIME_OFFSET, SIZE_OFFSET, SLOT_OFFSET, WRITER_PID_OFFSET,
            FORMAT_VERSION_OFFSET, STATE_OFFSET, KEY_BYTES_OFFSET, PARENT_STATE_OFFSET,
            NAMESPACE_ID_OFFSET, WRITER_SESSION_OFFSET, KEY_OFFSET, PARENT_OFFSET,
        ],
        "itemsize": RECORD_BYTES,
    }
)  # fmt: skip
"""One record as a numpy row; the same bytes as `Record.encode`."""

_ROW: Final = np.dtype(f"V{RECORD_BYTES}")  # a record moved whole, not field by field

_SEAL_DTYPE: Final = np.dtype([("own", "<u8"), ("hashed", f"V{RECORD_BYTES - _HASHED_FROM}")])

Batch: TypeAlias = npt.NDArray[np.void]
"""Records, dtype `RECORD_DTYPE`, shape (n,), C-contiguous."""


class SlotState(IntEnum):
    """What a slot is doing."""

    FREE = 0
    WRITING = 1  # lent to the writer its record names
    READY = 2  # holds a committed page
    QUARANTINED = 3  # revoked, but its writer may still write
    UNLINKED = 4  # its page has left the index, but a reader's lease keeps the bytes


class ParentState(IntEnum):
    """What is known of the page before this one."""

    ROOT = 0
    KEY = 1
    UNKNOWN = 2


@dataclass(frozen=True, slots=True)
class Record:
    """One decoded record. `parent` is empty unless `parent_state` is KEY."""

    slot: int
    generation: int
    state: SlotState = SlotState.FREE
    size_bytes: int = 0
    epoch: int = 0
    checksum: int = 0  # of the page: XXH3-64 of its bytes xor XXH3-64 of namespace id and key
    writer_pid: int = 0
    writer_start_time: int = 0  # clock ticks since boot, field 22 of /proc/PID/stat
    writer_session: int = 0
    namespace_id: bytes = bytes(NAMESPACE_ID_BYTES)
    key: bytes = b""
    parent_state: ParentState = ParentState.ROOT
    parent: bytes = b""

    def __post_init__(self) -> None:
        if len(self.namespace_id) != NAMESPACE_ID_BYTES:
            raise ConfigError(
                f"a namespace id has {NAMESPACE_ID_BYTES} bytes, got {len(self.namespace_id)}"
            )
        if len(self.key) > KEY_BYTES_MAX:
            raise ConfigError(f"a key has at most {KEY_BYTES_MAX} bytes, got {len(self.key)}")
        wanted = len(self.key) if self.parent_state is ParentState.KEY else 0
        if len(self.parent) != wanted:
            raise ConfigError(f"this parent must have {wanted} bytes, got {len(self.parent)}")

    def encode(self) -> bytes:
        """The record's 256 bytes, with its own checksum.

        Raises:
            ConfigError: a number does not fit its field.
        """
        try:
            raw = _FORMAT.pack(
                0, self.generation, self.epoch, self.checksum, self.writer_start_time,
                self.size_bytes, self.slot, self.writer_pid, FORMAT_VERSION, self.state,
                len(self.key), self.parent_state, self.namespace_id, self.writer_session,
                self.key, self.parent,
            )  # fmt: skip
        except struct.error as exc:
            raise ConfigError(f"a number of {self} does not fit its field: {exc}") from exc
        return _own_checksum(raw).to_bytes(8, "little") + raw[_HASHED_FROM:]


def encode(record: Record) -> bytes:
    """The 256 bytes of a record; see `Record.encode`."""
    return record.encode()


def decode(raw: bytes | memoryview) -> Record | None:
    """Read one record.

    Args:
        raw: exactly 256 bytes.

    Returns:
        The record, or None when it is torn, flipped, never written or of another format version.
    """
    if len(raw) != RECORD_BYTES:
        return None
    raw = bytes(raw)
    (own, generation, epoch, checksum, start_time, size_bytes, slot, pid, version, state,
     key_bytes, parent_state, namespace_id, session, key, parent) = _FORMAT.unpack(raw)  # fmt: skip
    if own != _own_checksum(raw) or version != FORMAT_VERSION:
        return None
    if state > max(SlotState) or parent_state > max(ParentState) or key_bytes > KEY_BYTES_MAX:
        return None
    return Record(
        slot=slot,
        generation=generation,
        state=SlotState(state),
        size_bytes=size_bytes,
        epoch=epoch,
        checksum=checksum,
        writer_pid=pid,
        writer_start_time=start_time,
        writer_session=session,
        namespace_id=namespace_id,
        key=key[:key_bytes],
        parent_state=ParentState(parent_state),
        parent=parent[:key_bytes] if parent_state == ParentState.KEY else b"",
    )


def new_batch(count: int) -> Batch:
    """`count` zeroed records of the current format version, to be filled by column and sealed."""
    batch = np.zeros(count, dtype=RECORD_DTYPE)
    batch["format_version"] = FORMAT_VERSION
    return batch


def seal(batch: Batch) -> None:
    """Write each record's own checksum: the last step before a batch is stored."""
    bodies: list[bytes] = batch.view(_SEAL_DTYPE)["hashed"].tolist()
    hashes = map(xxhash.xxh3_64_intdigest, bodies)
    batch["own_checksum"] = np.fromiter(hashes, dtype=np.uint64, count=len(bodies))


def pick(batch: Batch, which: npt.NDArray[np.bool_]) -> Batch:
    """Some records of a batch, whole; the batch itself where that is all of them."""
    return batch if which.all() else batch.view(_ROW)[which].view(RECORD_DTYPE)


def join(batches: Sequence[Batch]) -> Batch:
    """Batches one after another, records whole; one alone is not copied."""
    if len(batches) == 1:
        return batches[0]
    return np.concatenate([batch.view(_ROW) for batch in batches]).view(RECORD_DTYPE)


def intact(batch: Batch) -> npt.NDArray[np.bool_]:
    """Which records of a batch `decode` would accept; shape (n,).

    The bytes between the fields count: a batch copied field by field has any there.
    """
    bodies: list[bytes] = batch.view(_SEAL_DTYPE)["hashed"].tolist()
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, bodies), np.uint64, count=len(bodies))
    good: npt.NDArray[np.bool_] = batch["own_checksum"] == hashes
    good &= batch["format_version"] == FORMAT_VERSION
    good &= batch["state"] <= max(SlotState)
    good &= batch["parent_state"] <= max(ParentState)
    good &= batch["key_bytes"] <= KEY_BYTES_MAX
    return good


def _own_checksum(raw: bytes) -> int:
    return xxhash.xxh3_64_intdigest(raw[_HASHED_FROM:])
