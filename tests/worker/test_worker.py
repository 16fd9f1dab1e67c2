"""Worker: a bounded queue, results behind an eventfd, and a thread that outlives errors."""

import os
import select
import threading
from collections.abc import Iterator

import pytest

from nexuskv.errors import OutOfSpace, Unavailable
from nexuskv.types import PageStatus
from nexuskv.worker.commands import (
    CheckPage,
    ChunkPopulated,
    PageChecked,
    PopulateChunk,
    Result,
)
from nexuskv.worker.worker import Worker

WAIT_S = 10
FULL, BROKEN = 40, 41


class Tools:
    """Stands for the host tier; `gate` holds the worker inside a command."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.thread_name = ""
        self.scheduling: tuple[int, int] = (0, 0)

    def populate_chunk(self, chunk_index: int) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self.thread_name = threading.current_thread().name
        thread = threading.get_native_id()
        self.scheduling = (
            os.sched_getscheduler(thread),
            os.getpriority(os.PRIO_PROCESS, thread),
        )
        if chunk_index == FULL:
            raise OutOfSpace("no room")
        if chunk_index == BROKEN:
            raise RuntimeError("a bug")

    def check_page(self, descriptor: bytes, namespace_id: bytes, key: bytes) -> PageStatus:
        if key == b"broken key":
            raise RuntimeError("a bug")
        return PageStatus.CORRUPT


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
def worker(tools: Tools) -> Iterator[Worker]:
    fds = set(os.listdir("/proc/self/fd"))
    worker = Worker(queue_max=4, run=tools)
    worker.start()
    yield worker
    tools.gate.set()
    assert worker.close(WAIT_S)
    assert set(os.listdir("/proc/self/fd")) == fds


def wait_for(worker: Worker, count: int) -> list[Result]:
    results: list[Result] = []
    while len(results) < count:
        assert select.select([worker.fileno()], [], [], WAIT_S)[0], "no result in time"
        results += worker.completed()
    return results


def test_commands_are_answered_in_order(worker: Worker) -> None:
    assert worker.submit(PopulateChunk(1))
    assert worker.submit(CheckPage(9, bytes(32), bytes(16), b"some key"))
    assert wait_for(worker, 2) == [
        ChunkPopulated(1, None),
        PageChecked(9, PageStatus.CORRUPT),
    ]


def test_completed_never_waits(worker: Worker) -> None:
    assert worker.completed() == []


def test_the_eventfd_is_quiet_once_results_are_collected(worker: Worker) -> None:
    worker.submit(PopulateChunk(1))
    wait_for(worker, 1)
    assert select.select([worker.fileno()], [], [], 0)[0] == []


def test_a_full_queue_refuses(worker: Worker, tools: Tools) -> None:
    tools.gate.clear()
    assert [worker.submit(PopulateChunk(i)) for i in range(5)] == [True] * 4 + [False]


def test_uncollected_results_count_against_the_bound(worker: Worker) -> None:
    for index in range(4):
        assert worker.submit(PopulateChunk(index))
    assert select.select([worker.fileno()], [], [], WAIT_S)[0]
    assert not worker.submit(PopulateChunk(4))


def test_collecting_makes_room_again(worker: Worker) -> None:
    for index in range(4):
        worker.submit(PopulateChunk(index))
    wait_for(worker, 4)
    assert worker.submit(PopulateChunk(4))


def test_a_store_fault_is_a_failed_result(worker: Worker) -> None:
    worker.submit(PopulateChunk(FULL))
    assert wait_for(worker, 1) == [ChunkPopulated(FULL, "no room")]
    assert worker.failed_count == 1


def test_an_unexpected_error_is_logged_and_the_thread_goes_on(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.submit(PopulateChunk(BROKEN))
    worker.submit(CheckPage(5, bytes(32), bytes(16), b"broken key"))
    worker.submit(PopulateChunk(1))
    assert wait_for(worker, 3) == [
        ChunkPopulated(BROKEN, "a bug"),
        PageChecked(5, PageStatus.UNAVAILABLE),
        ChunkPopulated(1, None),
    ]
    assert worker.failed_count == 2
    assert len(caplog.records) == 2


def test_the_thread_is_named_and_steps_back(worker: Worker, tools: Tools) -> None:
    worker.submit(PopulateChunk(1))
    wait_for(worker, 1)
    assert tools.thread_name == "nexuskv-worker"
    assert tools.scheduling == (os.SCHED_BATCH, 19)


def test_only_the_worker_thread_steps_back(worker: Worker) -> None:
    worker.submit(PopulateChunk(1))
    wait_for(worker, 1)
    assert os.sched_getscheduler(threading.get_native_id()) == os.SCHED_OTHER


def test_close_while_busy_is_bounded(worker: Worker, tools: Tools) -> None:
    tools.gate.clear()
    worker.submit(PopulateChunk(1))
    assert tools.entered.wait(WAIT_S)
    assert worker.close(0) is False
    tools.gate.set()
    assert worker.close(WAIT_S) is True


def test_close_drops_what_is_queued(worker: Worker, tools: Tools) -> None:
    tools.gate.clear()
    worker.submit(PopulateChunk(1))
    worker.submit(PopulateChunk(FULL))
    assert tools.entered.wait(WAIT_S)
    worker.close(0)
    tools.gate.set()
    assert worker.close(WAIT_S)
    assert worker.failed_count == 0


def test_a_closed_worker_takes_and_gives_nothing(worker: Worker) -> None:
    worker.close(WAIT_S)
    assert not worker.submit(PopulateChunk(1))
    assert worker.completed() == []
    with pytest.raises(Unavailable, match="closed"):
        worker.fileno()


def test_a_worker_that_never_started_closes(tools: Tools) -> None:
    assert Worker(queue_max=1, run=tools).close(0) is True
