"""A lock that outlived its daemon: the worker that holds it is ended, nobody else is."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nexuskv.errors import ConfigError
from nexuskv.tiers.folder import lock_folder
from nexuskv.tiers.owner import Owners, Process

# Locks a folder, starts a child that inherits the lock, runs {record}, and says the child's pid.
CONTROL = """
import os, signal, subprocess, sys
from pathlib import Path
from nexuskv.tiers.folder import lock_folder
from nexuskv.tiers.owner import Owners, Process
lock = lock_folder(Path(sys.argv[1]))
quiet = subprocess.DEVNULL
child = subprocess.Popen([sys.executable, "-c", {child!r}], pass_fds=[lock.fileno()], stdout=quiet)
{record}
print(child.pid, flush=True)
signal.pause()
"""
LIVES = "import signal; signal.pause()"
RECORDED = "lock.record_worker(child.pid)"


class Daemon:
    """A process that holds a folder's lock, and its child that inherited it."""

    def __init__(self, folder: Path, *, child: str = LIVES, record: str = RECORDED) -> None:
        program = CONTROL.format(child=child, record=record)
        self.control = subprocess.Popen(
            [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert self.control.stdout is not None
        with self.control.stdout as said:
            self.child = int(said.readline())

    def kill_control(self) -> None:
        self.control.kill()
        self.control.wait(10)

    def close(self) -> None:
        self.kill_control()
        found = Process.of(self.child)
        if found is not None:
            found.end(10)


@pytest.fixture
def folder(shm_dir: Path) -> Path:
    return shm_dir / "one"


@pytest.fixture
def daemons() -> Iterator[list[Daemon]]:
    started: list[Daemon] = []
    yield started
    for daemon in started:
        daemon.close()


def test_a_worker_left_behind_is_ended(folder: Path, daemons: list[Daemon]) -> None:
    daemons.append(daemon := Daemon(folder))
    daemon.kill_control()
    lock = lock_folder(folder)
    found = Process.of(daemon.child)
    assert found is None or not found.running
    lock.close(remove=True)


def test_a_stopped_one_too(folder: Path, daemons: list[Daemon]) -> None:
    daemons.append(daemon := Daemon(folder, child="import os; os.kill(os.getpid(), 19)"))
    daemon.kill_control()
    lock_folder(folder).close(remove=True)


def test_the_worker_of_a_living_daemon_is_left_alone(folder: Path, daemons: list[Daemon]) -> None:
    daemons.append(daemon := Daemon(folder))
    with pytest.raises(ConfigError, match=f"in use by process {daemon.control.pid}"):
        lock_folder(folder)
    found = Process.of(daemon.child)
    assert found is not None
    assert found.running


def test_a_process_that_has_its_number_now_is_left_alone(
    folder: Path, daemons: list[Daemon]
) -> None:
    other = "Owners(Process.of(os.getpid()), Process(child.pid, 1)).write(lock.fileno())"
    daemons.append(daemon := Daemon(folder, record=other))
    daemon.kill_control()
    with pytest.raises(ConfigError, match=rf"cannot be seen.*{daemon.control.pid}.*is gone"):
        lock_folder(folder, reap_s=0.1)
    found = Process.of(daemon.child)
    assert found is not None
    assert found.running


def test_one_that_was_not_recorded_yet_is_waited_for(folder: Path, daemons: list[Daemon]) -> None:
    ends = f"import os, select; select.select([os.pidfd_open({os.getpid()})], [], [], 0.3)"
    daemons.append(daemon := Daemon(folder, child=ends, record=""))
    daemon.kill_control()
    lock_folder(folder).close(remove=True)


def test_a_lock_file_says_what_was_written(tmp_path: Path) -> None:
    owners = Owners(Process(12, 345), Process(67, 8))
    with (tmp_path / "lock").open("w+b", buffering=0) as file:
        Owners(Process(1 << 22, 1 << 40), Process(1 << 22, 1 << 40)).write(file.fileno())
        owners.write(file.fileno())
        assert Owners.read(file.fileno()) == owners
    assert (tmp_path / "lock").read_text() == "control 12 345\nworker 67 8\n"


@pytest.mark.parametrize("text", ["", "1234\n", "control\n", "control x 3\n", "\xff\xfe", "a b c"])
def test_a_lock_file_that_says_nothing_readable_names_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text, encoding="latin-1")
    with (tmp_path / "lock").open("rb") as file:
        assert Owners.read(file.fileno()) == Owners()


def test_a_zombie_does_not_run() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    found = Process.of(child.pid)
    assert found is not None
    assert not found.running
    assert child.wait() == 0
    assert Process.of(child.pid) is None
