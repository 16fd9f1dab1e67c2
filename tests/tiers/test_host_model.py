"""HostTier against a dict, under every order of calls."""

import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from nexuskv.tiers.host import ABSENT, HostTier, SlotArray
from nexuskv.tiers.record import ParentState, Record, SlotState, decode
from nexuskv.types import Descriptor

CHUNK_BYTES = 65536
CHUNKS = 5
SIZES = (4096, 8192, 20480, 65536)  # 20480 does not divide a chunk
KEY_BYTES = 12
NAMESPACE = bytes(range(16))

State = SlotState


class HostTierAgainstADict(RuleBasedStateMachine):
    """`held`: slot → (slot size, record expected in the table), for every slot that is not free."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="nexuskv-model-"))
        self.held: dict[int, tuple[int, Record]] = {}
        self.sizes: dict[int, int] = {}  # carved chunk → slot size
        self.spare = 0
        self.seen: set[tuple[int, int]] = set()  # (slot, generation) ever handed out
        self.pages = 0

    @initialize(incarnation=st.binary(min_size=8, max_size=8))
    def open(self, incarnation: bytes) -> None:
        self.tier = HostTier.open(
            folder=self.folder / "one",
            capacity_bytes=CHUNKS * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            huge_pages=False,
            incarnation=incarnation,
        )
        self.table = Path(self.tier.segments()[0].table_path)
        self.tag = int.from_bytes(incarnation[:4], "little")

    def teardown(self) -> None:
        self.tier.close(unlink=True)
        shutil.rmtree(self.folder)

    # --- rules

    @precondition(lambda self: len(self.sizes) + self.spare < CHUNKS)
    @rule()
    def populate(self) -> None:
        chunk_index = self.tier.chunk_to_populate()
        assert chunk_index is not None
        self.tier.populate_chunk(chunk_index)
        self.tier.chunk_populated(chunk_index)
        self.spare += 1

    @rule(size=st.sampled_from(SIZES))
    def carve(self, size: int) -> None:
        before = {row.chunk_index for row in self.tier.chunks() if row.slot_bytes}
        assert self.tier.carve(size) == (self.spare > 0)
        for row in self.tier.chunks():
            if row.slot_bytes and row.chunk_index not in before:
                self.spare -= 1
                self.sizes[row.chunk_index] = size

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 20), short=st.integers(0, 4095))
    def take(self, size: int, count: int, short: int) -> None:
        free = self.tier.free_count(size)
        slots = self.tier.take(
            size, count, pid=11, start_time=12, session=13, page_bytes=size - short
        )
        assert len(slots) == min(free, count)
        for slot in slots.tolist():
            assert slot not in self.held
            assert self.sizes[self.tier.chunk_of(slot)] == size
            generation = self.tier.generation_of(slot)
            assert (slot, generation) not in self.seen
            assert generation >> 32 == self.tag
            self.seen.add((slot, generation))
            self.held[slot] = (
                size,
                Record(
                    slot=slot,
                    generation=generation,
                    state=State.WRITING,
                    size_bytes=size - short,
                    writer_pid=11,
                    writer_start_time=12,
                    writer_session=13,
                ),
            )

    @rule(data=st.data(), parent=st.sampled_from(ParentState))
    def publish(self, data: st.DataObject, parent: ParentState) -> None:
        slots = self.some(data, State.WRITING)
        keys = [self.new_key() for _ in slots]
        before = b"p" * KEY_BYTES
        sums = np.arange(len(slots), dtype=np.uint64) + np.uint64(2**64 - 100)
        self.tier.publish(
            slots,
            namespace_id=NAMESPACE,
            keys=b"".join(keys),
            key_bytes=KEY_BYTES,
            parent_state=int(parent),
            parent=before if parent is ParentState.KEY else b"",
            epoch=4,
            checksums=sums,
        )
        for at, slot in enumerate(slots.tolist()):
            size, lent = self.held[slot]
            state = parent if at == 0 else ParentState.KEY
            known = (before if at == 0 else keys[at - 1]) if state is ParentState.KEY else b""
            self.held[slot] = (
                size,
                Record(
                    slot=slot,
                    generation=lent.generation,
                    state=State.READY,
                    size_bytes=lent.size_bytes,
                    epoch=4,
                    checksum=int(sums[at]),
                    namespace_id=NAMESPACE,
                    key=keys[at],
                    parent_state=state,
                    parent=known,
                ),
            )

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = self.some(data, *State)
        self.tier.free(slots)
        for slot in slots.tolist():
            _, before = self.held.pop(slot)
            assert self.tier.generation_of(slot) > before.generation

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        slots = self.some(data, State.WRITING)
        self.tier.quarantine(slots)
        for slot in slots.tolist():
            size, lent = self.held[slot]
            self.held[slot] = (
                size,
                Record(
                    slot=slot,
                    generation=lent.generation,
                    state=State.QUARANTINED,
                    size_bytes=lent.size_bytes,
                    writer_pid=11,
                    writer_start_time=12,
                    writer_session=13,
                ),
            )

    @rule(data=st.data())
    def unlink(self, data: st.DataObject) -> None:
        slots = self.some(data, State.READY)
        self.tier.unlink(slots)
        for slot in slots.tolist():
            size, ready = self.held[slot]
            self.held[slot] = (
                size,
                Record(slot=slot, generation=ready.generation, state=State.UNLINKED),
            )

    @rule()
    def release(self) -> None:
        in_use = {self.tier.chunk_of(slot) for slot in self.held}
        for chunk_index in sorted(set(self.sizes) - in_use)[:1]:
            self.tier.release_chunk(chunk_index)
            del self.sizes[chunk_index]
            self.spare += 1

    # --- what must always hold

    @invariant()
    def records_are_as_expected(self) -> None:
        raw = self.table.read_bytes()
        found: dict[int, Record] = {}
        for chunk_index, size in self.sizes.items():
            for index in range(CHUNK_BYTES // size):
                slot = chunk_index * 16 + index
                record = decode(raw[4096 + slot * 256 :][:256])
                if record is not None and record.state is not State.FREE:
                    found[slot] = record
        assert found == {slot: record for slot, (_, record) in self.held.items()}

    @invariant()
    def usage_equals_a_recount(self) -> None:
        def count(*states: State) -> int:
            return sum(size for size, record in self.held.values() if record.state in states)

        assert self.tier.used_bytes == count(State.READY)
        assert self.tier.writing_bytes == count(State.WRITING)
        assert self.tier.quarantined_bytes == count(State.QUARANTINED)
        assert self.tier.unlinked_bytes == count(State.UNLINKED)

    @invariant()
    def every_slot_is_free_or_held(self) -> None:
        for size in SIZES:
            slots = sum(CHUNK_BYTES // size for carved in self.sizes.values() if carved == size)
            held = sum(1 for held_size, _ in self.held.values() if held_size == size)
            assert self.tier.free_count(size) == slots - held
        assert self.tier.spare_chunks == self.spare

    @invariant()
    def chunk_rows_add_up(self) -> None:
        for row in self.tier.chunks():
            states = [
                record.state
                for slot, (_, record) in self.held.items()
                if self.tier.chunk_of(slot) == row.chunk_index
            ]
            assert row.slot_bytes == self.sizes.get(row.chunk_index, 0)
            assert row[2:] == tuple(
                map(
                    states.count,
                    (State.READY, State.WRITING, State.QUARANTINED, State.UNLINKED),
                )
            )
            listed = self.tier.slots_of_chunk(row.chunk_index)
            assert sorted(listed.states.tolist()) == sorted(states)

    @invariant()
    def places_of_held_slots_are_disjoint(self) -> None:
        slots = np.array([*self.held, ABSENT], dtype=np.uint32)
        raw = self.tier.descriptors(slots, 1)
        assert raw[-32:] == bytes(32)
        places: list[tuple[int, int]] = []
        for at, (size, record) in enumerate(self.held.values()):
            found = Descriptor.decode(raw[at * 32 : at * 32 + 32])
            assert found.generation == record.generation
            if record.state is State.READY:
                assert found.checksum == record.checksum
                assert self.tier.page_of(record.slot) == (NAMESPACE, record.key)
            places.append((found.offset_bytes, found.offset_bytes + size))
        places.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        assert not places or places[-1][1] <= CHUNKS * CHUNK_BYTES

    # --- drawing

    def some(self, data: st.DataObject, *states: State) -> SlotArray:
        """Some held slots in one of these states, in any order."""
        fit = [slot for slot, (_, record) in self.held.items() if record.state in states]
        drawn = data.draw(st.lists(st.sampled_from(fit), unique=True) if fit else st.just([]))
        return np.array(drawn, dtype=np.uint32)

    def new_key(self) -> bytes:
        self.pages += 1
        return self.pages.to_bytes(KEY_BYTES, "big")


HostTierAgainstADict.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None
)
TestHostTierAgainstADict = HostTierAgainstADict.TestCase
