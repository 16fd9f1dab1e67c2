"""Chunks are populated one after another, whatever else fills the worker's queue."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nexuskv.control.counters import Counters
from nexuskv.control.supply import Supply
from nexuskv.tiers.host import HostTier
from nexuskv.worker.commands import ChunkPopulated, Command, PopulateChunk

CHUNK_BYTES = 65536


class Queue:
    """A worker's queue of a chosen length that a test empties."""

    def __init__(self) -> None:
        self.room = 1
        self.taken: list[Command] = []

    def submit(self, command: Command) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.taken.append(command)
        return True

    def completed(self) -> list[ChunkPopulated | object]:
        return []

    def fileno(self) -> int:
        return -1


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[HostTier]:
    tier = HostTier.open(
        folder=tmp_path / "t",
        capacity_bytes=3 * CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        huge_pages=False,
        incarnation=bytes(8),
    )
    yield tier
    tier.close(unlink=True)


def supply_of(tier: HostTier, queue: Queue, ready: list[bool]) -> Supply:
    return Supply(
        tier=tier,
        worker=queue,  # type: ignore[arg-type]  # answers nothing
        counters=Counters(),
        on_first=lambda: ready.append(True),
    )


def test_one_chunk_is_asked_for_at_a_time(tier: HostTier) -> None:
    queue = Queue()
    queue.room = 10
    supply = supply_of(tier, queue, [])
    for _ in range(3):
        supply.next()
    assert queue.taken == [PopulateChunk(0)]


def test_a_queue_that_was_full_is_asked_again(tier: HostTier) -> None:
    queue = Queue()
    queue.room = 0
    supply = supply_of(tier, queue, [])
    supply.next()
    queue.room = 1
    supply.next()
    assert queue.taken == [PopulateChunk(0)]


def test_every_chunk_is_tried_once_also_after_one_failed(tier: HostTier) -> None:
    queue = Queue()
    queue.room = 10
    supply = supply_of(tier, queue, [])
    supply.next()
    for at, error in enumerate([None, "full", None]):
        assert queue.taken[-1] == PopulateChunk(at)
        supply.populated(ChunkPopulated(at, error))
        supply.next()
    assert len(queue.taken) == 3
    assert tier.populated_bytes == 2 * CHUNK_BYTES


def test_ready_is_said_once_when_the_first_chunk_has_memory(tier: HostTier) -> None:
    queue, ready = Queue(), list[bool]()
    queue.room = 10
    supply = supply_of(tier, queue, ready)
    supply.next()
    for at, error in enumerate(["full", None, None]):
        assert ready == [True] * (at > 1)
        supply.populated(ChunkPopulated(at, error))
        supply.next()
    assert ready == [True]


def test_a_chunk_that_a_worker_died_with_is_tried_again(tier: HostTier) -> None:
    queue = Queue()
    queue.room = 10
    supply = supply_of(tier, queue, [])
    supply.next()
    for _ in range(2):
        supply.worker_lost()
        supply.populated(ChunkPopulated(0, "the worker was lost"))
        supply.next()
    assert queue.taken == [PopulateChunk(0)] * 3
    supply.populated(ChunkPopulated(0, None))
    assert (tier.populated_bytes, tier.failed_chunks) == (CHUNK_BYTES, 0)


def test_a_chunk_that_kills_every_worker_is_given_up(tier: HostTier) -> None:
    queue = Queue()
    queue.room = 10
    supply = supply_of(tier, queue, [])
    supply.next()
    for _ in range(3):
        supply.worker_lost()
        supply.populated(ChunkPopulated(0, "the worker was lost"))
        supply.next()
    assert queue.taken[-1] == PopulateChunk(1)
    assert tier.failed_chunks == 1


def test_a_worker_lost_while_no_chunk_was_asked_for_excuses_nothing(tier: HostTier) -> None:
    queue = Queue()
    queue.room = 10
    supply = supply_of(tier, queue, [])
    supply.worker_lost()
    supply.next()
    supply.populated(ChunkPopulated(0, "full"))
    assert tier.failed_chunks == 1
