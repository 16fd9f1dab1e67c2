"""HostMemory: what the worker does with a real tier through a mapping of its own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nexuskv.dataplane.checksum import hash64, mix
from nexuskv.errors import OutOfSpace, ProtocolError, Unavailable
from nexuskv.tiers.host import HostTier, SlotArray
from nexuskv.types import Descriptor, PageStatus
from nexuskv.worker.host import HostMemory
from tests.worker.settings import settings_of

PAGE = 8192
NAMESPACE = bytes(range(16))
KEY = b"an 8-byte or longer key"


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[HostTier]:
    tier = HostTier.open(
        folder=tmp_path / "one",
        capacity_bytes=1 << 20,
        chunk_bytes=1 << 18,
        huge_pages=False,
        incarnation=bytes(8),
    )
    yield tier
    tier.close(unlink=True)


@pytest.fixture
def memory(tier: HostTier) -> Iterator[HostMemory]:
    memory = HostMemory.open(settings_of(tier))
    yield memory
    memory.close()


def store_page(tier: HostTier, memory: HostMemory) -> tuple[SlotArray, Path]:
    """Commit one page as a client would; returns its slot and the data file."""
    memory.populate_chunk(0)
    tier.chunk_populated(0)
    assert tier.carve(PAGE)
    slots = tier.take(PAGE, 1, pid=1, start_time=1, session=1)
    path = Path(tier.segments()[0].data_path)
    page = bytes(range(256)) * (PAGE // 256)
    with path.open("r+b") as data:
        data.seek(Descriptor.decode(tier.descriptors(slots, PAGE)).offset_bytes)
        data.write(page)
    tier.publish(
        slots,
        namespace_id=NAMESPACE,
        keys=KEY,
        key_bytes=len(KEY),
        parent_state=2,
        parent=b"",
        epoch=0,
        checksums=np.array([hash64(page) ^ mix(NAMESPACE, KEY)], dtype=np.uint64),
    )
    return slots, path


def test_a_good_page_is_a_hit(tier: HostTier, memory: HostMemory) -> None:
    slots, _ = store_page(tier, memory)
    status = memory.check_page(tier.descriptors(slots, PAGE), NAMESPACE, KEY)
    assert status is PageStatus.HIT


def test_a_flipped_byte_is_corrupt(tier: HostTier, memory: HostMemory) -> None:
    slots, path = store_page(tier, memory)
    descriptor = tier.descriptors(slots, PAGE)
    with path.open("r+b") as data:
        data.seek(Descriptor.decode(descriptor).offset_bytes + 4000)
        data.write(b"\xff")
    assert memory.check_page(descriptor, NAMESPACE, KEY) is PageStatus.CORRUPT


def test_a_page_of_another_namespace_is_corrupt(tier: HostTier, memory: HostMemory) -> None:
    slots, _ = store_page(tier, memory)
    status = memory.check_page(tier.descriptors(slots, PAGE), bytes(16), KEY)
    assert status is PageStatus.CORRUPT


def test_a_slot_with_another_owner_is_stale(tier: HostTier, memory: HostMemory) -> None:
    slots, _ = store_page(tier, memory)
    descriptor = tier.descriptors(slots, PAGE)
    tier.free(slots)
    assert memory.check_page(descriptor, NAMESPACE, KEY) is PageStatus.STALE


def test_a_slot_is_the_page_rounded_up_and_writable(tier: HostTier, memory: HostMemory) -> None:
    slots, path = store_page(tier, memory)
    offset = Descriptor.decode(tier.descriptors(slots, PAGE)).offset_bytes
    with memory.slot(offset, PAGE - 100) as slot:
        assert len(slot) == PAGE
        slot[5:8] = b"new"
    with path.open("rb") as data:
        data.seek(offset + 5)
        assert data.read(3) == b"new"


@pytest.mark.parametrize("offset", [1, (1 << 20) - 4096, 1 << 20, 1 << 40])
def test_memory_outside_the_segment_is_no_slot(memory: HostMemory, offset: int) -> None:
    with pytest.raises(ProtocolError):
        memory.slot(offset, PAGE)


def test_a_chunk_past_the_end_is_refused(memory: HostMemory) -> None:
    with pytest.raises(OutOfSpace):
        memory.populate_chunk(4)


def test_a_segment_that_is_not_there_is_unavailable(tier: HostTier) -> None:
    settings = replace(settings_of(tier), data_path="/dev/shm/nexuskv-none")
    with pytest.raises(Unavailable):
        HostMemory.open(settings)
