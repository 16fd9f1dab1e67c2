"""The daemon's worker process: killed, stopped, left behind. Only its own work is lost."""

import functools
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nexuskv.client.store import Store
from nexuskv.errors import DaemonUnreachable
from nexuskv.tools.daemon_process import DaemonProcess
from tests.e2e.cache import (
    chain,
    count_good,
    counters,
    eventually,
    gauges,
    open_space,
    open_store,
    put,
    wait_populated,
)
from tests.e2e.conftest import StartDaemon

pytestmark = pytest.mark.e2e

WAIT_S = 20.0
HASTE: dict[str, object] = {"worker_backoff_min_s": 0.01}


def worker_of(store: Store) -> int:
    """The pid of the worker that runs; there must come to be one."""
    eventually(lambda: gauges(store)["worker_pid"] > 0, "a worker runs")
    return gauges(store)["worker_pid"]


def _other_worker(store: Store, pid: int) -> bool:
    return gauges(store)["worker_pid"] != pid


def wait_gone(pid: int) -> None:
    """Wait until a process that is not ours is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], WAIT_S)[0], f"process {pid} still runs"
    finally:
        os.close(pidfd)


def test_a_killed_worker_is_replaced_and_pages_stay(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(**HASTE)
    with open_store(daemon.url) as store:
        space, keys = open_space(store), chain("kept", 16)
        assert all(put(space, keys))
        for _ in range(3):
            pid = worker_of(store)
            os.kill(pid, signal.SIGKILL)
            eventually(functools.partial(_other_worker, store, pid), "it is noticed")
            assert count_good(space, keys) == 16
            assert worker_of(store) != pid
        assert counters(store)["worker_starts"] == 4


def test_a_worker_killed_while_populating_costs_no_memory(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(host_memory="1GiB", chunk_bytes="16MiB", **HASTE)
    with open_store(daemon.url) as store:
        os.kill(worker_of(store), signal.SIGKILL)
        eventually(lambda: counters(store)["worker_lost"] == 1, "it is noticed")
        wait_populated(store)
        assert counters(store)["chunks_failed"] == 0
        assert gauges(store)["capacity_bytes"] == 1 << 30


def test_while_the_worker_is_stopped_pages_in_memory_are_served(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(**{**HASTE, "worker_timeout_s": 2.0})
    with open_store(daemon.url) as store:
        wait_populated(store)
        space, keys = open_space(store), chain("kept", 16)
        assert all(put(space, keys))
        pid = worker_of(store)
        os.kill(pid, signal.SIGSTOP)
        served = 0
        while counters(store)["worker_lost"] == 0:
            assert count_good(space, keys) == 16
            assert all(put(space, chain(f"more {served}", 4)))
            served += 1
        assert served > 0
        wait_gone(pid)
        assert worker_of(store) != pid


def test_a_worker_ends_when_its_daemon_is_killed(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        pid = worker_of(store)
    daemon.kill()
    wait_gone(pid)


def test_a_new_daemon_ends_the_worker_that_the_old_one_left(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        pid = worker_of(store)
        os.kill(pid, signal.SIGSTOP)
        daemon.kill()
        assert Path("/proc", str(pid)).exists(), "it holds the lock and runs no more"
        daemon.start()
        wait_gone(pid)
        eventually(lambda: all(put(open_space(store), chain("new", 4))), "the new one stores")
        assert worker_of(store) != pid


def test_a_stopped_worker_does_not_keep_a_daemon_from_stopping(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(stop_timeout_s=1.0)
    with open_store(daemon.url) as store:
        pid = worker_of(store)
    os.kill(pid, signal.SIGSTOP)
    assert daemon.stop() == 0
    wait_gone(pid)


def test_a_daemon_whose_worker_cannot_start_says_so_and_ends(tmp_path: Path) -> None:
    program = (
        "import sys; from nexuskv.config import load_config; from nexuskv.serve import serve\n"
        "from nexuskv.errors import ConfigError\n"
        f"config = load_config(env={{}}, flags={{'segment_dir': {str(tmp_path / 's')!r},"
        f" 'listen': 'unix://{tmp_path}/d.sock', 'host_memory': 1 << 26}}).config\n"
        "sys.executable = '/nowhere/python'\n"
        "try: serve(config)\n"
        "except ConfigError as exc: sys.exit(str(exc))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 1
    assert re.search(r"no worker can be started.*/nowhere/python", done.stderr)
    assert not (tmp_path / "s").exists(), "nothing stays behind"


def refusal(start_daemon: StartDaemon, **flags: object) -> str:
    """What a daemon says that ends for its ssd folder, before or soon after it has memory."""
    try:
        daemon = start_daemon(**flags)
    except DaemonUnreachable as exc:
        return str(exc)
    assert daemon.wait() == 2
    return daemon.log()


def test_an_ssd_folder_of_something_else_is_refused_at_start(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("not ours")
    said = refusal(start_daemon, ssd_dir=tmp_path, ssd_capacity="64MiB", ssd_file_bytes="16MiB")
    assert re.search(rf"{tmp_path}.*precious", said)
    assert "Traceback" not in said
    assert (tmp_path / "precious").read_text() == "not ours"


def test_two_daemons_on_one_ssd_folder(start_daemon: StartDaemon, tmp_path: Path) -> None:
    flags = {"ssd_dir": tmp_path / "ssd", "ssd_capacity": "64MiB", "ssd_file_bytes": "16MiB"}
    first = start_daemon(**flags)
    with open_store(first.url) as store:
        eventually(lambda: store.stats()["ssd"] == "ready", "the first has it")
        assert re.search(r"in use by process \d+", refusal(start_daemon, **flags))
        space, keys = open_space(store), chain("first", 4)
        assert all(put(space, keys))
        assert store.stats()["ssd"] == "ready"
