"""A daemon that stops, dies, comes back smaller, has no memory, or has company."""

import os
import subprocess
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from nexuskv.errors import NexusError
from nexuskv.tools.daemon_process import DaemonProcess
from nexuskv.types import PageStatus
from tests.e2e.cache import (
    MIB,
    chain,
    count_good,
    counters,
    eventually,
    gauges,
    open_space,
    open_store,
    pages,
    put,
    wait_populated,
)
from tests.e2e.conftest import StartDaemon

pytestmark = pytest.mark.e2e


def test_a_frozen_daemon_costs_one_bounded_wait_then_immediate_misses(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url, request_timeout_s=1.0) as store:
        space = open_space(store)
        keys = chain("frozen", 8)
        assert all(put(space, keys))
        daemon.freeze()
        into = [bytearray(space.record.page_bytes) for _ in keys]
        begun_s = time.monotonic()
        assert set(space.get(keys, into=into)) == {PageStatus.UNAVAILABLE}
        assert time.monotonic() - begun_s < 10.0, "bounded by the timeout"
        sent_before = store.counters
        for _ in range(200):
            assert not any(space.get(keys, into=into))
            assert space.match(keys).page_count == 0
        assert time.monotonic() - begun_s < 20.0, "later calls do not wait"
        assert sent_before["unavailable"] < store.counters["unavailable"]
        daemon.thaw()
        eventually(lambda: count_good(space, keys) == 8, "it reconnects and hits")


def test_puts_that_a_frozen_daemon_cut_short_cost_no_memory(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(host_memory="32MiB", quarantine_bytes="4MiB")
    with open_store(daemon.url, request_timeout_s=0.5) as store, open_store(daemon.url) as other:
        space = open_space(store)
        for attempt in range(3):
            assert all(put(space, chain(f"before {attempt}", 1))), "its connection is open"
            daemon.freeze()
            assert not any(put(space, chain(f"frozen {attempt}", 64)))
            daemon.thaw()
            eventually(lambda: store.connected, "it reconnects")
        eventually(lambda: gauges(other)["writing_bytes"] == 0, "nothing is lent")
        assert gauges(other)["quarantined_bytes"] == 0
        assert all(put(open_space(other), chain("after", 64)))


def test_a_daemon_killed_under_load_gives_misses_and_its_successor_serves(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        stop, failures = threading.Event(), list[BaseException]()

        def load(number: int) -> None:
            try:
                while not stop.is_set():
                    keys = chain(f"load {number}", 32)
                    put(space, keys)
                    count_good(space, keys)
            except BaseException as exc:  # noqa: BLE001  # told to the test below
                failures.append(exc)

        threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            eventually(lambda: space.match(chain("load 0", 32)).page_count == 32, "it serves")
            daemon.kill()
            assert not any(put(space, chain("away", 2)))
            daemon.restart()
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        eventually(lambda: all(put(space, chain("after", 8))), "the successor stores")
        assert count_good(space, chain("after", 8)) == 8
        assert gauges(store)["writing_bytes"] == 0


def test_ids_of_a_dead_daemon_are_refused_by_its_successor(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        keys = chain("before", 4)
        put(space, keys)
        lease = store.acquire([(space, keys)], request_id=b"old", ttl_s=60)
        daemon.kill()
        daemon.restart()
        eventually(lambda: all(put(space, keys)), "the successor stores")
        into = [bytearray(space.record.page_bytes) for _ in keys]
        assert not any(lease.get(space, keys, into=into))
        assert not lease.renew()
        lease.release()
        assert gauges(store)["leases"] == 0
        assert count_good(space, keys) == 4


def test_a_client_that_lived_through_a_smaller_successor_never_faults(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(host_memory="128MiB")
    with open_store(daemon.url) as store:
        wait_populated(store)
        space = open_space(store, page_bytes=MIB)
        keys = chain("big", 96)
        assert all(put(space, keys))
        with space.view(keys) as view:
            daemon.kill()
            daemon.set_flag("host_memory", "32MiB")
            daemon.restart()
            eventually(lambda: all(put(space, chain("small", 4))), "the successor stores")
            seen = [bytes(page) for page in view.pages if page is not None]
            assert seen == pages(keys, MIB), "an old view reads the old memory"
        assert count_good(space, keys) == 0
        assert count_good(space, chain("small", 4)) == 4


def test_a_full_filesystem_gives_refusals_and_no_bus_error(start_daemon: StartDaemon) -> None:
    with _small_filesystem("512M") as folder:
        daemon = start_daemon(
            segment_dir=folder / "segments", host_memory="500MiB", chunk_bytes="4MiB"
        )
        _fill(folder / "ballast")
        with open_store(daemon.url) as store:
            wait_populated(store)
            assert counters(store)["chunks_failed"] > 0, "the ballast came too late"
            space = open_space(store, page_bytes=MIB)
            for number in range(8):
                put(space, chain(f"full {number}", 16))
            for number in range(8):
                count_good(space, chain(f"full {number}", 16))
            assert all(put(space, chain("still", 2)))
            assert count_good(space, chain("still", 2)) == 2
        daemon.stop()


def test_memory_that_cannot_be_had_is_refused_at_start(start_daemon: StartDaemon) -> None:
    with (
        _small_filesystem("16M") as folder,
        pytest.raises(NexusError, match=r"ended with 2(?s:.*)67108864"),
    ):
        start_daemon(segment_dir=folder / "segments", host_memory="64MiB")


def test_a_second_daemon_on_an_instance_is_refused_and_the_first_lives_on(
    daemon: DaemonProcess,
) -> None:
    second = DaemonProcess(daemon.folder, flags={"host_memory": "64MiB", "chunk_bytes": "16MiB"})
    with pytest.raises(NexusError, match="ended with 2"):
        second.start()
    assert str(daemon.pid) in second.log() or str(daemon.folder) in second.log()
    second.close()
    with open_store(daemon.url) as store:
        space = open_space(store)
        assert all(put(space, chain("alive", 4)))
        assert count_good(space, chain("alive", 4)) == 4


def test_a_forked_child_connects_anew_and_leaves_the_parent_alone(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        keys = chain("fork", 8)
        assert all(put(space, keys))
        pid = os.fork()
        if not pid:
            good = count_good(space, keys) == 8 and all(put(space, chain("child", 4)))
            os._exit(0 if good else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert count_good(space, keys) == 8
        assert count_good(space, chain("child", 4)) == 4


def test_a_hundred_connections_leave_no_session_behind(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as watcher:
        before = gauges(watcher)["sessions"]
        for number in range(100):
            with open_store(daemon.url) as store:
                count_good(open_space(store), chain(f"short {number}", 2))
        eventually(lambda: gauges(watcher)["sessions"] == before, "all sessions have ended")
        assert gauges(watcher)["leases"] == 0


def _fill(path: Path) -> None:
    """Write until the filesystem is full, faster than the daemon takes its memory."""
    piece = bytes(MIB)
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(piece):
            pass


@contextmanager
def _small_filesystem(size: str) -> Generator[Path]:
    """A tmpfs of its own; needs root, as CI has."""
    folder = Path(f"/dev/shm/nexuskv-test-{os.getpid()}-small")
    folder.mkdir()
    mounted = False
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        mounted = True
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()
