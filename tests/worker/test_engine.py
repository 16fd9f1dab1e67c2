"""The engine: every command is answered once, for every page, whatever the tools do."""

import os
import threading
from collections.abc import Iterator

import pytest

from nexuskv.errors import OutOfSpace, TransferFailed
from nexuskv.types import PageStatus
from nexuskv.worker.answers import NEWS
from nexuskv.worker.commands import (
    CheckPages,
    CheckRow,
    ChunkPopulated,
    Command,
    CopiedIn,
    CopyIn,
    CopyInRow,
    LoadRows,
    PagesChecked,
    PopulateChunk,
    Result,
    RowsLoaded,
    WorkerReady,
)
from nexuskv.worker.engine import Engine
from tests.worker.replies import Replies

WAIT_S = 10
FULL, BROKEN = 40, 41


class Memory:
    """Stands for host memory; `gate` holds the thread inside a command."""

    native = "test"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def populate_chunk(self, chunk_index: int) -> None:
        assert self.gate.wait(WAIT_S)
        if chunk_index == FULL:
            raise OutOfSpace("no room")
        if chunk_index == BROKEN:
            raise RuntimeError("a bug")

    def check_page(self, descriptor: bytes, namespace_id: bytes, key: bytes) -> PageStatus:
        if key == b"gone":
            raise TransferFailed("no such page")
        return PageStatus.CORRUPT if key == b"bad" else PageStatus.HIT

    def slot(self, offset_bytes: int, size_bytes: int) -> memoryview:
        raise AssertionError("for an ssd alone")

    def check_landed(
        self, offset_bytes: int, size_bytes: int, checksum: int, namespace_id: bytes, key: bytes
    ) -> PageStatus:
        raise AssertionError("for an ssd alone")

    def check_apart(
        self, data: memoryview, checksum: int, namespace_id: bytes, key: bytes
    ) -> PageStatus:
        raise AssertionError("for an ssd alone")


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def replies() -> Replies:
    return Replies()


@pytest.fixture
def engine(memory: Memory, replies: Replies) -> Iterator[Engine]:
    engine = Engine(memory=memory, reply=replies)
    yield engine
    memory.gate.set()
    assert engine.close(WAIT_S)


def page(key: bytes) -> CheckRow:
    return CheckRow(bytes(32), bytes(16), key)


def test_it_says_hello_first(engine: Engine, replies: Replies) -> None:
    engine.start()
    ready = WorkerReady(os.getpid(), "test", None, (), ())
    assert replies.wait(1) == [(NEWS, ready)]


def test_answers_carry_the_sequence_of_their_command(engine: Engine, replies: Replies) -> None:
    engine.take(7, PopulateChunk(3))
    engine.take(8, PopulateChunk(4))
    assert replies.wait(2) == [(7, ChunkPopulated(3, None)), (8, ChunkPopulated(4, None))]


def test_every_page_has_a_status_of_its_own(engine: Engine, replies: Replies) -> None:
    engine.take(1, CheckPages(9, (page(b"good"), page(b"gone"), page(b"bad"))))
    statuses = bytes((PageStatus.HIT, PageStatus.UNAVAILABLE, PageStatus.CORRUPT))
    assert replies.wait(1) == [(1, PagesChecked(9, statuses))]


@pytest.mark.parametrize(("chunk", "reason"), [(FULL, "no room"), (BROKEN, "a bug")])
def test_a_failure_is_an_answer(engine: Engine, replies: Replies, chunk: int, reason: str) -> None:
    engine.take(1, PopulateChunk(chunk))
    engine.take(2, PopulateChunk(1))
    assert replies.wait(2) == [(1, ChunkPopulated(chunk, reason)), (2, ChunkPopulated(1, None))]


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (
            CopyIn(3, (CopyInRow(0, 0, 1, 2, bytes(16), b"key", 0),) * 2),
            CopiedIn(3, 0, bytes((PageStatus.UNAVAILABLE,) * 2)),
        ),
        (LoadRows(4, b""), RowsLoaded(4, b"", b"", b"", "this worker serves no ssd tier")),
    ],
)
def test_without_an_ssd_its_commands_fail(
    engine: Engine, replies: Replies, command: Command, answer: Result
) -> None:
    engine.take(1, command)
    assert replies.wait(1) == [(1, answer)]


def test_draining_waits_for_every_answer(engine: Engine, memory: Memory, replies: Replies) -> None:
    memory.gate.clear()
    engine.take(1, PopulateChunk(1))
    assert not engine.drain(0)
    memory.gate.set()
    assert engine.drain(WAIT_S)
    assert len(replies.wait(1)) == 1


def test_closing_while_busy_is_bounded(engine: Engine, memory: Memory) -> None:
    memory.gate.clear()
    engine.take(1, PopulateChunk(1))
    assert engine.close(0) is False
