"""SsdTier against a dict, under every order of calls."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nexuskv.tiers.chunks import SlotArray
from nexuskv.tiers.geometry import SUPERBLOCK_BYTES
from nexuskv.tiers.ssd import FILES_MAKING_MAX, SsdSlotState, SsdTier

FILE_BYTES = 65536
FILES = 6
SLOT_BYTES_MIN = 8192
SIZES = (8192, 12288, 20480, FILE_BYTES - SUPERBLOCK_BYTES)
STRIDE = FILE_BYTES // SLOT_BYTES_MIN

State = SsdSlotState


class SsdTierAgainstADict(RuleBasedStateMachine):
    """`slots`: every slot of a file that has a size → [state, checksum]."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[int, list[int]] = {}
        self.sizes: dict[int, int] = {}  # file → slot size
        self.making: dict[int, int] = {}
        self.exists: set[int] = set()
        self.growing = True
        self.newest: dict[int, int] = {}  # slot → generation of its last copy
        self.number = 0

    @initialize(
        incarnation=st.binary(min_size=8, max_size=8),
        found=st.dictionaries(st.integers(0, FILES + 1), st.sampled_from((*SIZES, 4096, 9000))),
    )
    def open(self, incarnation: bytes, found: dict[int, int]) -> None:
        self.tier = SsdTier.open(
            capacity_bytes=FILES * FILE_BYTES + 17,
            file_bytes=FILE_BYTES,
            slot_bytes_min=SLOT_BYTES_MIN,
            incarnation=incarnation,
        )
        for index, size in found.items():
            usable = index < FILES and size in SIZES
            assert self.tier.found(index, size) is usable
            if usable:
                self.cut(index, size, State.UNKNOWN)

    # --- rules

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 12))
    def take(self, size: int, count: int) -> None:
        free = self.tier.free_count(size)
        taken = self.tier.take(size, count)
        assert len(taken.slots) == min(free, count)
        for slot in taken.slots.tolist():
            assert self.sizes[slot // STRIDE] == size
            assert self.slots[slot][0] == State.FREE
            self.note_copy(slot)
            self.slots[slot] = [State.WRITING, 0]
        assert len(taken.files) <= 1
        assert not taken.files or self.growing
        for index, asked in taken.files:
            assert asked == size
            assert index not in self.making
            assert size not in self.making.values()
            # A file of another size may have been taken apart for this one: only a free one.
            if index in self.sizes:
                assert self.sizes[index] != size
                self.uncut(index)
            self.making[index] = size
        if len(taken.slots) < count and self.growing and not taken.files:
            assert self.nothing_to_make(size)

    @precondition(lambda self: self.making)
    @rule(data=st.data(), works=st.booleans())
    def finish_file(self, data: st.DataObject, works: bool) -> None:
        index = data.draw(st.sampled_from(sorted(self.making)))
        size = self.making.pop(index)
        if works:
            self.tier.file_made(index)
            self.cut(index, size, State.FREE)
        else:
            self.tier.file_failed(index)
            self.growing = False

    @rule()
    def resume_growth(self) -> None:
        self.tier.resume_growth()
        self.growing = True

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slots = self.some(data, State.WRITING)
        sums = self.numbers(len(slots))
        self.tier.publish(slots, sums)
        for slot, checksum in zip(slots.tolist(), sums.tolist(), strict=True):
            self.slots[slot] = [State.READY, checksum]

    @rule(data=st.data(), generation=st.integers(0, 2**63))
    def adopt(self, data: st.DataObject, generation: int) -> None:
        slots = self.some(data, State.UNKNOWN)
        sums = self.numbers(len(slots))
        self.tier.adopt(slots, sums, np.full(len(slots), generation, dtype=np.uint64))
        for slot, checksum in zip(slots.tolist(), sums.tolist(), strict=True):
            self.slots[slot] = [State.READY, checksum]
            self.note_copy(slot)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        slots = self.some(data, State.READY, State.WRITING, State.UNKNOWN)
        self.tier.drop(slots)
        for slot in slots.tolist():
            self.slots[slot][0] = State.DROPPING

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = self.some(data, State.DROPPING, State.WRITING)
        self.tier.free(slots)
        for slot in slots.tolist():
            self.slots[slot][0] = State.FREE

    @rule(index=st.integers(0, FILES - 1))
    def settle_file(self, index: int) -> None:
        unknown = [s for s in self.of_file(index) if self.slots[s][0] == State.UNKNOWN]
        assert self.tier.settle_file(index) == len(unknown)
        for slot in unknown:
            self.slots[slot][0] = State.FREE

    @rule()
    def release(self) -> None:
        for index in [index for index in self.sizes if self.is_vacant(index)][:1]:
            self.tier.release_file(index)
            self.uncut(index)

    # --- what must always hold

    @invariant()
    def every_slot_is_as_expected(self) -> None:
        found: dict[int, int] = {}
        for index in range(FILES):
            size, slots, states = self.tier.slots_of_file(index)
            assert size == self.sizes.get(index, 0)
            found.update(zip(slots.tolist(), states.tolist(), strict=True))
        assert found == {slot: state for slot, (state, _) in self.slots.items() if state}

    @invariant()
    def checksums_are_those_of_the_copies(self) -> None:
        ready = [slot for slot, (state, _) in self.slots.items() if state == State.READY]
        found = self.tier.checksums_of(np.array(ready, dtype=np.uint32)).tolist()
        assert found == [self.slots[slot][1] for slot in ready]

    @invariant()
    def usage_equals_a_recount(self) -> None:
        for size in SIZES:
            states = [st_ for s, (st_, _) in self.slots.items() if self.sizes[s // STRIDE] == size]
            order = (State.FREE, State.READY, State.WRITING, State.UNKNOWN, State.DROPPING)
            assert self.tier.usage_of(size)[1:] == tuple(map(states.count, order))
        for state in State:
            expected = sum(
                self.sizes[slot // STRIDE] for slot, (is_, _) in self.slots.items() if is_ == state
            )
            if state is not State.FREE:
                assert self.tier.bytes_in(state) == expected

    @invariant()
    def capacity_is_what_there_is_or_may_be(self) -> None:
        files = FILES if self.growing else len(self.exists)
        assert self.tier.capacity_bytes == files * FILE_BYTES
        assert self.tier.file_bytes_on_disk == len(self.exists) * FILE_BYTES
        assert [row.file_index for row in self.tier.files() if row.slot_bytes] == sorted(self.sizes)
        assert self.tier.unknown_files() == sorted(
            {slot // STRIDE for slot, (state, _) in self.slots.items() if state == State.UNKNOWN}
        )

    # --- the model

    def cut(self, index: int, size: int, state: State) -> None:
        assert index < FILES
        self.exists.add(index)
        self.sizes[index] = size
        for at in range((FILE_BYTES - SUPERBLOCK_BYTES) // size):
            self.slots[index * STRIDE + at] = [state, 0]

    def uncut(self, index: int) -> None:
        assert self.is_vacant(index)
        del self.sizes[index]
        for slot in self.of_file(index):
            del self.slots[slot]

    def of_file(self, index: int) -> list[int]:
        return [slot for slot in self.slots if slot // STRIDE == index]

    def is_vacant(self, index: int) -> bool:
        return all(self.slots[slot][0] == State.FREE for slot in self.of_file(index))

    def nothing_to_make(self, size: int) -> bool:
        busy = size in self.making.values() or len(self.making) >= FILES_MAKING_MAX
        unused = set(range(FILES)) - set(self.sizes) - set(self.making)
        other = [i for i, cut in self.sizes.items() if cut != size and self.is_vacant(i)]
        return busy or not (unused or other)

    def note_copy(self, slot: int) -> None:
        generation = self.tier.generation_of(slot)
        assert generation > self.newest.get(slot, -1)
        self.newest[slot] = generation

    def numbers(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        self.number += count
        return np.arange(self.number - count, self.number, dtype=np.uint64) + np.uint64(2**63)

    def some(self, data: st.DataObject, *states: State) -> SlotArray:
        fit = [slot for slot, (state, _) in self.slots.items() if state in states]
        drawn = data.draw(st.lists(st.sampled_from(fit), unique=True) if fit else st.just([]))
        return np.array(drawn, dtype=np.uint32)


SsdTierAgainstADict.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestSsdTierAgainstADict = SsdTierAgainstADict.TestCase
