"""The supervisor against real processes that die, hang, lie and cannot be killed."""

import os
import select
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nexuskv.clock import ManualClock
from nexuskv.control.worker_process import WorkerProcess
from nexuskv.errors import Unavailable
from nexuskv.tiers.owner import Process
from nexuskv.types import PageStatus
from nexuskv.worker.commands import (
    CheckPages,
    CheckRow,
    ChunkPopulated,
    CopiedIn,
    CopyIn,
    CopyInRow,
    PagesChecked,
    PopulateChunk,
    WorkerLost,
)
from tests.control.workers import MISBEHAVING, PATIENCE_S, Immortal, Watched, run_script

UNAVAILABLE = bytes((PageStatus.UNAVAILABLE,))
PAGE = CheckRow(bytes(32), bytes(16), b"an 8-byte key")
READY_AND_GONE = MISBEHAVING.split("sequence,", maxsplit=1)[0]


@pytest.fixture
def folder(shm_dir: Path) -> Path:
    return shm_dir / "s"


def gone(pid: int) -> bool:
    return Process.of(pid) is None


def test_commands_are_answered(folder: Path) -> None:
    with Watched(folder) as watched:
        assert watched.supervisor.submit(PopulateChunk(2)), "it may follow the start at once"
        watched.until(lambda: ChunkPopulated(2, None) in watched.results)
        assert os.stat(watched.tier.segments()[0].data_path).st_blocks * 512 == 1 << 20


def test_a_worker_steps_back_for_others(folder: Path) -> None:
    with Watched(folder) as watched:
        watched.until_ready()
        assert os.sched_getscheduler(watched.pid) == os.SCHED_BATCH
        assert os.getpriority(os.PRIO_PROCESS, watched.pid) == 19
        assert os.getsid(watched.pid) == watched.pid


def test_a_worker_killed_while_idle_is_replaced(folder: Path) -> None:
    with Watched(folder) as watched:
        watched.until_ready()
        os.kill(watched.pid, signal.SIGKILL)
        watched.until_ready(2)
        assert watched.supervisor.submit(PopulateChunk(1))
        watched.until(lambda: watched.of(ChunkPopulated))
        assert len(watched.of(WorkerLost)) == 1
        assert [watched.counter(name) for name in ("worker_starts", "worker_lost")] == [2, 1]


def test_what_a_dead_worker_left_is_failed_after_its_loss_is_told(folder: Path) -> None:
    with Watched(folder) as watched:
        watched.until_ready()
        os.kill(watched.pid, signal.SIGSTOP)
        watched.supervisor.submit(PopulateChunk(1))
        watched.supervisor.submit(CheckPages(7, (PAGE, PAGE)))
        os.kill(watched.pid, signal.SIGKILL)
        watched.until_ready(2)
        lost, *failed = watched.results[1:-1]
        assert isinstance(lost, WorkerLost)
        assert isinstance(failed[0], ChunkPopulated)
        assert failed[0].error is not None
        assert failed[1:] == [PagesChecked(7, UNAVAILABLE * 2)]


def test_answers_that_a_dying_worker_had_sent_still_count(folder: Path) -> None:
    with Watched(folder) as watched:
        watched.until_ready()
        watched.supervisor.submit(PopulateChunk(1))
        select_answer(watched)
        os.kill(watched.pid, signal.SIGKILL)
        watched.until_ready(2)
        assert watched.of(ChunkPopulated) == [ChunkPopulated(1, None)]


def select_answer(watched: Watched) -> None:
    """Wait until an answer lies in the socket, and leave it there."""
    poll = select.poll()
    poll.register(watched.supervisor.fileno())
    assert poll.poll(PATIENCE_S * 1000)


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_stopped_worker_is_killed_reaped_and_replaced(folder: Path, busy: bool) -> None:
    with Watched(folder, timeout_s=0.5) as watched:
        watched.until_ready()
        first = watched.pid
        os.kill(first, signal.SIGSTOP)
        if busy:
            assert watched.supervisor.submit(PopulateChunk(1))
        watched.until(lambda: watched.of(WorkerLost))
        assert gone(first), "reaped before anything is told"
        assert len(watched.of(ChunkPopulated)) == busy
        watched.until_ready(2)


def test_a_worker_that_answers_pings_is_left_alone(folder: Path) -> None:
    clock = ManualClock()
    with Watched(folder, clock=clock, timeout_s=8.0) as watched:
        watched.until_ready()
        for _ in range(20):
            clock.advance(2.0)
            watched.turn()
            assert watched.supervisor.gauges()["worker_unanswered"] == 1
            watched.until(lambda: not watched.supervisor.gauges()["worker_unanswered"])
        assert watched.started == [watched.pid]


LIES = {
    "a giant frame": "end.sendall(b'\\xff' * 4)",
    "bytes": "end.sendall(b'\\5\\0\\0\\0hello')",
    "an unknown answer": "link.send(sequence + 1, ChunkPopulated(1, None))",
    "an answer to another chunk": "link.send(sequence, ChunkPopulated(2, None))",
    "an answer of another kind": "link.send(sequence, PagesChecked(1, b''))",
    "a command": "link.send(0, PopulateChunk(1))",
    "settings": "link.send(0, Ping())",
    "silence and a closed socket": "end.shutdown(socket.SHUT_RDWR)",
    "an exit": "sys.exit(3)",
    "a signal": "os.kill(os.getpid(), signal.SIGSEGV)",
    "half a frame and an exit": "end.sendall(b'\\5\\0\\0\\0he'); os._exit(0)",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_worker_that_lies_or_leaves_is_replaced(folder: Path, lie: str) -> None:
    scripts = [MISBEHAVING.format(act=lie)]

    def start() -> WorkerProcess:
        return run_script(scripts.pop()) if scripts else watched.start_real()

    watched = Watched(folder, start)
    with watched:
        watched.until_ready()
        assert watched.supervisor.submit(PopulateChunk(1))
        watched.until_ready(2)
        assert gone(watched.started[0])
        (answer,) = watched.of(ChunkPopulated)
        assert isinstance(answer, ChunkPopulated)
        assert answer.error is not None


def test_pages_answered_before_the_loss_are_not_failed_again(folder: Path) -> None:
    script = MISBEHAVING.format(act="link.send(sequence, CopiedIn(5, 1, b'\\0')); sys.exit(1)")
    row = CopyInRow(0, 0, 4096, 1, bytes(16), b"an 8-byte key", 0)
    with Watched(folder, partial(run_script, script)) as watched:
        watched.until_ready()
        watched.supervisor.submit(CopyIn(5, (row,) * 3))
        watched.until(lambda: len(watched.of(CopiedIn)) == 3)
        assert watched.of(CopiedIn) == [
            CopiedIn(5, 1, b"\0"),
            CopiedIn(5, 0, UNAVAILABLE),
            CopiedIn(5, 2, UNAVAILABLE),
        ]


def test_while_a_worker_cannot_be_reaped_nothing_is_answered_and_none_is_started(
    folder: Path,
) -> None:
    made: list[Immortal] = []

    def start() -> WorkerProcess:
        if made:
            return watched.start_real()
        made.append(Immortal.start(executable=sys.executable, lock_fd=watched.tier.lock.fileno()))
        return made[0]

    clock = ManualClock()
    watched = Watched(folder, start, clock=clock, timeout_s=5.0, reap_s=2.0)
    with watched:
        watched.until_ready()
        os.kill(watched.pid, signal.SIGSTOP)
        assert watched.supervisor.submit(PopulateChunk(1))
        clock.advance(5.0)
        for _ in range(20):
            watched.turn(0.01)
            clock.advance(1.0)
        assert watched.supervisor.gauges()["worker_unreaped"] == 1
        assert not watched.of(WorkerLost)
        assert not watched.of(ChunkPopulated)
        assert not watched.supervisor.submit(PopulateChunk(2))
        assert len(watched.started) == 1
        made[0].die()
        watched.until(lambda: watched.of(ChunkPopulated))
        clock.advance(1.0)
        watched.until_ready(2)
        assert watched.supervisor.gauges()["worker_unreaped"] == 0


def test_a_worker_that_fails_again_and_again_is_started_ever_more_rarely(folder: Path) -> None:
    clock = ManualClock()
    watched = Watched(
        folder, partial(run_script, READY_AND_GONE), clock=clock, backoff_min_s=1, backoff_max_s=5
    )
    with watched:
        pauses: list[float] = []
        for number in range(6):
            watched.until_lost(number + 1)
            due_s = watched.supervisor.next_due()
            assert due_s is not None
            pauses.append(due_s - clock.now())
            watched.turn()
            assert len(watched.started) == number + 1, "not before its time"
            clock.advance(pauses[-1])
        assert pauses == [1, 2, 4, 5, 5, 5]


def test_a_worker_that_lived_long_is_replaced_soon(folder: Path) -> None:
    clock = ManualClock()
    with Watched(folder, clock=clock, backoff_min_s=1, backoff_max_s=5) as watched:
        for number in range(3):
            watched.until_ready(number + 1)
            clock.advance(5.0)
            os.kill(watched.pid, signal.SIGKILL)
            watched.until_lost(number + 1)
            clock.advance(1.0)


def test_a_successor_that_cannot_be_made_is_tried_again(folder: Path) -> None:
    faults: list[OSError] = []

    def start() -> WorkerProcess:
        if faults:
            raise faults.pop()
        return watched.start_real()

    watched = Watched(folder, start)
    with watched:
        watched.until_ready()
        faults += [OSError("no process"), OSError("no descriptor")]
        os.kill(watched.pid, signal.SIGKILL)
        watched.until_ready(2)
        assert faults == []
        assert len(watched.of(WorkerLost)) == 1


def fail_to_exec() -> WorkerProcess:
    return WorkerProcess.start(executable="/nowhere/python", lock_fd=0)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(fail_to_exec, id="no executable"),
        pytest.param(partial(run_script, "import nothing_of_this_name"), id="no module"),
        pytest.param(partial(run_script, "print(" * 3), id="no program"),
    ],
)
def test_a_first_worker_that_cannot_start_is_told_and_not_tried_again(
    folder: Path, start: Callable[[], WorkerProcess]
) -> None:
    with Watched(folder, start) as watched:
        watched.until(lambda: watched.failed_starts)
        assert watched.supervisor.next_due() is None
        assert not watched.supervisor.submit(PopulateChunk(1))


def test_a_first_worker_that_is_killed_has_a_successor(folder: Path) -> None:
    with Watched(folder) as watched:
        os.kill(watched.pid, signal.SIGKILL)
        watched.until_ready(1)
        assert len(watched.started) == 2
        assert watched.failed_starts == []


def test_a_bound_on_commands_refuses(folder: Path) -> None:
    with Watched(folder, queue_max=3) as watched:
        watched.until_ready()
        os.kill(watched.pid, signal.SIGSTOP)
        taken = [watched.supervisor.submit(PopulateChunk(at)) for at in range(4)]
        assert taken == [True, True, True, False]
        os.kill(watched.pid, signal.SIGCONT)
        watched.until(lambda: len(watched.of(ChunkPopulated)) == 3)
        assert watched.supervisor.submit(PopulateChunk(3))


def test_a_bound_on_unsent_bytes_refuses_and_what_was_taken_is_sent(folder: Path) -> None:
    with Watched(folder, queue_max=1 << 20, socket_bytes_max=1 << 18) as watched:
        watched.until_ready()
        os.kill(watched.pid, signal.SIGSTOP)
        taken = 0
        while watched.supervisor.submit(CheckPages(taken, (PAGE,) * 100)):
            taken += 1
        assert 0 < taken < 1000
        os.kill(watched.pid, signal.SIGCONT)
        watched.until(lambda: len(watched.of(PagesChecked)) == taken)
        assert watched.supervisor.gauges()["worker_unanswered"] == 0


def test_it_sleeps_while_nothing_is_to_be_done(folder: Path) -> None:
    with Watched(folder) as watched:
        watched.until_ready()
        os.kill(watched.pid, signal.SIGSTOP)
        watched.supervisor.submit(PopulateChunk(1))
        poll = select.poll()
        poll.register(watched.supervisor.fileno())
        assert poll.poll(50) == []
        os.kill(watched.pid, signal.SIGCONT)


def test_closing_lets_the_worker_end(folder: Path) -> None:
    with Watched(folder) as watched:
        watched.until_ready()
        watched.supervisor.submit(PopulateChunk(1))
        assert watched.supervisor.close(PATIENCE_S)
        assert gone(watched.pid)
        assert os.stat(watched.tier.segments()[0].data_path).st_blocks, "it finished what ran"
        assert watched.supervisor.completed() == []
        with pytest.raises(Unavailable):
            watched.supervisor.fileno()


def test_closing_kills_a_worker_that_does_not_end(folder: Path) -> None:
    with Watched(folder) as watched:
        watched.until_ready()
        os.kill(watched.pid, signal.SIGSTOP)
        assert watched.supervisor.close(0.2)
        assert gone(watched.pid)


def test_closing_without_a_worker_is_easy(folder: Path) -> None:
    with Watched(folder, fail_to_exec) as watched:
        assert watched.supervisor.close(0.0)


def test_a_worker_ends_when_control_is_gone(folder: Path) -> None:
    with Watched(folder) as watched:
        watched.until_ready()
        worker = watched.start_real()
        try:
            worker.end.close()
            assert select.select([worker.pidfd], [], [], PATIENCE_S)[0]
            assert worker.reap() == 0
        finally:
            worker.kill()
            worker.reap()
            worker.close()
