"""HostTools: the worker's commands on a real tier and a real mapping."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nexuskv.dataplane.checksum import hash64, mix
from nexuskv.tiers.host import HostTier, SlotArray
from nexuskv.types import Descriptor, PageStatus
from nexuskv.worker.host import HostTools

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
def tools(tier: HostTier) -> Iterator[HostTools]:
    tools = HostTools.open(tier)
    yield tools
    tools.close()


def store_page(tier: HostTier, tools: HostTools) -> tuple[SlotArray, Path]:
    """Commit one page as a client would; returns its slot and the data file."""
    tools.populate_chunk(0)
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


def test_a_good_page_is_a_hit(tier: HostTier, tools: HostTools) -> None:
    slots, _ = store_page(tier, tools)
    status = tools.check_page(tier.descriptors(slots, PAGE), NAMESPACE, KEY)
    assert status is PageStatus.HIT


def test_a_flipped_byte_is_corrupt(tier: HostTier, tools: HostTools) -> None:
    slots, path = store_page(tier, tools)
    descriptor = tier.descriptors(slots, PAGE)
    with path.open("r+b") as data:
        data.seek(Descriptor.decode(descriptor).offset_bytes + 4000)
        data.write(b"\xff")
    assert tools.check_page(descriptor, NAMESPACE, KEY) is PageStatus.CORRUPT


def test_a_page_of_another_namespace_is_corrupt(tier: HostTier, tools: HostTools) -> None:
    slots, _ = store_page(tier, tools)
    status = tools.check_page(tier.descriptors(slots, PAGE), bytes(16), KEY)
    assert status is PageStatus.CORRUPT


def test_a_slot_with_another_owner_is_stale(tier: HostTier, tools: HostTools) -> None:
    slots, _ = store_page(tier, tools)
    descriptor = tier.descriptors(slots, PAGE)
    tier.free(slots)
    assert tools.check_page(descriptor, NAMESPACE, KEY) is PageStatus.STALE
