"""Pools: jobs run once, urgent ones first, and no error ends a thread."""

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from nexuskv.errors import OutOfSpace
from nexuskv.worker.lanes import Job, Pool

WAIT_S = 10


class Log:
    """What jobs did, in order; `wait` for a number of entries."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._changed = threading.Condition()

    def add(self, entry: str) -> None:
        with self._changed:
            self.entries.append(entry)
            self._changed.notify_all()

    def wait(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.entries) >= count, WAIT_S)
            return list(self.entries)

    def job(self, name: str, before: Callable[[], object] = lambda: None) -> Job:
        def run() -> None:
            before()
            self.add(name)

        return Job(run, lambda reason: self.add(f"{name}: {reason}"))


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def start() -> Iterator[Callable[[int], Pool]]:
    pools: list[Pool] = []

    def make(thread_count: int) -> Pool:
        pools.append(Pool("test", thread_count))
        return pools[-1]

    yield make
    for pool in pools:
        assert pool.close(WAIT_S)


def raise_(error: Exception) -> None:
    raise error


def test_jobs_of_a_kind_run_in_order(start: Callable[[int], Pool], log: Log) -> None:
    pool = start(1)
    for name in "abc":
        pool.put(log.job(name))
    assert log.wait(3) == ["a", "b", "c"]


def test_a_failing_job_says_why_and_the_next_runs(
    start: Callable[[int], Pool], log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    pool = start(1)
    pool.put(log.job("full", lambda: raise_(OutOfSpace("no room"))))
    pool.put(log.job("bug", lambda: raise_(RuntimeError("oops"))))
    pool.put(log.job("next"))
    assert log.wait(3) == ["full: no room", "bug: oops", "next"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_urgent_jobs_overtake(start: Callable[[int], Pool], log: Log) -> None:
    pool, gate = start(1), threading.Event()
    pool.put(log.job("first", lambda: gate.wait(WAIT_S)), urgent=True)
    pool.put(log.job("background"))
    pool.put(log.job("urgent"), urgent=True)
    gate.set()
    assert log.wait(3) == ["first", "urgent", "background"]


def test_background_jobs_leave_half_of_the_threads(start: Callable[[int], Pool], log: Log) -> None:
    pool, gate = start(4), threading.Event()
    for _ in range(10):
        pool.put(log.job("background", lambda: gate.wait(WAIT_S)))
    for _ in range(2):
        pool.put(log.job("urgent"), urgent=True)
    assert log.wait(2) == ["urgent", "urgent"]
    gate.set()
    assert log.wait(12)[2:] == ["background"] * 10


def test_urgent_jobs_leave_a_background_job_one_thread(
    start: Callable[[int], Pool], log: Log
) -> None:
    pool, gate = start(2), threading.Event()
    for _ in range(6):
        pool.put(log.job("urgent", lambda: gate.wait(WAIT_S)), urgent=True)
    pool.put(log.job("background"))
    pool.put(log.job("one more"), urgent=True)
    gate.set()
    assert "background" in log.wait(4), "it does not wait for all six"
    log.wait(8)


def test_closing_drops_what_has_not_begun(start: Callable[[int], Pool], log: Log) -> None:
    pool, gate, entered = start(1), threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        gate.wait(WAIT_S)

    pool.put(log.job("running", hold))
    pool.put(log.job("queued"))
    assert entered.wait(WAIT_S)
    assert pool.close(0) is False
    gate.set()
    assert pool.close(WAIT_S)
    assert log.entries == ["running"]


def test_a_closed_pool_fails_jobs(start: Callable[[int], Pool], log: Log) -> None:
    pool = start(1)
    pool.close(WAIT_S)
    pool.put(log.job("late"))
    assert log.entries == ["late: the worker ends"]
