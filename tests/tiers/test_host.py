"""HostTier: lending, publishing and taking back slots."""

from collections.abc import Callable

import numpy as np
import pytest

from nexuskv.errors import ConfigError
from nexuskv.tiers.host import ABSENT, HostTier, SlotArray, slot_bytes_of
from nexuskv.tiers.record import SlotState
from nexuskv.types import Descriptor

PAGE = 8192
NAMESPACE = bytes(range(16))


def keys_of(count: int, start: int = 0) -> bytes:
    return b"".join((start + i).to_bytes(8, "big") for i in range(count))


def take(tier: HostTier, count: int, slot_bytes: int = PAGE) -> SlotArray:
    while tier.free_count(slot_bytes) < count:
        assert tier.carve(slot_bytes)
    return tier.take(slot_bytes, count, pid=7, start_time=99, session=3)


def publish(tier: HostTier, slots: SlotArray, start: int = 0) -> None:
    tier.publish(
        slots,
        namespace_id=NAMESPACE,
        keys=keys_of(len(slots), start),
        key_bytes=8,
        parent_state=0,
        parent=b"",
        epoch=5,
        checksums=np.arange(2**63, 2**63 + len(slots), dtype=np.uint64),
    )


def descriptors(tier: HostTier, slots: SlotArray, page_bytes: int = PAGE) -> list[Descriptor]:
    raw = tier.descriptors(slots, page_bytes)
    return [Descriptor.decode(raw[at : at + 32]) for at in range(0, len(raw), 32)]


def test_a_committed_page_is_found_by_its_slot(tier: HostTier) -> None:
    slots = take(tier, 3)
    publish(tier, slots)
    assert [tier.page_of(slot) for slot in slots.tolist()] == [
        (NAMESPACE, bytes([0] * 7 + [i])) for i in range(3)
    ]
    assert tier.checksum_of(int(slots[2])) == 2**63 + 2


def test_descriptors_name_disjoint_places_inside_the_segment(tier: HostTier) -> None:
    found = descriptors(tier, take(tier, 20))
    assert len({d.offset_bytes for d in found}) == 20
    assert all(d.size_bytes == PAGE and d.offset_bytes % PAGE == 0 for d in found)
    assert max(d.offset_bytes for d in found) + PAGE <= tier.capacity_bytes


def test_an_absent_slot_has_a_zero_descriptor(tier: HostTier) -> None:
    slots = take(tier, 1)
    both = np.array([ABSENT, slots[0]], dtype=np.uint32)
    assert tier.descriptors(both, PAGE)[:32] == bytes(32)
    assert tier.descriptors(both, PAGE)[32:] == tier.descriptors(slots, PAGE)


def test_descriptors_carry_the_real_page_size(tier: HostTier) -> None:
    slots = take(tier, 1)
    assert descriptors(tier, slots, page_bytes=5000)[0].size_bytes == 5000


def test_descriptor_checksum_and_generation_are_the_slots(tier: HostTier) -> None:
    slots = take(tier, 2)
    publish(tier, slots)
    found = descriptors(tier, slots)[1]
    assert (found.checksum, found.generation) == (2**63 + 1, tier.generation_of(int(slots[1])))


def test_take_gives_what_there_is(tier: HostTier) -> None:
    assert tier.carve(PAGE)
    assert len(tier.take(PAGE, 100, pid=1, start_time=1, session=1)) == 8
    assert tier.free_count(PAGE) == 0


def test_take_of_an_unknown_size_gives_nothing(tier: HostTier) -> None:
    assert len(tier.take(4096, 1, pid=1, start_time=1, session=1)) == 0


def test_a_freed_slot_has_a_new_generation_and_no_page(tier: HostTier) -> None:
    slots = take(tier, 1)
    publish(tier, slots)
    before = tier.generation_of(int(slots[0]))
    tier.free(slots)
    assert tier.generation_of(int(slots[0])) > before
    assert tier.page_of(int(slots[0])) is None


def test_unlink_keeps_the_generation_that_readers_check(tier: HostTier) -> None:
    slots = take(tier, 1)
    publish(tier, slots)
    before = tier.descriptors(slots, PAGE)
    tier.unlink(slots)
    assert tier.descriptors(slots, PAGE) == before
    assert tier.page_of(int(slots[0])) is None


def test_unlinked_slots_are_not_lent_again(tier: HostTier) -> None:
    slots = take(tier, 1)
    publish(tier, slots)
    tier.unlink(slots)
    free = tier.free_count(PAGE)
    assert slots[0] not in tier.take(PAGE, free, pid=1, start_time=1, session=1)


def test_quarantined_slots_are_not_lent_again(tier: HostTier) -> None:
    slots = take(tier, 2)
    tier.quarantine(slots)
    free = tier.free_count(PAGE)
    assert not set(slots.tolist()) & set(
        tier.take(PAGE, free, pid=1, start_time=1, session=1).tolist()
    )
    assert tier.quarantined_bytes == 2 * PAGE


def test_nearly_full_chunks_are_filled_first(tier: HostTier) -> None:
    slots = take(tier, 24)
    chunks = slots // (64 // 4)
    emptier, fuller = (slots[chunks == c] for c in np.unique(chunks)[:2])
    tier.free(np.concatenate([emptier[:6], fuller[:1]]))
    assert tier.take(PAGE, 1, pid=1, start_time=1, session=1)[0] == fuller[0]


def test_a_released_chunk_serves_another_size(tier: HostTier) -> None:
    slots = take(tier, 8)
    chunk = tier.chunk_of(int(slots[0]))
    tier.free(slots)
    spare = tier.spare_chunks
    tier.release_chunk(chunk)
    assert (tier.spare_chunks, tier.free_count(PAGE)) == (spare + 1, 0)
    assert tier.carve(4096)
    assert tier.free_count(4096) == 16


def test_slots_freed_in_any_order_go_back_to_their_chunks(tier: HostTier) -> None:
    slots = take(tier, 24)
    first, *others = (tier.chunk_of(int(slot)) for slot in slots[::8])
    tier.free(slots.reshape(3, 8).T.reshape(-1))
    tier.release_chunk(first)
    again = tier.take(PAGE, 24, pid=1, start_time=1, session=1)
    assert sorted(map(tier.chunk_of, again.tolist())) == sorted(others * 8)


def test_a_chunk_in_use_is_not_released(tier: HostTier) -> None:
    slots = take(tier, 1)
    with pytest.raises(ConfigError, match="7 free slots of 8192"):
        tier.release_chunk(tier.chunk_of(int(slots[0])))


def test_slots_of_chunk_lists_those_in_use_with_their_states(tier: HostTier) -> None:
    slots = take(tier, 3)
    publish(tier, slots[:1])
    found = tier.slots_of_chunk(tier.chunk_of(int(slots[0])))
    assert found.slot_bytes == PAGE
    assert dict(zip(found.slots.tolist(), found.states.tolist(), strict=True)) == {
        int(slots[0]): SlotState.READY,
        int(slots[1]): SlotState.WRITING,
        int(slots[2]): SlotState.WRITING,
    }


@pytest.mark.parametrize("page_bytes", [0, -1, 65537], ids=["zero", "negative", "over a chunk"])
def test_a_page_that_fits_no_slot_is_refused(page_bytes: int) -> None:
    with pytest.raises(ConfigError, match="65536"):
        slot_bytes_of(page_bytes, chunk_bytes=65536)


@pytest.mark.parametrize(("page_bytes", "slot_bytes"), [(1, 4096), (4096, 4096), (4097, 8192)])
def test_slots_are_pages_rounded_up(tier: HostTier, page_bytes: int, slot_bytes: int) -> None:
    assert tier.slot_bytes_of(page_bytes) == slot_bytes


@pytest.mark.parametrize("slot_bytes", [0, 100, 4097, 65536 + 4096])
def test_carving_an_impossible_size_is_refused(tier: HostTier, slot_bytes: int) -> None:
    with pytest.raises(ConfigError, match=str(slot_bytes)):
        tier.carve(slot_bytes)


def free_twice(tier: HostTier, slots: SlotArray) -> None:
    tier.free(slots)
    tier.free(slots)


def free_one_slot_named_twice(tier: HostTier, slots: SlotArray) -> None:
    tier.free(np.repeat(slots, 2))


def free_an_absent_slot(tier: HostTier, slots: SlotArray) -> None:
    tier.free(np.full_like(slots, ABSENT))


def publish_a_ready_slot(tier: HostTier, slots: SlotArray) -> None:
    publish(tier, slots)
    publish(tier, slots)


def unlink_a_slot_being_written(tier: HostTier, slots: SlotArray) -> None:
    tier.unlink(slots)


def quarantine_a_ready_slot(tier: HostTier, slots: SlotArray) -> None:
    publish(tier, slots)
    tier.quarantine(slots)


@pytest.mark.parametrize(
    "act",
    [
        free_twice,
        free_one_slot_named_twice,
        free_an_absent_slot,
        publish_a_ready_slot,
        unlink_a_slot_being_written,
        quarantine_a_ready_slot,
    ],
)
def test_a_move_from_the_wrong_state_is_refused(
    tier: HostTier, act: Callable[[HostTier, SlotArray], None]
) -> None:
    slots = take(tier, 1)
    with pytest.raises(ConfigError, match="slot"):
        act(tier, slots)
