"""The worker stopped in the middle of reads into slots and of writes to the disk."""

import functools
import os
import random
import signal
import threading
from pathlib import Path

import pytest

from nexuskv.client.store import Store
from nexuskv.tools.bench.ssd_pages import check_ssd, wait_copied
from tests.e2e.cache import (
    KIB,
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

PAGE_BYTES = 256 * KIB
CHAINS = [chain(f"held {number}", 16) for number in range(16)]  # 64 MiB, twice the host tier
WORKS = ("get", "get", "put")
ROUNDS = 6
SEED = 20


class Load:
    """Threads that get what is held, mostly from the disk, and put what is not, until `stop`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in WORKS]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self._failures == []

    def _run(self, work: str) -> None:
        try:
            with open_store(self._url, transfer_timeout_s=5.0) as store:
                space, number = open_space(store, page_bytes=PAGE_BYTES), 0
                while not self._stop.is_set():
                    number += 1
                    if work == "get":
                        count_good(space, CHAINS[number * 7 % len(CHAINS)])
                    else:
                        put(space, chain(f"new {number}", 8))
        except BaseException as exc:  # noqa: BLE001  # told to the test by `stop`
            self._failures.append(exc)


def test_a_worker_stopped_in_mid_transfer_shows_nobody_a_wrong_byte(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon(
        host_memory="32MiB",
        chunk_bytes="4MiB",
        ssd_dir=tmp_path / "ssd",
        ssd_capacity="256MiB",
        ssd_file_bytes="16MiB",
        worker_timeout_s=1.0,
        worker_backoff_min_s=0.01,
    )
    moments = random.Random(SEED)
    with open_store(daemon.url) as store:
        check_ssd(store)
        wait_populated(store)
        space = open_space(store, page_bytes=PAGE_BYTES)
        for at, keys in enumerate(CHAINS, 1):
            assert all(put(space, keys))
            wait_copied(store, at * len(keys))
        load = Load(daemon.url)
        try:
            for _ in range(ROUNDS):
                _let_go_on(store, moments.randrange(1, 40))
                pid = gauges(store)["worker_pid"]
                if pid:
                    os.kill(pid, signal.SIGSTOP)
                eventually(functools.partial(_another, store, pid), "it is replaced")
        finally:
            load.stop()
        assert counters(store)["worker_lost"] >= ROUNDS - 1
        eventually(lambda: _quiet(store), "nothing is in flight for ever")
        assert counters(store)["loads_corrupt"] == 0
        assert counters(store)["internal_errors"] == 0
        eventually(lambda: store.stats()["ssd"] == "ready", "the ssd serves on")
        assert sum(count_good(space, keys) for keys in CHAINS) > 0


def _let_go_on(store: Store, loads: int) -> None:
    """Wait until so many more pages were loaded from the disk, or copied to it."""
    before = counters(store)
    done = ("loads_done", "copies_done")
    eventually(
        lambda: sum(counters(store)[name] - before[name] for name in done) >= loads, "it goes on"
    )


def _another(store: Store, pid: int) -> bool:
    return gauges(store)["worker_pid"] not in {pid, 0}


def _quiet(store: Store) -> bool:
    found = gauges(store)
    return not found["writing_bytes"] and not found["quarantined_bytes"]
