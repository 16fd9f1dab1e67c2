"""The poll-and-drain loop: whom it calls, and that nothing one callback does ends it."""

import os
import threading
from collections.abc import Iterator

import pytest

from nexuskv.clock import ManualClock
from nexuskv.control.counters import Counters
from nexuskv.control.loop import READ, Loop
from nexuskv.errors import TransferTimeout, Unavailable
from tests.control.raw import PATIENCE_S


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def loop(clock: ManualClock, counters: Counters) -> Iterator[Loop]:
    loop = Loop(clock, counters)
    yield loop
    loop.close()


@pytest.fixture
def running(loop: Loop) -> Iterator[Loop]:
    """A loop that turns in a thread."""
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


class Due:
    """A ticker that is due at some time, once."""

    def __init__(self, loop: Loop, due_s: float | None) -> None:
        self.due_s = due_s
        self._loop = loop

    def next_due(self) -> float | None:
        return self.due_s

    def tick(self, now_s: float) -> None:
        assert self.due_s is not None
        assert now_s >= self.due_s
        self.due_s = None
        self._loop.stop()


def test_events_of_a_closed_descriptor_never_reach_the_new_owner_of_its_number(loop: Loop) -> None:
    """A pidfd that took over a closed socket's number would pass for an exited process."""
    old = [os.eventfd(1), os.eventfd(1)]
    new: list[int] = []
    called: list[int] = []

    def replace(other: int) -> None:
        loop.forget(other)
        os.close(other)
        new.append(os.eventfd(0))
        assert new == [other], "the kernel gives the lowest free number"
        loop.watch(new[0], READ, lambda _events: called.append(new[0]))
        loop.stop()

    def first_of(fd: int) -> None:
        if not new:
            os.eventfd_read(fd)
            replace(old[1 - old.index(fd)])

    for fd in old:
        loop.watch(fd, READ, lambda _events, fd=fd: first_of(fd))  # type: ignore[misc]  # a default
    loop.run()
    left = [fd for fd in old if fd not in new] + new
    for fd in left:
        loop.forget(fd)
        os.close(fd)
    assert called == []


def test_a_callback_that_fails_is_logged_and_counted_and_the_loop_turns_on(
    running: Loop, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    fd = os.eventfd(1)

    def fail(_events: int) -> None:
        os.eventfd_read(fd)
        raise RuntimeError("a defect")

    running.call(lambda: running.watch(fd, READ, fail), timeout_s=PATIENCE_S)
    while not counters.snapshot()["internal_errors"]:
        running.call(lambda: None, timeout_s=PATIENCE_S)
    assert "a defect" in caplog.text
    running.call(lambda: running.forget(fd), timeout_s=PATIENCE_S)
    os.close(fd)


def test_a_call_returns_what_its_function_returned(running: Loop) -> None:
    assert running.call(lambda: threading.current_thread().name, timeout_s=PATIENCE_S) != (
        threading.current_thread().name
    )


def test_a_call_raises_what_its_function_raised(running: Loop) -> None:
    with pytest.raises(ZeroDivisionError):
        running.call(lambda: 1 // 0, timeout_s=PATIENCE_S)


def test_a_call_that_the_loop_does_not_get_to_times_out(loop: Loop) -> None:
    with pytest.raises(TransferTimeout, match="did not answer"):
        loop.call(lambda: None, timeout_s=0.01)


def test_calls_beyond_the_mailbox_are_refused(loop: Loop) -> None:
    refused = 0
    for _ in range(1030):
        try:
            loop.call(lambda: None, timeout_s=0)
        except TransferTimeout:
            continue
        except Unavailable:
            refused += 1
    assert refused == 6


def test_a_closed_loop_refuses_calls_and_ignores_stop(loop: Loop) -> None:
    loop.close()
    with pytest.raises(Unavailable, match="ended"):
        loop.call(lambda: None, timeout_s=PATIENCE_S)
    loop.stop()
    loop.close()


def test_what_is_due_runs(loop: Loop, clock: ManualClock) -> None:
    clock.advance(5.0)
    never, due = Due(loop, None), Due(loop, 5.0)
    loop.add_ticker(never)
    loop.add_ticker(due)
    loop.run()
    assert due.due_s is None


def test_what_is_due_in_a_hundred_days_is_no_error(loop: Loop, counters: Counters) -> None:
    loop.add_ticker(Due(loop, 100 * 86400.0))
    loop.wake()
    loop.add_drain(loop.stop)
    loop.run()
    assert counters.snapshot()["internal_errors"] == 0
