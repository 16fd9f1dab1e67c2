"""The host tier: page slots in named shared memory, and the headers that say what each one holds.

Owns the slot table: this process alone writes it, clients map it read-only. Knows no prefixes, no
sessions and no leases; the control plane says which slots to lend, publish and free.

Invariants: a slot's header says WRITING before its descriptor can be handed out (I14) and READY
only after everything else in it is written; a slot's generation grows each time it is lent or
freed, and its upper half is the incarnation's or an earlier one's, so a generation never means two
owners; usage always equals a recount of the headers.

Control thread, but for `populate_chunk`, which the worker thread calls. Nothing iterates over all
slots: a tier of any size opens at once.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from nexuskv.errors import ConfigError, NexusError, OutOfSpace
from nexuskv.tiers.adopt import Adoption, find_segment
from nexuskv.tiers.chunks import ChunkLedger, ChunkStage, SlotArray
from nexuskv.tiers.folder import (
    FolderLock,
    check_space,
    find_leftovers,
    lock_folder,
    segment_files,
)
from nexuskv.tiers.populate import Allocate, allocate
from nexuskv.tiers.record import ParentState, SlotState
from nexuskv.tiers.segment import ABSENT, SLOT_ALIGN_BYTES, Segment, SegmentRow, plan_segment
from nexuskv.tiers.table import SlotTable
from nexuskv.tiers.usage import ChunkRow, ChunkSlots, SizeUsage

__all__ = ["ABSENT", "SLOT_ALIGN_BYTES", "HostTier", "SlotArray", "slot_bytes_of"]


def slot_bytes_of(page_bytes: int, *, chunk_bytes: int) -> int:
    """The slot size for pages of this size: rounded up to `SLOT_ALIGN_BYTES`.

    Raises:
        ConfigError: the page is empty or larger than a chunk.
    """
    slot_bytes = -(-page_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
    if page_bytes <= 0 or slot_bytes > chunk_bytes:
        raise ConfigError(
            f"a page of {page_bytes} bytes does not fit a chunk of {chunk_bytes} bytes "
            f"(chunk_bytes)"
        )
    return slot_bytes


class HostTier:
    """Slots in one shared-memory segment. `close` is idempotent; use `open` to make one."""

    @classmethod
    def open(
        cls,
        *,
        folder: Path,
        capacity_bytes: int,
        chunk_bytes: int,
        huge_pages: bool,
        incarnation: bytes,
        reap_s: float = 5.0,
        adopt: bool = True,
        allocate: Allocate = allocate,
    ) -> "HostTier":
        """Lock `folder` and adopt the segment that an earlier run left in it, or make a new one.

        Of an adopted segment only the header has been read: see `adoption`.

        Args:
            folder: the instance's own folder, made with mode 0700 when missing.
            capacity_bytes: rounded down to whole chunks. No memory is taken yet.
            chunk_bytes: unit of memory given to one slot size, a multiple of 4096.
            huge_pages: ask for huge pages when chunks are populated.
            incarnation: 8 random bytes of this run of the daemon.
            reap_s: how long to wait for the end of a worker that a dead daemon left here.
            adopt: whether to; else what is there is discarded.
            allocate: how memory is had from the filesystem.

        Raises:
            ConfigError: a size is wrong, the filesystem cannot hold it, or the folder is in use.
        """
        header = plan_segment(folder, capacity_bytes, chunk_bytes, incarnation)
        check_space(folder, header.capacity_bytes)
        lock = lock_folder(folder, reap_s=reap_s)
        try:
            segment = find_segment(lock, header, allocate=allocate) if adopt else None
            if segment is None:
                lock.discard_segments()
                segment = Segment.create(folder, header, allocate=allocate)
        except NexusError:
            # What lies there may be adopted once the cause is gone.
            lock.close(remove=not segment_files(folder))
            raise
        return cls(segment, lock, huge_pages=huge_pages, leftovers=find_leftovers(folder))

    def __init__(
        self, segment: Segment, lock: FolderLock, *, huge_pages: bool, leftovers: list[Path]
    ) -> None:
        header = segment.header
        self.chunk_bytes = header.chunk_bytes
        self.chunk_count = header.capacity_bytes // header.chunk_bytes
        self.instance_id = header.instance_id
        self.leftovers = leftovers
        self._segment = segment
        self._lock = lock
        self._huge_pages = huge_pages
        stride = header.chunk_bytes // SLOT_ALIGN_BYTES
        self._ledger = ChunkLedger(
            chunk_count=self.chunk_count, chunk_bytes=header.chunk_bytes, stride=stride
        )
        self._table = SlotTable(segment.records, segment.header.incarnation)
        self.adoption = Adoption(segment, self._ledger, self._table)

    @property
    def slot_count(self) -> int:
        """Slot ids are below this, whatever the slot sizes."""
        return self.chunk_count * (self.chunk_bytes // SLOT_ALIGN_BYTES)

    @property
    def folder(self) -> Path:
        """The instance's own folder."""
        return self._lock.folder

    @property
    def adopted(self) -> bool:
        """Whether the segment is one that an earlier run made."""
        return self._segment.adopted

    @property
    def lock(self) -> FolderLock:
        """The instance's lock, for the worker to inherit."""
        return self._lock

    # --- supply of memory

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all chunks that have, or may still get, memory."""
        return (self.chunk_count - self.failed_chunks) * self.chunk_bytes

    @property
    def populated_bytes(self) -> int:
        """Bytes of the chunks that have memory."""
        stages = (ChunkStage.SPARE, ChunkStage.CARVED, ChunkStage.CLAIMED)
        return sum(map(self._ledger.stage_count, stages)) * self.chunk_bytes

    @property
    def spare_chunks(self) -> int:
        """Chunks that have memory but no slot size yet."""
        return self._ledger.spare_count

    @property
    def failed_chunks(self) -> int:
        """Chunks given up because their memory could not be had."""
        return self._ledger.stage_count(ChunkStage.FAILED)

    def slot_bytes_of(self, page_bytes: int) -> int:
        """`slot_bytes_of` with this tier's chunks."""
        return slot_bytes_of(page_bytes, chunk_bytes=self.chunk_bytes)

    def segments_for_hello(self) -> list[list[object]]:
        """The segments as `hello` tells them."""
        return [list(row) for row in self.segments()]

    def segments(self) -> list[SegmentRow]:
        """Where the segments lie and how they are cut."""
        return [self._segment.row()]

    def chunk_to_populate(self) -> int | None:
        """The next chunk without memory; the same one until it is populated or has failed."""
        return self._ledger.next_empty()

    def populate_chunk(self, chunk_index: int) -> None:
        """Reserve one chunk's memory. Worker thread; touches nothing that this object shares.

        Raises:
            OutOfSpace: the filesystem is full, or the tier is closed.
        """
        self._segment.populate(
            chunk_index * self.chunk_bytes, self.chunk_bytes, huge_pages=self._huge_pages
        )

    def chunk_populated(self, chunk_index: int) -> None:
        """The chunk has its memory: it becomes spare."""
        self._ledger.settle(chunk_index, ChunkStage.SPARE)
        self._segment.note_memory(chunk_index, has=True)

    def chunk_failed(self, chunk_index: int) -> None:
        """The chunk cannot get memory: it is given up and capacity shrinks."""
        self._ledger.settle(chunk_index, ChunkStage.FAILED)

    def carve(self, slot_bytes: int) -> bool:
        """Turn a spare chunk into free slots of this size.

        Returns:
            False when no chunk is spare, or no room can be made for the records of its slots.

        Raises:
            ConfigError: the size is no slot size.
        """
        self._check_slot_bytes(slot_bytes)
        chunk_index = self._ledger.first_spare()
        if chunk_index is None:
            return False
        reserved = self._reserve_records(chunk_index, slot_bytes) or (
            self._give_up_spare() and self._reserve_records(chunk_index, slot_bytes)
        )
        if not reserved:
            return False
        self._ledger.carve(chunk_index, slot_bytes)
        return True

    # --- slots

    def free_count(self, slot_bytes: int) -> int:
        """Free slots of this size."""
        return self._ledger.total(slot_bytes, SlotState.FREE)

    def take(
        self,
        slot_bytes: int,
        count: int,
        *,
        pid: int,
        start_time: int,
        session: int,
        page_bytes: int = 0,
    ) -> SlotArray:
        """Lend up to `count` free slots to a writer. Their headers name it before this returns.

        Args:
            slot_bytes: the slot size.
            count: slots wanted.
            pid: of the writer.
            start_time: of the writer, clock ticks since boot; with `pid` it names one process.
            session: of the writer.
            page_bytes: real size of the pages to come; 0 means the whole slot.

        Returns:
            Slot ids, shape (n,), n <= count.
        """
        slots = self._ledger.take(slot_bytes, count)
        if len(slots):
            self._table.lend(
                slots.astype(np.intp),
                offsets_bytes=self._ledger.offsets_bytes(slots, slot_bytes),
                size_bytes=page_bytes or slot_bytes,
                writer=(pid, start_time, session),
            )
        return slots

    def descriptors(self, slots: SlotArray, page_bytes: int) -> bytes:
        """The wire form of the slots' descriptors: 32 bytes each, zeros where a slot is ABSENT."""
        return self._table.descriptors(slots.astype(np.intp), page_bytes)

    def publish(
        self,
        slots: SlotArray,
        *,
        namespace_id: bytes,
        keys: bytes,
        key_bytes: int,
        parent_state: int,
        parent: bytes,
        epoch: int,
        checksums: npt.NDArray[np.uint64],
    ) -> None:
        """Commit pages, in chain order, into slots that were lent.

        The first page's parent is as given; every other one's is the page before it.

        Args:
            slots: shape (n,), distinct, all WRITING.
            namespace_id: 16 bytes.
            keys: n keys joined.
            key_bytes: length of each.
            parent_state: a `ParentState`.
            parent: the key before the first one where `parent_state` is KEY; else ignored.
            epoch: of the namespace.
            checksums: shape (n,), one a page.

        Raises:
            ConfigError: a length disagrees, or a slot is not WRITING; nothing is changed.
        """
        if not len(slots):
            return
        at = slots.astype(np.intp)
        self._table.check(at, SlotState.WRITING)
        self._table.publish(
            at,
            namespace_id=namespace_id,
            keys=keys,
            key_bytes=key_bytes,
            parent_state=ParentState(parent_state),
            parent=parent,
            epoch=epoch,
            checksums=checksums,
        )
        self._ledger.move(slots, SlotState.WRITING, SlotState.READY)

    def free(self, slots: SlotArray) -> None:
        """Take slots back, whatever they hold: no header, a new generation, free.

        Raises:
            ConfigError: a slot is free already or named twice; nothing is changed.
        """
        if not len(slots):
            return
        at = slots.astype(np.intp)
        before = self._table.check_taken(at)
        self._table.blank(at, SlotState.FREE)
        if len(found := set(before)) == 1:
            self._ledger.move(slots, SlotState(before[0]), SlotState.FREE)
            return
        states = np.frombuffer(before, dtype=np.uint8)
        for state in found:
            self._ledger.move(slots[states == state], SlotState(state), SlotState.FREE)

    def quarantine(self, slots: SlotArray) -> None:
        """Keep lent slots out of use: their writer was revoked, but may still write.

        Raises:
            ConfigError: a slot is not WRITING, or named twice; nothing is changed.
        """
        if not len(slots):
            return
        at = slots.astype(np.intp)
        self._table.check(at, SlotState.WRITING)
        self._table.quarantine(at)
        self._ledger.move(slots, SlotState.WRITING, SlotState.QUARANTINED)

    def unlink(self, slots: SlotArray) -> None:
        """Forget what committed slots hold, but leave bytes and generation to their readers.

        After this no restart finds the pages; `free` ends it when the last lease has ended.

        Raises:
            ConfigError: a slot is not READY, or named twice; nothing is changed.
        """
        if not len(slots):
            return
        at = slots.astype(np.intp)
        self._table.check(at, SlotState.READY)
        self._table.blank(at, SlotState.UNLINKED)
        self._ledger.move(slots, SlotState.READY, SlotState.UNLINKED)

    def page_of(self, slot: int) -> tuple[bytes, bytes] | None:
        """Namespace id and key of the page in a slot, from its header; None unless READY."""
        return self._table.page_of(slot)

    def state_of(self, slot: int) -> SlotState:
        """The slot's state."""
        return self._table.state_of(slot)

    def generation_of(self, slot: int) -> int:
        """The slot's generation; 0 before its first use."""
        return self._table.generation_of(slot)

    def checksum_of(self, slot: int) -> int:
        """The checksum of the page that was last committed into the slot."""
        return self._table.checksum_of(slot)

    # --- chunks

    def chunk_of(self, slot: int) -> int:
        """Index of the chunk that the slot lies in."""
        return slot // self._ledger.stride

    def slots_of_chunk(self, chunk_index: int) -> ChunkSlots:
        """The slots of one chunk that are not free, with their states, ascending."""
        slot_bytes = self._ledger.slot_bytes_of(chunk_index)
        first = chunk_index * self._ledger.stride
        count = self._ledger.slots_in_chunk(slot_bytes) if slot_bytes else 0
        states = self._table.states_between(first, first + count)
        taken = np.flatnonzero(states)
        return ChunkSlots(slot_bytes, (taken + first).astype(np.uint32), states[taken])

    def release_chunk(self, chunk_index: int) -> None:
        """Turn a chunk whose slots are all free back into a spare one.

        Raises:
            ConfigError: it has no slot size, or some of its slots are not free.
        """
        slot_bytes = self._ledger.slot_bytes_of(chunk_index)
        free = self._ledger.count(chunk_index, SlotState.FREE)
        if not slot_bytes or free != self._ledger.slots_in_chunk(slot_bytes):
            raise ConfigError(
                f"chunk {chunk_index} cannot be released: {free} free slots of {slot_bytes} bytes"
            )
        self._ledger.uncarve(chunk_index)

    def chunks(self) -> list[ChunkRow]:
        """One row for each chunk that has memory, ascending."""
        return [
            ChunkRow(
                index,
                self._ledger.slot_bytes_of(index),
                self._ledger.count(index, SlotState.READY),
                self._ledger.count(index, SlotState.WRITING),
                self._ledger.count(index, SlotState.QUARANTINED),
                self._ledger.count(index, SlotState.UNLINKED),
            )
            for index in self._ledger.populated()
        ]

    # --- usage

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold committed pages."""
        return self._bytes_in(SlotState.READY)

    @property
    def writing_bytes(self) -> int:
        """Bytes of slots lent to writers."""
        return self._bytes_in(SlotState.WRITING)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of slots whose writer may still write."""
        return self._bytes_in(SlotState.QUARANTINED)

    @property
    def unlinked_bytes(self) -> int:
        """Bytes of slots that only a reader's lease keeps."""
        return self._bytes_in(SlotState.UNLINKED)

    def usage_by_size(self) -> list[SizeUsage]:
        """One row for each slot size that ever had a chunk, ascending."""
        return [self.usage_of(size) for size in self._ledger.sizes()]

    def usage_of(self, slot_bytes: int) -> SizeUsage:
        """The slots of one size; all zero for a size that never had a chunk."""
        total = self._ledger.total
        return SizeUsage(
            slot_bytes,
            total(slot_bytes, SlotState.FREE),
            total(slot_bytes, SlotState.READY),
            total(slot_bytes, SlotState.WRITING),
            total(slot_bytes, SlotState.QUARANTINED),
            total(slot_bytes, SlotState.UNLINKED),
        )

    def close(self, *, unlink: bool) -> None:
        """Close the files and give up the folder; with `unlink`, remove them. Idempotent."""
        self._table.close()
        self._segment.close(unlink=unlink)
        self._lock.close(remove=unlink)

    def _reserve_records(self, chunk_index: int, slot_bytes: int) -> bool:
        first_slot = chunk_index * self._ledger.stride
        try:
            self._segment.reserve_records(first_slot, self._ledger.slots_in_chunk(slot_bytes))
        except OutOfSpace:
            return False
        return True

    def _give_up_spare(self) -> bool:
        """Trade a chunk for room for records, when data has filled the filesystem to the brim.

        One chunk holds the records of sixteen others at least. It must be one that no client was
        ever told of: its memory becomes a hole, and touching that could be a SIGBUS.
        """
        given_up = self._ledger.give_up_spare()
        if given_up is None:
            return False
        try:
            self._segment.give_back(given_up * self.chunk_bytes, self.chunk_bytes)
        except OutOfSpace:
            return False
        return True

    def _bytes_in(self, state: SlotState) -> int:
        return sum(size * self._ledger.total(size, state) for size in self._ledger.sizes())

    def _check_slot_bytes(self, slot_bytes: int) -> None:
        if slot_bytes % SLOT_ALIGN_BYTES or not 0 < slot_bytes <= self.chunk_bytes:
            raise ConfigError(
                f"slot size {slot_bytes} is not a multiple of {SLOT_ALIGN_BYTES} between it and "
                f"the chunk size {self.chunk_bytes}"
            )
