"""What a test opens, it closes: descriptors, threads, child processes and shared memory.

Fixtures of a wider scope are set up before the first look and so are not counted. The only grace
is to wait, up to a deadline, for what is already ending: a thread is joined, a child is awaited.
"""

import gc
import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

GRACE_S = 5.0
SHM = Path("/dev/shm")
SHM_PREFIX = "nexuskv-test-"


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder of this test alone in shared memory, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=f"{SHM_PREFIX}{os.getpid()}-", dir=SHM))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def _resource_tracker() -> None:  # pyright: ignore[reportUnusedFunction]  # autouse
    """Start multiprocessing's own helper now: it lives as long as the run and is nobody's leak."""
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]  # autouse
    fds, threads, children, shm = _fds(), set(threading.enumerate()), _children(), _shm_names()
    yield
    deadline_s = time.monotonic() + GRACE_S
    left = [f"thread {t.name}" for t in _ended(set(threading.enumerate()) - threads, deadline_s)]
    left += [f"child process {pid}" for pid in _exited(_children() - children, deadline_s)]
    left += [f"shared memory {name}" for name in sorted(_shm_names() - shm)]
    if _fds() - fds:
        gc.collect()  # an object in a cycle closes its descriptor only now
    left += [f"descriptor {number} of {target}" for number, target in sorted(_fds() - fds)]
    if left:
        pytest.fail("the test left behind: " + ", ".join(left), pytrace=False)


def _fds() -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


def _children() -> set[int]:
    """Children of this process, zombies too: one that is not awaited is a leak as well."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended meanwhile
    return found


def _shm_names() -> set[str]:
    """Names of this run alone: other daemons and runs on the machine come and go meanwhile."""
    return {name for name in os.listdir(SHM) if name.startswith(f"{SHM_PREFIX}{os.getpid()}-")}


def _ended(threads: set[threading.Thread], deadline_s: float) -> list[threading.Thread]:
    """Wait for the threads; return those that are still alive."""
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def _exited(pids: set[int], deadline_s: float) -> list[int]:
    """Wait for the processes; return those that still run or that nobody has awaited."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([pidfd], [], [], max(0.0, deadline_s - time.monotonic()))
        finally:
            os.close(pidfd)
    return sorted(pids & _children())
