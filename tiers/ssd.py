"""The ssd tier as control sees it: which slots of which files hold copies. No I/O at all.

The worker makes the files, moves the bytes and keeps the catalogue; control decides here which slot
a copy goes to and is told when something has become durable. A slot's life:

    FREE --take--> WRITING --publish--> READY --drop--> DROPPING --free--> FREE

and after a start UNKNOWN --adopt--> READY, or UNKNOWN --settle_file--> FREE. A slot of a file that
is not made yet is never handed out; `take` says which files the worker should make next.

Invariants: a slot leaves READY only by way of DROPPING, so that its row is deleted durably before
another copy is written there; a slot's generation grows each time it is taken, so that a generation
never means two copies; usage always equals a recount of the slots.

Control thread only. Nothing iterates over all slots: a tier of any size opens at once.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from nexuskv.errors import ConfigError
from nexuskv.tiers.arrays import lazy_zeros
from nexuskv.tiers.chunks import ChunkLedger, ChunkStage, SlotArray
from nexuskv.tiers.geometry import SlabGeometry
from nexuskv.tiers.record import SlotState
from nexuskv.tiers.segment import INCARNATION_BYTES
from nexuskv.tiers.ssd_slots import (
    FileRow,
    FileToMake,
    SlotsOfFile,
    SsdSlotState,
    SsdUsage,
    Taken,
)

__all__ = [
    "FileRow",
    "FileToMake",
    "SlotsOfFile",
    "SsdSlotState",
    "SsdTier",
    "SsdUsage",
    "Taken",
]

FILES_MAKING_MAX: Final = 4
"""Files in the making at a time: one a slot size, of as many sizes."""


class SsdTier:
    """Slots in slab files. Use `open` to make one; there is nothing to close."""

    @classmethod
    def open(
        cls, *, capacity_bytes: int, file_bytes: int, slot_bytes_min: int, incarnation: bytes
    ) -> "SsdTier":
        """An empty tier; `found` then tells it which files there are.

        Args:
            capacity_bytes: rounded down to whole files.
            file_bytes: length of a file, a multiple of 4096.
            slot_bytes_min: least slot size; smaller pages take a slot of this size.
            incarnation: 8 random bytes of this run of the daemon.

        Raises:
            ConfigError: a size is wrong.
        """
        geometry = SlabGeometry(file_bytes, slot_bytes_min)
        return cls(geometry, geometry.file_count(capacity_bytes), incarnation)

    def __init__(self, geometry: SlabGeometry, file_count: int, incarnation: bytes) -> None:
        if len(incarnation) != INCARNATION_BYTES:
            raise ConfigError(f"an incarnation has {INCARNATION_BYTES} bytes: {len(incarnation)}")
        self.geometry = geometry
        self.file_count = file_count
        self.slot_count = file_count * geometry.stride
        self._ledger = ChunkLedger(
            chunk_count=file_count, chunk_bytes=geometry.usable_bytes, stride=geometry.stride
        )
        self._states = lazy_zeros(self.slot_count, "u1")
        self._checksums = lazy_zeros(self.slot_count, "<u8")
        self._generations = lazy_zeros(self.slot_count, "<u8")
        self._first_generation = np.uint64(int.from_bytes(incarnation[:4], "little") << 32)
        self._exists = bytearray(file_count)
        self._next_fresh = 0  # no file below exists not or is not in the making
        self._making: dict[int, int] = {}  # file index → slot size
        self._idle: dict[int, None] = {}  # files that exist without a slot size; last one first
        self._vacant: dict[int, None] = {}  # files that may be wholly free
        self._growing = True

    def slot_bytes_of(self, page_bytes: int) -> int:
        """The slot size for pages of this size.

        Raises:
            ConfigError: the page is empty or larger than a file.
        """
        return self.geometry.slot_bytes_of(page_bytes)

    # --- places

    def place_of(self, slots: SlotArray) -> tuple[SlotArray, SlotArray]:
        """File indexes and slot indexes of slots; the same shape each."""
        files, indexes = np.divmod(slots, np.uint32(self.geometry.stride))
        return files, indexes

    def slots_at(self, file_indexes: SlotArray, slot_indexes: SlotArray) -> SlotArray:
        """Slot ids of places; the reverse of `place_of`."""
        return (file_indexes * np.uint32(self.geometry.stride) + slot_indexes).astype(np.uint32)

    # --- files

    def found(self, file_index: int, slot_bytes: int) -> bool:
        """A file lies on disk. Its slots are UNKNOWN until they are adopted, dropped or settled.

        Returns:
            False when the file is known already, beyond the capacity, or of no slot size.
        """
        if not 0 <= file_index < self.file_count or self._exists[file_index]:
            return False
        if file_index in self._making or not self.geometry.is_slot_size(slot_bytes):
            return False
        self._exists[file_index] = 1
        self._ledger.settle(file_index, ChunkStage.SPARE)
        self._ledger.carve(file_index, slot_bytes)
        first = file_index * self.geometry.stride
        slots = np.arange(first, first + self.geometry.slot_count(slot_bytes), dtype=np.uint32)
        self._move(slots, SsdSlotState.FREE, SsdSlotState.UNKNOWN)
        return True

    def file_made(self, file_index: int) -> None:
        """The worker has made a file that `take` asked for: its slots are free.

        Raises:
            ConfigError: nobody asked for it.
        """
        slot_bytes = self._pop_making(file_index)
        if not self._exists[file_index]:
            self._exists[file_index] = 1
            self._ledger.settle(file_index, ChunkStage.SPARE)
        self._ledger.carve(file_index, slot_bytes)
        self._vacant[file_index] = None

    def file_failed(self, file_index: int) -> None:
        """The worker could not make the file. No other is asked for until `resume_growth`.

        A full disk is full for the next file too: copies then live with the files there are.

        Raises:
            ConfigError: nobody asked for it.
        """
        self._pop_making(file_index)
        self._growing = False
        if self._exists[file_index]:
            self._idle[file_index] = None
        else:
            self._next_fresh = min(self._next_fresh, file_index)

    @property
    def growing(self) -> bool:
        """Whether files are asked for; False after one could not be made."""
        return self._growing

    def resume_growth(self) -> None:
        """Ask for files again."""
        self._growing = True

    def release_file(self, file_index: int) -> None:
        """Take its slot size from a file whose slots are all free; it may be made again.

        Raises:
            ConfigError: it has no slot size, or some of its slots are not free.
        """
        if not self._is_vacant(file_index):
            raise ConfigError(f"ssd file {file_index} has no slots, or some that are not free")
        self._vacant.pop(file_index, None)
        self._ledger.uncarve(file_index)
        self._idle[file_index] = None

    def files(self) -> list[FileRow]:
        """One row for each file that exists, ascending."""
        count = self._ledger.count
        return [
            FileRow(
                index,
                self._ledger.slot_bytes_of(index),
                count(index, SlotState.READY),
                count(index, SlotState.WRITING),
                count(index, SlotState.QUARANTINED),
                count(index, SlotState.UNLINKED),
            )
            for index in self._ledger.populated()
        ]

    def slots_of_file(self, file_index: int) -> SlotsOfFile:
        """The slots of one file that are not free."""
        slot_bytes = self._ledger.slot_bytes_of(file_index)
        first = file_index * self.geometry.stride
        count = self.geometry.slot_count(slot_bytes) if slot_bytes else 0
        states = self._states[first : first + count]
        taken = np.flatnonzero(states)
        return SlotsOfFile(slot_bytes, (taken + first).astype(np.uint32), states[taken])

    # --- slots

    def free_count(self, slot_bytes: int) -> int:
        """Free slots of this size in files that exist."""
        return self._ledger.total(slot_bytes, SlotState.FREE)

    def take(self, slot_bytes: int, count: int) -> Taken:
        """Take up to `count` free slots for copies: FREE → WRITING, each with a new generation.

        Args:
            slot_bytes: the slot size.
            count: slots wanted.

        Returns:
            n <= count slots, and at most one file to make: when these were too few, or the next
            call of this kind would get too few. Files are asked for once; whoever calls sees to it
            that `file_made` or `file_failed` follows.

        Raises:
            ConfigError: the size is no slot size.
        """
        if not self.geometry.is_slot_size(slot_bytes):
            raise ConfigError(
                f"ssd slot size {slot_bytes} is not a multiple of 4096 between "
                f"{self.geometry.slot_bytes_min} and {self.geometry.usable_bytes}"
            )
        slots = self._ledger.take(slot_bytes, count)
        at = slots.astype(np.intp)
        self._states[at] = SsdSlotState.WRITING.value
        self._checksums[at] = 0
        newest = np.maximum(self._generations[at], self._first_generation)
        self._generations[at] = newest + np.uint64(1)
        return Taken(slots, self._plan(slot_bytes, count, short=len(slots) < count))

    def publish(self, slots: SlotArray, checksums: npt.NDArray[np.uint64]) -> None:
        """Copies are durable: WRITING → READY.

        Args:
            slots: shape (n,), distinct.
            checksums: shape (n,), of the pages.

        Raises:
            ConfigError: a slot is not WRITING, or the shapes differ; nothing is changed.
        """
        self._check(slots, SsdSlotState.WRITING)
        self._check_shape(slots, checksums)
        self._checksums[slots.astype(np.intp)] = checksums
        self._move(slots, SsdSlotState.WRITING, SsdSlotState.READY)

    def adopt(
        self,
        slots: SlotArray,
        checksums: npt.NDArray[np.uint64],
        generations: npt.NDArray[np.uint64],
    ) -> None:
        """Rows name these copies: UNKNOWN → READY, with what their records say.

        Raises:
            ConfigError: a slot is not UNKNOWN, or the shapes differ; nothing is changed.
        """
        self._check(slots, SsdSlotState.UNKNOWN)
        self._check_shape(slots, checksums)
        self._check_shape(slots, generations)
        at = slots.astype(np.intp)
        self._checksums[at] = checksums
        self._generations[at] = generations
        self._move(slots, SsdSlotState.UNKNOWN, SsdSlotState.READY)

    def drop(self, slots: SlotArray) -> None:
        """The copies' rows are to be deleted: READY, WRITING or UNKNOWN → DROPPING.

        WRITING is for copies that may have a row although nobody wants them: the page was removed
        meanwhile, or the worker died before it answered.

        Raises:
            ConfigError: a slot is FREE or DROPPING already; nothing is changed.
        """
        sources = (SsdSlotState.READY, SsdSlotState.WRITING, SsdSlotState.UNKNOWN)
        self._move_each(slots, sources, SsdSlotState.DROPPING)

    def free(self, slots: SlotArray) -> None:
        """The rows are gone durably (DROPPING), or never were (WRITING): FREE.

        Raises:
            ConfigError: a slot is in another state; nothing is changed.
        """
        sources = (SsdSlotState.DROPPING, SsdSlotState.WRITING)
        self._move_each(slots, sources, SsdSlotState.FREE)
        self._note_vacant(slots)

    def settle_file(self, file_index: int) -> int:
        """All rows of a file have been read: what is UNKNOWN still becomes FREE.

        Returns:
            How many slots that were.
        """
        found = self.slots_of_file(file_index)
        slots = found.slots[found.states == SsdSlotState.UNKNOWN]
        self._move(slots, SsdSlotState.UNKNOWN, SsdSlotState.FREE)
        self._note_vacant(slots)
        return len(slots)

    def unknown_files(self) -> list[int]:
        """Files with slots that are UNKNOWN, ascending."""
        return [row.file_index for row in self.files() if row.unknown]

    def state_of(self, slot: int) -> SsdSlotState:
        """The slot's state."""
        return SsdSlotState(int(self._states[slot]))

    def states_of(self, slots: SlotArray) -> npt.NDArray[np.uint8]:
        """An `SsdSlotState` a slot; a copy."""
        return self._states[slots.astype(np.intp)]

    def checksum_of(self, slot: int) -> int:
        """The checksum of the page last published or adopted in the slot."""
        return int(self._checksums[slot])

    def checksums_of(self, slots: SlotArray) -> npt.NDArray[np.uint64]:
        """`checksum_of` of each; a copy."""
        return self._checksums[slots.astype(np.intp)]

    def generation_of(self, slot: int) -> int:
        """The slot's generation; 0 before its first use."""
        return int(self._generations[slot])

    def generations_of(self, slots: SlotArray) -> npt.NDArray[np.uint64]:
        """`generation_of` of each; a copy."""
        return self._generations[slots.astype(np.intp)]

    # --- usage

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the files that exist, and while the tier grows of those that may yet."""
        count = self.file_count if self._growing else self._exists.count(1)
        return count * self.geometry.file_bytes

    @property
    def file_bytes_on_disk(self) -> int:
        """Bytes of the files that exist."""
        return self._exists.count(1) * self.geometry.file_bytes

    def bytes_in(self, state: SsdSlotState) -> int:
        """Bytes of the slots in this state."""
        total, counted = self._ledger.total, SlotState(state)
        return sum(size * total(size, counted) for size in self._ledger.sizes())

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold durable copies."""
        return self.bytes_in(SsdSlotState.READY)

    def usage_by_size(self) -> list[SsdUsage]:
        """One row for each slot size that ever had a file, ascending."""
        return [self.usage_of(size) for size in self._ledger.sizes()]

    def usage_of(self, slot_bytes: int) -> SsdUsage:
        """The slots of one size; all zero for a size that never had a file."""
        total = self._ledger.total
        return SsdUsage(
            slot_bytes,
            total(slot_bytes, SlotState.FREE),
            total(slot_bytes, SlotState.READY),
            total(slot_bytes, SlotState.WRITING),
            total(slot_bytes, SlotState.QUARANTINED),
            total(slot_bytes, SlotState.UNLINKED),
        )

    # --- inside

    def _plan(self, slot_bytes: int, count: int, *, short: bool) -> list[FileToMake]:
        """The file to make for this size, if one is due and allowed."""
        due = short or self.free_count(slot_bytes) < count
        full = len(self._making) >= FILES_MAKING_MAX or slot_bytes in self._making.values()
        if not due or full or not self._growing:
            return []
        file_index = self._next_file(slot_bytes, short=short)
        if file_index is None:
            return []
        self._making[file_index] = slot_bytes
        return [FileToMake(file_index, slot_bytes)]

    def _next_file(self, slot_bytes: int, *, short: bool) -> int | None:
        """An idle file, else one that does not exist, else in need a free one of another size."""
        if not self._idle and (fresh := self._fresh_file()) is not None:
            return fresh
        if not self._idle and short:
            self._release_vacant(slot_bytes)
        return self._idle.popitem()[0] if self._idle else None

    def _fresh_file(self) -> int | None:
        index = self._next_fresh
        while index < self.file_count and (self._exists[index] or index in self._making):
            index += 1
        self._next_fresh = index
        return index if index < self.file_count else None

    def _release_vacant(self, wanted_slot_bytes: int) -> None:
        for file_index in list(self._vacant):
            if not self._is_vacant(file_index):
                del self._vacant[file_index]
            elif self._ledger.slot_bytes_of(file_index) != wanted_slot_bytes:
                self.release_file(file_index)
                return

    def _is_vacant(self, file_index: int) -> bool:
        slot_bytes = self._ledger.slot_bytes_of(file_index)
        free = self._ledger.count(file_index, SlotState.FREE)
        return slot_bytes > 0 and free == self.geometry.slot_count(slot_bytes)

    def _note_vacant(self, slots: SlotArray) -> None:
        files = np.unique(slots // np.uint32(self.geometry.stride)).tolist()
        self._vacant.update((index, None) for index in files if self._is_vacant(index))

    def _pop_making(self, file_index: int) -> int:
        if file_index not in self._making:
            raise ConfigError(f"ssd file {file_index} is not in the making")
        return self._making.pop(file_index)

    def _move_each(
        self, slots: SlotArray, sources: tuple[SsdSlotState, ...], target: SsdSlotState
    ) -> None:
        self._check(slots, *sources)
        states = self.states_of(slots)
        for source in sources:
            self._move(slots[states == source], source, target)

    def _move(self, slots: SlotArray, source: SsdSlotState, target: SsdSlotState) -> None:
        if len(slots):
            self._states[slots.astype(np.intp)] = target.value
            self._ledger.move(slots, SlotState(source), SlotState(target))

    def _check(self, slots: SlotArray, *allowed: SsdSlotState) -> None:
        at = slots.astype(np.intp)
        if len(at) and int(at.max()) >= self.slot_count:
            raise ConfigError(f"the ssd tier has {self.slot_count} slots, not slot {at.max()}")
        wrong = at[~np.isin(self._states[at], [state.value for state in allowed])]
        if len(wrong):
            slot = int(wrong[0])
            names = " or ".join(state.name for state in allowed)
            raise ConfigError(f"ssd slot {slot} is {self.state_of(slot).name}, not {names}")
        if len(set(at.tolist())) < len(at):
            raise ConfigError("an ssd slot is named twice")

    def _check_shape(self, slots: SlotArray, values: npt.NDArray[np.uint64]) -> None:
        if values.shape != slots.shape:
            raise ConfigError(f"{slots.shape} slots need as many values, got {values.shape}")
