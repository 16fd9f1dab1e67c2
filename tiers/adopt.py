"""Taking over what an earlier run of the daemon left in the host segment.

A chunk whose records were ever written is claimed at open: it has memory, and none of its slots is
free until its records were read. Reading goes in steps of bounded size, in slot order. What a
record says decides what becomes of its slot:

- an intact READY record: a page again, with its generation and checksum;
- WRITING or QUARANTINED: quarantined; the caller asks whether the writer it names still runs (I14);
- torn, damaged or at another slot's place: nobody can say who writes there, so it is quarantined
  while any process of the time before maps the segment;
- anything else: free.

Invariant: no slot becomes free here that a process of an earlier run may still write.
Control thread only.
"""

import logging
from collections import deque
from collections.abc import Collection
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from nexuskv.errors import OutOfSpace
from nexuskv.tiers.chunks import ChunkLedger, ChunkStage, SlotArray
from nexuskv.tiers.folder import TABLE_PREFIX, FolderLock, segment_files
from nexuskv.tiers.mapped import processes_mapping
from nexuskv.tiers.owner import Process
from nexuskv.tiers.populate import Allocate
from nexuskv.tiers.record import RECORD_BYTES, Batch, SlotState, intact, join, new_batch, pick
from nexuskv.tiers.segment import SLOT_ALIGN_BYTES, Segment, TableHeader, open_segment
from nexuskv.tiers.table import SlotTable

_LOG = logging.getLogger("nexuskv.tiers")
_TAKEN: Final = (SlotState.WRITING.value, SlotState.QUARANTINED.value, SlotState.READY.value)
Mask: TypeAlias = npt.NDArray[np.bool_]

_NO_SLOTS: Final = np.zeros(0, dtype=np.uint32)


def find_segment(lock: FolderLock, wanted: TableHeader, *, allocate: Allocate) -> Segment | None:
    """Adopt the one segment of the locked folder that can be; discard all others.

    Args:
        lock: of the folder.
        wanted: geometry and incarnation of this run; a capacity other than the segment's is taken.
        allocate: as for a new segment.

    Raises:
        ConfigError: the segment is sound, but cannot be grown or mapped; nothing is discarded.
    """
    segment: Segment | None = None
    for path in segment_files(lock.folder):
        if not path.name.startswith(TABLE_PREFIX):
            continue
        found = "there is another" if segment else open_segment(path, wanted.chunk_bytes)
        if isinstance(found, str):
            _LOG.warning("%s is discarded with its pages: %s", path, found)
            continue
        segment = Segment.adopt(found, wanted, allocate=allocate)
    if segment is not None:
        lock.discard_segments(but=(segment.data_path, segment.table_path))
    return segment


class Adopted(NamedTuple):
    """What one step found."""

    records: Batch  # of pages, all intact and READY, in slot order
    slots: SlotArray  # where those pages lie
    written: dict[Process, SlotArray]  # quarantined slots, by the writer that their records name


class Adoption:
    """The chunks of an earlier run that are still to be looked at."""

    def __init__(self, segment: Segment, ledger: ChunkLedger, table: SlotTable) -> None:
        """Claim them. Reads no record."""
        self._segment = segment
        self._ledger = ledger
        self._table = table
        self._parts: dict[int, deque[tuple[int, int]]] = {}  # chunk → stretches of slots to read
        self._read: list[tuple[SlotArray, Batch, Mask, Mask, Mask]] = []  # of the first chunk
        # Quarantined until the processes in `mapped_by` have ended:
        self._damaged: list[SlotArray] = []
        self._sizeless: dict[int, SlotArray] = {}  # chunks, with their damaged slots
        self._with_memory: set[int] = set()  # as the run before noted
        self.rows_done = 0
        self.rows_total = 0
        self.mapped_by: list[Process] = []
        if segment.adopted:
            # Who maps it now may write into it; whoever comes later was told nothing by then.
            self.mapped_by = processes_mapping(segment.data_path)
            segment.forget_surplus_pages()
            self._claim(segment.rows_on_record())
            self._with_memory = set(segment.chunks_with_memory())
            for chunk_index in sorted(self._with_memory - self._parts.keys()):
                ledger.settle(chunk_index, ChunkStage.SPARE)
            if not self.mapped_by:
                self._give_back_surplus()

    @property
    def pending(self) -> bool:
        """Whether chunks are still to be looked at."""
        return bool(self._parts)

    @property
    def waits_for_processes(self) -> bool:
        """Whether something depends on the end of the processes in `mapped_by`."""
        left = self._damaged or self._sizeless or self._segment.has_surplus
        return bool(self.mapped_by and left)

    def step(self, rows_max: int) -> Adopted:
        """Read up to `rows_max` records; the last ones of a chunk bring what all of it held."""
        # Chunks are carved from the last one down, so parents come before their children.
        chunk_index = next(reversed(self._parts))
        parts = self._parts[chunk_index]
        first, end = parts.popleft()
        if end - first > rows_max:
            parts.appendleft((first + rows_max, end))
            end = first + rows_max
        self._read.append(self._look(first, end))
        self.rows_done += end - first
        if parts:
            return _NOTHING
        del self._parts[chunk_index]
        read, self._read = self._read, []
        slots, records, *masks = zip(*read, strict=True)
        rows = _Rows(
            self._ledger.stride,
            np.concatenate(slots),
            join(records),
            *(np.concatenate(mask) for mask in masks),
        )
        return self._settle(chunk_index, rows)

    def _look(self, first: int, end: int) -> tuple[SlotArray, Batch, Mask, Mask, Mask]:
        """Read the records of consecutive slots: the columns of `_Rows`."""
        slots = np.arange(first, end, dtype=np.uint32)
        records = self._table.records_between(first, end)
        words = records.view(np.uint64).reshape(-1, RECORD_BYTES // 8)
        written: Mask = np.any(words != 0, axis=1)
        good = written.copy()
        good[written] = intact(pick(records, written))
        good &= records["slot"] == slots
        self._table.recall(first, records, good)
        taken = good & np.isin(records["state"], _TAKEN)
        return slots, records, written, written & ~good, taken

    def processes_ended(self) -> SlotArray:
        """All in `mapped_by` have ended: slots to be freed; chunks and surplus are seen to."""
        self.mapped_by = []
        for chunk_index, damaged in self._sizeless.items():
            self._unclaim(chunk_index, damaged)
        self._sizeless.clear()
        self._give_back_surplus()
        damaged = np.concatenate([_NO_SLOTS, *self._damaged])
        self._damaged.clear()
        return damaged

    def forget(self, namespace_id: bytes, keys: Collection[bytes]) -> tuple[SlotArray, int]:
        """Make the records of pages say that they have gone, wherever an earlier run left them.

        Looks at every record: some 0.1 s a million.

        Returns:
            The slots among them that were adopted already, whose records are unchanged, and how
            many others there were.
        """
        wanted = set(keys)
        tags = np.array([int.from_bytes(key[:8], "little") for key in wanted], dtype=np.uint64)
        adopted: list[int] = []
        struck_count = 0
        for first, end in self._segment.rows_on_record():
            records = self._segment.records[first:end]
            found = np.ascontiguousarray(records["key"][:, :8]).view(np.uint64)[:, 0]
            for at in np.flatnonzero(np.isin(found, tags)).tolist():
                record = self._table.record_of(first + at)
                if (
                    record is None
                    or record.state is not SlotState.READY
                    or record.key not in wanted
                    or record.namespace_id != namespace_id
                ):
                    continue
                if self._table.state_of(first + at) is SlotState.READY:
                    adopted.append(first + at)
                else:
                    self._table.strike(np.array([first + at], dtype=np.intp))
                    struck_count += 1
        return np.array(adopted, dtype=np.uint32), struck_count

    def _claim(self, stretches: list[tuple[int, int]]) -> None:
        stride = self._ledger.stride
        for first, end in stretches:
            self.rows_total += end - first
            for chunk_index in range(first // stride, -(-end // stride)):
                base = chunk_index * stride
                if chunk_index not in self._parts:
                    self._parts[chunk_index] = deque()
                    self._ledger.claim(chunk_index)
                self._parts[chunk_index].append((max(first, base), min(end, base + stride)))

    def _settle(self, chunk_index: int, rows: "_Rows") -> Adopted:
        """All records of a chunk were read: give it the slot size that they agree on."""
        slot_bytes = self._slot_bytes(rows.records["size_bytes"][rows.taken])
        if not rows.written.any():
            # The filesystem keeps data in larger units than a chunk's records: it had no slots,
            # and nobody was told of it.
            self._ledger.disclaim(chunk_index, has_memory=chunk_index in self._with_memory)
        elif slot_bytes:
            count = self._ledger.slots_in_chunk(slot_bytes)
            return self._carve(chunk_index, slot_bytes, rows.first(count))
        elif self.mapped_by and (rows.bad | rows.taken).any():
            self._sizeless[chunk_index] = rows.slots[rows.bad | rows.taken]
        else:
            self._unclaim(chunk_index, rows.slots[rows.bad | rows.taken])
        return _NOTHING

    def _slot_bytes(self, sizes: npt.NDArray[np.uint32]) -> int:
        """The one slot size for pages of these sizes; 0 when there is none."""
        found = set((-(-np.unique(sizes).astype(np.int64) // SLOT_ALIGN_BYTES)).tolist())
        slot_bytes = found.pop() * SLOT_ALIGN_BYTES if len(found) == 1 else 0
        return slot_bytes if slot_bytes and self._ledger.slots_in_chunk(slot_bytes) else 0

    def _carve(self, chunk_index: int, slot_bytes: int, rows: "_Rows") -> Adopted:
        states = np.where(rows.taken, rows.records["state"], SlotState.FREE.value)
        states[rows.taken & (states != SlotState.READY.value)] = SlotState.QUARANTINED.value
        writers = _writers(rows, states)
        if self.mapped_by:
            self._damaged.append(rows.slots[rows.bad])
            states[rows.bad] = SlotState.QUARANTINED.value
        whole = np.zeros(self._ledger.slots_in_chunk(slot_bytes), dtype=np.uint8)
        whole[rows.slots - np.uint32(chunk_index * self._ledger.stride)] = states
        self._ledger.adopt(chunk_index, slot_bytes, whole)
        self._table.adopt(
            rows.slots.astype(np.intp),
            states=states,
            offsets_bytes=self._ledger.offsets_bytes(rows.slots, slot_bytes),
            checksums=rows.records["checksum"],
        )
        if not self.mapped_by:
            self._heal(rows.slots[rows.bad])
        ready = states == SlotState.READY.value
        return Adopted(pick(rows.records, ready), rows.slots[ready], writers)

    def _unclaim(self, chunk_index: int, damaged: SlotArray) -> None:
        self._heal(damaged)
        self._ledger.unclaim(chunk_index)

    def _heal(self, damaged: SlotArray) -> None:
        """Replace damaged records of slots that are free now: they would raise doubts again."""
        if len(damaged):
            self._table.blank(damaged.astype(np.intp), SlotState.FREE)

    def _give_back_surplus(self) -> None:
        try:
            self._segment.give_back_surplus()
        except OutOfSpace as exc:
            _LOG.warning("memory above the capacity stays taken: %s", exc)


class _Rows(NamedTuple):
    """The records of one chunk that were read, and what is to be thought of each."""

    stride: int
    slots: SlotArray
    records: Batch
    written: Mask  # not zeros: its slot was lent at some time
    bad: Mask  # written, but not intact or not at its place
    taken: Mask  # intact, and says that the slot is not free

    def first(self, count: int) -> "_Rows":
        """Those of the first `count` slots of the chunk; the others are slots of no chunk now."""
        indexes = self.slots % np.uint32(self.stride)
        within = indexes < count
        return _Rows(
            self.stride,
            self.slots[within],
            pick(self.records, within),
            self.written[within],
            self.bad[within],
            self.taken[within],
        )


def _writers(rows: _Rows, states: npt.NDArray[np.uint8]) -> dict[Process, SlotArray]:
    """Slots that a writer named by their records may still write."""
    at = np.flatnonzero(states == SlotState.QUARANTINED.value)
    pids, start_times = rows.records["writer_pid"][at], rows.records["writer_start_time"][at]
    named = [Process(*pair) for pair in zip(pids.tolist(), start_times.tolist(), strict=True)]
    found: dict[Process, list[int]] = {}
    for process, slot in zip(named, rows.slots[at].tolist(), strict=True):
        found.setdefault(process, []).append(slot)
    return {process: np.array(slots, dtype=np.uint32) for process, slots in found.items()}


_NOTHING: Final = Adopted(new_batch(0), _NO_SLOTS, {})
