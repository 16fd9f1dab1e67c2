"""What every slot holds: the shared record table, and private copies of its hot columns.

Writes whole records only, a batch at a time, each with its own checksum. Descriptors and states
are kept twice: in the records for clients and a later restart, in private arrays for speed and so
that no answer depends on memory that another process can damage.

Invariant: a slot's private state, generation and page checksum are those of its record.
Control thread only.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nexuskv.errors import ConfigError
from nexuskv.tiers.arrays import lazy_zeros
from nexuskv.tiers.record import (
    NAMESPACE_ID_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    Batch,
    ParentState,
    Record,
    SlotState,
    decode,
    new_batch,
    seal,
)

_HOST_SEGMENT_ID: Final = 0
_ONE_BYTE: Final = 1 << 32  # in the size half of a descriptor's first word

_ROW: Final = np.dtype(f"V{RECORD_BYTES}")  # a record moved whole, not field by field

Places: TypeAlias = npt.NDArray[np.intp]
"""Slot ids as numpy indexes with them: several times quicker than converting at each use."""


class SlotTable:
    """State, generation and record of every slot."""

    def __init__(self, records: Batch, incarnation: bytes) -> None:
        """Start with every slot free.

        Args:
            records: shape (slots,), dtype `RECORD_DTYPE`, in shared memory.
            incarnation: its first half becomes the upper half of every generation.
        """
        slot_count = len(records)
        self._records: Batch | None = records
        self._states = lazy_zeros(slot_count, "u1")
        # The row behind the last slot stays zero and answers for ABSENT.
        self._rows = lazy_zeros((slot_count + 1) * 4, "<u8").reshape(-1, 4)
        # Its columns by name: numpy is several times quicker on them than on a pair of indexes.
        self._sizes, self._offsets, self._checksums, self._generations = self._rows.T
        self._first_generation = np.uint64(int.from_bytes(incarnation[:4], "little") << 32)

    # --- reading

    def descriptors(self, at: Places, page_bytes: int) -> bytes:
        """32 bytes a slot, zeros for ABSENT."""
        rows = self._rows.take(at, axis=0, mode="clip")
        rows[:, 0] *= page_bytes
        return rows.tobytes()

    def state_of(self, slot: int) -> SlotState:
        """The slot's state."""
        return SlotState(int(self._states[slot]))

    def generation_of(self, slot: int) -> int:
        """The slot's generation; 0 before its first use."""
        return int(self._generations[slot])

    def checksum_of(self, slot: int) -> int:
        """The checksum last committed into the slot."""
        return int(self._checksums[slot])

    def states_between(self, first_slot: int, end_slot: int) -> npt.NDArray[np.uint8]:
        """States of consecutive slots; a copy."""
        return self._states[first_slot:end_slot].copy()

    def page_of(self, slot: int) -> tuple[bytes, bytes] | None:
        """Namespace id and key in the slot's record; None unless it is READY and intact."""
        if self._states[slot] != SlotState.READY:
            return None
        record = self.record_of(slot)
        return None if record is None else (record.namespace_id, record.key)

    def record_of(self, slot: int) -> Record | None:
        """The decoded record of a slot that was lent at least once; None when it is damaged."""
        return decode(self._shared[slot].tobytes())

    def check(self, at: Places, state: SlotState) -> None:
        """Check that the slots are distinct and all in this state.

        Raises:
            ConfigError: they are not.
        """
        if self.check_taken(at) != bytes((state,)) * len(at):
            wrong = int(at[self._states[at] != state.value][0])
            raise ConfigError(f"slot {wrong} is {self.state_of(wrong).name}, not {state.name}")

    def check_taken(self, at: Places) -> bytes:
        """States of slots that must be distinct and not FREE, one byte each.

        Raises:
            ConfigError: a slot does not exist, is free, or is named twice.
        """
        try:
            states = self._states[at].tobytes()
        except IndexError as exc:
            raise ConfigError(f"a slot does not exist: {exc}") from exc
        if SlotState.FREE in states:
            raise ConfigError(f"slot {at[states.index(SlotState.FREE)]} is free already")
        if len(set(at.tolist())) < len(at):
            raise ConfigError("a slot is named twice")
        return states

    # --- writing

    def lend(
        self,
        at: Places,
        *,
        offsets_bytes: npt.NDArray[np.uint64],
        size_bytes: int,
        writer: tuple[int, int, int],
    ) -> None:
        """FREE → WRITING with a new generation; `writer` is (pid, start time, session)."""
        batch = new_batch(len(at))
        batch["state"] = SlotState.WRITING.value
        batch["size_bytes"] = size_bytes
        batch["writer_pid"], batch["writer_start_time"], batch["writer_session"] = writer
        # A row's size is one byte here: `descriptors` multiplies it by the namespace's size.
        self._sizes[at] = _HOST_SEGMENT_ID + _ONE_BYTE
        self._offsets[at] = offsets_bytes
        self._checksums[at] = 0
        self._renew(at)
        self._store(at, batch, SlotState.WRITING)

    def publish(
        self,
        at: Places,
        *,
        namespace_id: bytes,
        keys: bytes,
        key_bytes: int,
        parent_state: ParentState,
        parent: bytes,
        epoch: int,
        checksums: npt.NDArray[np.uint64],
    ) -> None:
        """WRITING → READY; see `HostTier.publish`."""
        parent = parent if parent_state is ParentState.KEY else b""
        _check_pages(len(at), namespace_id, keys, key_bytes, parent_state, parent, checksums)
        batch = new_batch(len(at))
        batch["state"] = SlotState.READY.value
        batch["size_bytes"] = self._shared["size_bytes"][at]
        batch["epoch"] = epoch
        batch["checksum"] = checksums
        batch["namespace_id"] = np.void(namespace_id)
        batch["key_bytes"] = key_bytes
        chain = np.frombuffer(keys, dtype=np.uint8).reshape(-1, key_bytes)
        batch["key"][:, :key_bytes] = chain
        batch["parent_state"] = ParentState.KEY.value
        batch["parent"][1:, :key_bytes] = chain[:-1]
        batch["parent_state"][0] = parent_state.value
        batch["parent"][0, : len(parent)] = np.frombuffer(parent, dtype=np.uint8)
        self._checksums[at] = checksums
        self._store(at, batch, SlotState.READY)

    def quarantine(self, at: Places) -> None:
        """WRITING → QUARANTINED; the record goes on naming the writer."""
        batch = self._shared.view(_ROW)[at].view(RECORD_DTYPE)
        batch["state"] = SlotState.QUARANTINED.value
        self._store(at, batch, SlotState.QUARANTINED)

    def blank(self, at: Places, state: SlotState) -> None:
        """Any state → FREE with a new generation, or → UNLINKED with the old one."""
        batch = new_batch(len(at))
        batch["state"] = state.value
        if state is SlotState.FREE:
            self._renew(at)
        self._store(at, batch, state)

    # --- taking over from an earlier run

    def records_between(self, first_slot: int, end_slot: int) -> Batch:
        """The records of consecutive slots; a copy, whatever they say."""
        return self._shared.view(_ROW)[first_slot:end_slot].copy().view(RECORD_DTYPE)

    def recall(self, first_slot: int, batch: Batch, intact: npt.NDArray[np.bool_]) -> None:
        """Go on from the generations that intact records of consecutive slots name."""
        known = np.where(intact, batch["generation"], np.uint64(0))
        self._generations[first_slot : first_slot + len(batch)] = known

    def adopt(
        self,
        at: Places,
        *,
        states: npt.NDArray[np.uint8],
        offsets_bytes: npt.NDArray[np.uint64],
        checksums: npt.NDArray[np.uint64],
    ) -> None:
        """Take over slots as they are: their records stay, their generations were recalled."""
        self._sizes[at] = _HOST_SEGMENT_ID + _ONE_BYTE
        self._offsets[at] = offsets_bytes
        self._checksums[at] = checksums
        self._states[at] = states

    def strike(self, at: Places) -> None:
        """Make records of slots that were not adopted yet say that the page has gone."""
        batch = new_batch(len(at))
        batch["state"] = SlotState.UNLINKED.value
        batch["slot"] = at
        batch["generation"] = self._shared["generation"][at]
        seal(batch)
        self._shared.view(_ROW)[at] = batch.view(_ROW)

    def close(self) -> None:
        """Let go of the shared records, so that they can be unmapped. Idempotent."""
        self._records = None

    def _renew(self, at: Places) -> None:
        used = np.maximum(self._generations[at], self._first_generation)
        self._generations[at] = used + np.uint64(1)

    def _store(self, at: Places, batch: Batch, state: SlotState) -> None:
        batch["slot"] = at
        batch["generation"] = self._generations[at]
        seal(batch)
        self._shared.view(_ROW)[at] = batch.view(_ROW)
        self._states[at] = state.value

    @property
    def _shared(self) -> Batch:
        assert self._records is not None, "the tier is closed"
        return self._records


def _check_pages(
    count: int,
    namespace_id: bytes,
    keys: bytes,
    key_bytes: int,
    parent_state: ParentState,
    parent: bytes,
    checksums: npt.NDArray[np.uint64],
) -> None:
    if len(namespace_id) != NAMESPACE_ID_BYTES or len(keys) != count * key_bytes:
        raise ConfigError(
            f"{count} pages need {count} keys of {key_bytes} bytes and a namespace id of "
            f"{NAMESPACE_ID_BYTES}, got {len(keys)} and {len(namespace_id)} bytes"
        )
    if len(checksums) != count:
        raise ConfigError(f"{count} pages need as many checksums, got {len(checksums)}")
    if parent_state is ParentState.KEY and len(parent) != key_bytes:
        raise ConfigError(f"a parent key has {key_bytes} bytes here, got {len(parent)}")
