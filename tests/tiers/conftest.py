"""A host tier on a real folder, closed and checked for leaks."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nexuskv.tiers.host import HostTier
from nexuskv.tiers.populate import Allocate, allocate

KIB = 1024
CHUNK_BYTES = 64 * KIB
INCARNATION = bytes.fromhex("a1b2c3d4e5f60718")

OpenTier = Callable[..., HostTier]


def populate(tier: HostTier, chunk_count: int) -> None:
    """Do what control and worker do together for the next chunks."""
    for _ in range(chunk_count):
        chunk_index = tier.chunk_to_populate()
        assert chunk_index is not None
        tier.populate_chunk(chunk_index)
        tier.chunk_populated(chunk_index)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "instances" / "one"


@pytest.fixture
def open_tier(folder: Path) -> Iterator[OpenTier]:
    opened: list[HostTier] = []
    fds = set(os.listdir("/proc/self/fd"))

    def make(
        *,
        folder: Path = folder,
        capacity_bytes: int = 8 * CHUNK_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
        huge_pages: bool = False,
        incarnation: bytes = INCARNATION,
        allocate: Allocate = allocate,
        populated: int = 0,
    ) -> HostTier:
        tier = HostTier.open(
            folder=folder,
            capacity_bytes=capacity_bytes,
            chunk_bytes=chunk_bytes,
            huge_pages=huge_pages,
            incarnation=incarnation,
            allocate=allocate,
        )
        opened.append(tier)
        populate(tier, populated)
        return tier

    yield make
    for tier in opened:
        tier.close(unlink=True)
    assert set(os.listdir("/proc/self/fd")) == fds
    assert not folder.exists()


@pytest.fixture
def tier(open_tier: OpenTier) -> HostTier:
    """Eight chunks of 64 KiB, four of them populated."""
    return open_tier(populated=4)
