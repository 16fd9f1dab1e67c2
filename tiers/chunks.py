"""Which chunks exist, which slot size each serves, and which of its slots are free.

A chunk is empty (no memory yet), spare (memory, no slots), carved (slots of one size), failed (its
memory could not be had) or claimed (an earlier run used it, and what is in it is not known yet).
Free slots are a stack per chunk inside one lazily paged array, and
chunks with free slots lie in buckets by the magnitude of their free count: taking from the lowest
bucket fills nearly full chunks first, so that others come free as a whole.

Invariant: for every carved chunk, free + writing + ready + quarantined = slots of the chunk.
No I/O. Control thread only.
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nexuskv.tiers.arrays import lazy_zeros
from nexuskv.tiers.record import SlotState

SlotArray: TypeAlias = npt.NDArray[np.uint32]

_STATES: Final = len(SlotState)


class ChunkStage(IntEnum):
    """What a chunk is good for."""

    EMPTY = 0
    SPARE = 1
    CARVED = 2
    FAILED = 3
    CLAIMED = 4


class ChunkLedger:
    """Slots of every size, by chunk. Slot ids are `chunk_index * stride + index_in_chunk`."""

    def __init__(self, *, chunk_count: int, chunk_bytes: int, stride: int) -> None:
        self.stride = stride
        self._chunk_bytes = chunk_bytes
        self._chunk_count = chunk_count
        self._stages = bytearray(chunk_count)
        self._slot_bytes = array("Q", bytes(8 * chunk_count))
        self._counts = [array("I", bytes(4 * chunk_count)) for _ in range(_STATES)]
        self._stacks = lazy_zeros(chunk_count * stride, "<u4")
        self._spare: dict[int, None] = {}  # an ordered set; the last one is carved next
        self._ever_carved = bytearray(chunk_count)
        self._next_empty = 0
        # Per slot size: buckets of chunk indexes (dicts as ordered sets), and slots by state.
        self._buckets: dict[int, list[dict[int, None]]] = {}
        self._totals: dict[int, list[int]] = {}

    # --- chunks

    def next_empty(self) -> int | None:
        """The first chunk without memory, or None."""
        while self._next_empty < self._chunk_count and self._stages[self._next_empty]:
            self._next_empty += 1
        return self._next_empty if self._next_empty < self._chunk_count else None

    def settle(self, chunk_index: int, stage: ChunkStage) -> None:
        """An empty chunk became spare or failed."""
        assert self._stages[chunk_index] == ChunkStage.EMPTY, f"chunk {chunk_index} is settled"
        self._stages[chunk_index] = stage
        if stage is ChunkStage.SPARE:
            self._spare[chunk_index] = None

    def give_up_spare(self) -> int | None:
        """Fail a spare chunk that never had slots, but not the next to be carved; None if none."""
        for chunk_index in self._spare:
            if not self._ever_carved[chunk_index] and chunk_index != self.first_spare():
                del self._spare[chunk_index]
                self._stages[chunk_index] = ChunkStage.FAILED
                return chunk_index
        return None

    def stage_count(self, stage: ChunkStage) -> int:
        """Chunks in this stage."""
        return self._stages.count(stage)

    def first_spare(self) -> int | None:
        """The chunk that `carve` should take next, or None."""
        return next(reversed(self._spare), None)

    @property
    def spare_count(self) -> int:
        """Spare chunks."""
        return len(self._spare)

    def slots_in_chunk(self, slot_bytes: int) -> int:
        """How many slots of this size a chunk holds."""
        return self._chunk_bytes // slot_bytes

    def offsets_bytes(self, slots: SlotArray, slot_bytes: int) -> npt.NDArray[np.uint64]:
        """Where slots of this size start in the memory of all chunks."""
        chunks, indexes = np.divmod(slots, np.uint32(self.stride))
        offsets = chunks.astype(np.uint64)
        offsets *= np.uint64(self._chunk_bytes)
        offsets += indexes * np.uint64(slot_bytes)
        return offsets

    def carve(self, chunk_index: int, slot_bytes: int) -> None:
        """Turn a spare chunk into free slots of this size."""
        del self._spare[chunk_index]
        count = self.slots_in_chunk(slot_bytes)
        base = chunk_index * self.stride
        self._stacks[base : base + count] = np.arange(base + count - 1, base - 1, -1)
        self._counts[SlotState.FREE][chunk_index] = count
        self._enter(chunk_index, slot_bytes)

    def claim(self, chunk_index: int) -> None:
        """An earlier run used this empty chunk: it has memory, and is not to be used yet."""
        assert self._stages[chunk_index] == ChunkStage.EMPTY, f"chunk {chunk_index} is settled"
        self._stages[chunk_index] = ChunkStage.CLAIMED
        self._ever_carved[chunk_index] = 1

    def adopt(self, chunk_index: int, slot_bytes: int, states: npt.NDArray[np.uint8]) -> None:
        """Turn a claimed chunk into slots of this size, one `SlotState` each."""
        assert self._stages[chunk_index] == ChunkStage.CLAIMED, f"chunk {chunk_index} is settled"
        base = chunk_index * self.stride
        free = np.flatnonzero(states == SlotState.FREE.value)[::-1] + base
        self._stacks[base : base + len(free)] = free
        for state, count in enumerate(np.bincount(states, minlength=_STATES).tolist()):
            self._counts[state][chunk_index] = count
        self._enter(chunk_index, slot_bytes)

    def unclaim(self, chunk_index: int) -> None:
        """Nothing is in a claimed chunk: it is spare."""
        assert self._stages[chunk_index] == ChunkStage.CLAIMED, f"chunk {chunk_index} is settled"
        self._stages[chunk_index] = ChunkStage.SPARE
        self._spare[chunk_index] = None

    def disclaim(self, chunk_index: int, *, has_memory: bool) -> None:
        """A claimed chunk turned out never to have been carved: it is spare, or empty."""
        assert self._stages[chunk_index] == ChunkStage.CLAIMED, f"chunk {chunk_index} is settled"
        self._stages[chunk_index] = ChunkStage.EMPTY
        self._ever_carved[chunk_index] = 0
        self._next_empty = min(self._next_empty, chunk_index)
        if has_memory:
            self.settle(chunk_index, ChunkStage.SPARE)

    def _enter(self, chunk_index: int, slot_bytes: int) -> None:
        """A chunk whose slots are counted becomes a carved one."""
        self._ever_carved[chunk_index] = 1
        self._stages[chunk_index] = ChunkStage.CARVED
        self._slot_bytes[chunk_index] = slot_bytes
        if slot_bytes not in self._buckets:
            bucket_count = self._chunk_bytes.bit_length()
            self._buckets[slot_bytes] = [{} for _ in range(bucket_count)]
            self._totals[slot_bytes] = [0] * _STATES
        for state, counts in enumerate(self._counts):
            self._totals[slot_bytes][state] += counts[chunk_index]
        free = self._counts[SlotState.FREE][chunk_index]
        self._buckets[slot_bytes][free.bit_length()][chunk_index] = None

    def uncarve(self, chunk_index: int) -> None:
        """Turn a carved chunk, all its slots free, back into a spare one."""
        slot_bytes = self._slot_bytes[chunk_index]
        count = self._counts[SlotState.FREE][chunk_index]
        assert count == self.slots_in_chunk(slot_bytes), f"chunk {chunk_index} is in use"
        del self._buckets[slot_bytes][count.bit_length()][chunk_index]
        self._totals[slot_bytes][SlotState.FREE] -= count
        self._counts[SlotState.FREE][chunk_index] = 0
        self._slot_bytes[chunk_index] = 0
        self._stages[chunk_index] = ChunkStage.SPARE
        self._spare[chunk_index] = None

    def slot_bytes_of(self, chunk_index: int) -> int:
        """The chunk's slot size; 0 unless it is carved."""
        return self._slot_bytes[chunk_index]

    def count(self, chunk_index: int, state: SlotState) -> int:
        """Slots of one chunk in this state."""
        return self._counts[state][chunk_index]

    def populated(self) -> Iterator[int]:
        """Indexes of the spare and carved chunks, ascending."""
        return (
            index
            for index, stage in enumerate(self._stages)
            if stage in (ChunkStage.SPARE, ChunkStage.CARVED)
        )

    # --- slots

    def sizes(self) -> list[int]:
        """Slot sizes that ever had a chunk, ascending."""
        return sorted(self._totals)

    def total(self, slot_bytes: int, state: SlotState) -> int:
        """Slots of one size in this state."""
        return self._totals[slot_bytes][state] if slot_bytes in self._totals else 0

    def take(self, slot_bytes: int, count: int) -> SlotArray:
        """Move up to `count` free slots to WRITING, nearly full chunks first."""
        parts: list[SlotArray] = []
        while count > 0:
            chunk_index = self._fullest(slot_bytes)
            if chunk_index is None:
                break
            free = self._counts[SlotState.FREE][chunk_index]
            got = min(free, count)
            top = chunk_index * self.stride + free
            parts.append(self._stacks[top - got : top][::-1].copy())
            self._shift(chunk_index, got, SlotState.FREE, SlotState.WRITING)
            count -= got
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)

    def move(self, slots: SlotArray, source: SlotState, target: SlotState) -> None:
        """Count distinct slots, all in `source`, as `target`; FREE puts them back on the stacks."""
        for chunk_index, part in self._by_chunk(slots):
            if target is SlotState.FREE:
                top = chunk_index * self.stride + self._counts[SlotState.FREE][chunk_index]
                self._stacks[top : top + len(part)] = part
            self._shift(chunk_index, len(part), source, target)

    def _by_chunk(self, slots: SlotArray) -> Iterator[tuple[int, SlotArray]]:
        chunks = slots // np.uint32(self.stride)
        indexes = chunks.tolist()
        if indexes.count(indexes[0]) == len(indexes):
            yield indexes[0], slots
            return
        named = Counter(indexes)
        order = np.argsort(chunks, kind="stable")
        at = 0
        for chunk_index, length in sorted(named.items()):
            yield chunk_index, slots[order[at : at + length]]
            at += length

    def _shift(self, chunk_index: int, moved: int, source: SlotState, target: SlotState) -> None:
        before = self._counts[SlotState.FREE][chunk_index]
        self._counts[source][chunk_index] -= moved
        self._counts[target][chunk_index] += moved
        slot_bytes = self._slot_bytes[chunk_index]
        totals = self._totals[slot_bytes]
        totals[source] -= moved
        totals[target] += moved
        after = self._counts[SlotState.FREE][chunk_index]
        if before.bit_length() != after.bit_length():
            buckets = self._buckets[slot_bytes]
            del buckets[before.bit_length()][chunk_index]
            buckets[after.bit_length()][chunk_index] = None

    def _fullest(self, slot_bytes: int) -> int | None:
        """A chunk with free slots, of the lowest magnitude of them; bucket 0 holds full chunks."""
        for bucket in self._buckets.get(slot_bytes, [])[1:]:
            if bucket:
                return next(iter(bucket))
        return None
