"""SsdTier: slots of files, taken, published, dropped and freed, without any I/O."""

import numpy as np
import pytest

from nexuskv.errors import ConfigError
from nexuskv.tiers.chunks import SlotArray
from nexuskv.tiers.ssd import FILES_MAKING_MAX, FileToMake, SsdSlotState, SsdTier

KIB = 1024
FILE_BYTES = 64 * KIB
INCARNATION = bytes.fromhex("a1b2c3d4e5f60718")


def open_tier(*, files: int = 4, slot_bytes_min: int = 16 * KIB) -> SsdTier:
    return SsdTier.open(
        capacity_bytes=files * FILE_BYTES,
        file_bytes=FILE_BYTES,
        slot_bytes_min=slot_bytes_min,
        incarnation=INCARNATION,
    )


def make(tier: SsdTier, slot_bytes: int) -> int:
    """Have one file made, as control and worker do together."""
    (wanted,) = tier.take(slot_bytes, 0 if tier.free_count(slot_bytes) else 1).files
    tier.file_made(wanted.file_index)
    return wanted.file_index


def sums(slots: SlotArray) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return slots.astype(np.uint64) + np.uint64(7)


@pytest.fixture
def tier() -> SsdTier:
    """Four files of three 16 KiB slots each; the first one is made."""
    tier = open_tier()
    make(tier, 16 * KIB)
    return tier


@pytest.mark.parametrize(
    ("page_bytes", "slot_bytes"),
    [(1, 16 * KIB), (16 * KIB, 16 * KIB), (16 * KIB + 1, 20 * KIB), (60 * KIB, 60 * KIB)],
)
def test_slot_size_is_rounded_up(page_bytes: int, slot_bytes: int) -> None:
    assert open_tier().slot_bytes_of(page_bytes) == slot_bytes


@pytest.mark.parametrize("page_bytes", [0, -1, 60 * KIB + 1])
def test_page_that_no_file_can_hold_is_refused(page_bytes: int) -> None:
    with pytest.raises(ConfigError, match="does not fit an ssd file"):
        open_tier().slot_bytes_of(page_bytes)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"file_bytes": 64 * KIB + 1}, "not a multiple of 4096"),
        ({"slot_bytes_min": 1000}, "not a multiple of 4096"),
        ({"slot_bytes_min": 64 * KIB}, "have no room"),
        ({"capacity_bytes": 64 * KIB - 1}, "not between one file"),
        ({"capacity_bytes": 2**62}, "not between one file"),
        ({"incarnation": b"short"}, "incarnation"),
    ],
)
def test_wrong_size_is_refused(wrong: dict[str, object], said: str) -> None:
    given: dict[str, object] = {
        "capacity_bytes": 2**30,
        "file_bytes": 64 * KIB,
        "slot_bytes_min": 16 * KIB,
        "incarnation": INCARNATION,
    }
    with pytest.raises(ConfigError, match=said):
        SsdTier.open(**{**given, **wrong})  # type: ignore[arg-type]  # wrong on purpose


def test_slot_of_a_file_not_made_is_not_handed_out() -> None:
    taken = open_tier().take(16 * KIB, 3)
    assert len(taken.slots) == 0
    assert taken.files == [FileToMake(0, 16 * KIB)]


def test_file_in_the_making_is_asked_for_once() -> None:
    tier = open_tier()
    assert tier.take(16 * KIB, 3).files
    assert tier.take(16 * KIB, 3).files == []


def test_files_in_the_making_are_bounded() -> None:
    tier = open_tier(files=8, slot_bytes_min=4 * KIB)
    asked = [tier.take(size * 4 * KIB, 1).files for size in range(1, 8)]
    assert sum(map(len, asked)) == FILES_MAKING_MAX


def test_next_file_is_asked_for_before_the_slots_run_out(tier: SsdTier) -> None:
    taken = tier.take(16 * KIB, 2)
    assert len(taken.slots) == 2
    assert taken.files == [FileToMake(1, 16 * KIB)]


def test_failed_file_stops_growth_until_it_is_resumed(tier: SsdTier) -> None:
    (wanted,) = tier.take(16 * KIB, 3).files
    tier.file_failed(wanted.file_index)
    assert tier.capacity_bytes == FILE_BYTES
    assert tier.take(16 * KIB, 1).files == []
    tier.resume_growth()
    assert tier.take(16 * KIB, 1).files == [wanted]
    assert tier.capacity_bytes == 4 * FILE_BYTES


def test_free_file_moves_to_another_size_when_no_other_is_left() -> None:
    tier = open_tier(files=1)
    make(tier, 16 * KIB)
    assert tier.take(32 * KIB, 1).files == [FileToMake(0, 32 * KIB)]
    assert tier.free_count(16 * KIB) == 0
    tier.file_made(0)
    assert tier.take(32 * KIB, 1).slots.tolist() == [0]


def test_file_in_use_never_moves_to_another_size() -> None:
    tier = open_tier(files=1)
    make(tier, 16 * KIB)
    assert len(tier.take(16 * KIB, 1).slots) == 1
    assert tier.take(32 * KIB, 1).files == []


def test_ready_slot_is_not_freed_before_its_row_is_dropped(tier: SsdTier) -> None:
    slots = tier.take(16 * KIB, 1).slots
    tier.publish(slots, sums(slots))
    with pytest.raises(ConfigError, match="is READY, not DROPPING or WRITING"):
        tier.free(slots)
    tier.drop(slots)
    tier.free(slots)
    assert tier.state_of(int(slots[0])) is SsdSlotState.FREE


def test_dropping_slot_is_not_taken(tier: SsdTier) -> None:
    slots = tier.take(16 * KIB, 3).slots
    tier.publish(slots, sums(slots))
    tier.drop(slots)
    assert len(tier.take(16 * KIB, 1).slots) == 0


def test_slot_taken_again_has_a_greater_generation(tier: SsdTier) -> None:
    slots = tier.take(16 * KIB, 3).slots
    before = tier.generations_of(slots)
    tier.free(slots)
    assert (tier.generations_of(tier.take(16 * KIB, 3).slots) > before.max()).all()


def test_slot_adopted_from_a_later_incarnation_never_repeats_a_generation() -> None:
    tier = open_tier()
    assert tier.found(0, 16 * KIB)
    slots = np.array([1], dtype=np.uint32)
    old = 2**64 - 10
    tier.adopt(slots, sums(slots), np.array([old], dtype=np.uint64))
    tier.drop(slots)
    tier.free(slots)
    assert tier.take(16 * KIB, 1).slots.tolist() == [1]
    assert tier.generation_of(1) == old + 1


def test_slots_of_a_found_file_are_not_free_before_its_rows_are_read() -> None:
    tier = open_tier()
    assert tier.found(2, 16 * KIB)
    assert tier.free_count(16 * KIB) == 0
    assert tier.unknown_files() == [2]
    slots = tier.slots_at(np.array([2], dtype=np.uint32), np.array([1], dtype=np.uint32))
    tier.adopt(slots, sums(slots), np.array([5], dtype=np.uint64))
    assert tier.settle_file(2) == 2
    assert tier.free_count(16 * KIB) == 2
    assert tier.checksum_of(int(slots[0])) == int(sums(slots)[0])


@pytest.mark.parametrize(
    ("index", "slot_bytes"), [(4, 16 * KIB), (0, 12 * KIB), (0, 17 * KIB), (0, 64 * KIB)]
)
def test_file_that_does_not_fit_is_not_found(index: int, slot_bytes: int) -> None:
    assert not open_tier().found(index, slot_bytes)


def test_places_and_slots_are_the_same_thing(tier: SsdTier) -> None:
    slots = np.array([0, 5, 11, 4, 15], dtype=np.uint32)
    files, indexes = tier.place_of(slots)
    assert (files.tolist(), indexes.tolist()) == ([0, 1, 2, 1, 3], [0, 1, 3, 0, 3])
    assert tier.slots_at(files, indexes).tolist() == slots.tolist()


@pytest.mark.parametrize("slots", [[0, 0], [3], [16]], ids=["twice", "free", "beyond"])
def test_wrong_slots_change_nothing(tier: SsdTier, slots: list[int]) -> None:
    taken = tier.take(16 * KIB, 2).slots
    before = tier.usage_of(16 * KIB)
    wrong = np.array([int(taken[0]), *slots], dtype=np.uint32)
    with pytest.raises(ConfigError):
        tier.publish(wrong, sums(wrong))
    with pytest.raises(ConfigError):
        tier.drop(wrong)
    with pytest.raises(ConfigError):
        tier.free(wrong)
    assert tier.usage_of(16 * KIB) == before


def test_a_tier_of_16_tib_opens_without_touching_its_arrays() -> None:
    tier = SsdTier.open(
        capacity_bytes=2**44, file_bytes=2**30, slot_bytes_min=16 * KIB, incarnation=INCARNATION
    )
    assert tier.file_count == 2**14
    assert tier.take(2**20, 1).files == [FileToMake(0, 2**20)]
