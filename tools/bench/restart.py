"""`nexuskv bench restart`: from a daemon's start until all that it held before is served again.

Host pages: stored by puts, then the daemon is killed with SIGKILL and started on the same folder.
Pages on disk: their rows are written by the code that writes real ones (`ssd_rows`), then a daemon
is started on them. A start is over when every page of every sampled chain hits, the chains of the
last rows among them; it is timed from before the process is made.
"""

import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nexuskv import connect
from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.config import GIB, MIB, Config, load_config
from nexuskv.errors import NexusError, TransferTimeout
from nexuskv.namespace import NamespaceRecord
from nexuskv.tools.bench.report import Row, row
from nexuskv.tools.bench.ssd_pages import figures
from nexuskv.tools.bench.ssd_rows import Chains, fill
from nexuskv.tools.daemon_process import DaemonProcess, disk_folder, scratch_folder
from nexuskv.types import Kind

PAGES: Final = 1_000_000
QUICK_PAGES: Final = 100_000
PAGE_BYTES: Final = 4096
KEY_BYTES: Final = 32
RUN: Final = 64
SAMPLES: Final = 32
HOST_S: Final = 3.0
SSD_S: Final = 8.0
TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.01
ROOM: Final = 1.15  # host memory over what the pages take: no put evicts
FILE_BYTES: Final = 256 * MIB
SSD_HOST_BYTES: Final = 256 * MIB
PUT_PAGES: Final = 4096


def rows(quick: bool) -> list[Row]:
    """All rows; `quick` has fewer pages on record."""
    pages = QUICK_PAGES if quick else PAGES
    return [_host(pages, run=RUN), _host(pages, run=1), _ssd(pages)]


def _record(kind: Kind) -> NamespaceRecord:
    return NamespaceRecord(
        model="bench/restart",
        dtype="uint8",
        page_tokens=16,
        page_bytes=PAGE_BYTES,
        key_bytes=KEY_BYTES,
        kind=kind,
    )


def _chains(pages: int, run: int) -> Chains:
    whole = pages // run * run
    return Chains(random.Random(1).randbytes(whole * KEY_BYTES), KEY_BYTES, run)


def _samples(chains: Chains) -> list[list[bytes]]:
    """Chains all over the rows, the first and the last among them."""
    count = chains.count // chains.length
    return [chains.chain(at * (count - 1) // (SAMPLES - 1)) for at in range(SAMPLES)]


def _config() -> Config:
    return load_config(env={}, flags={"backoff_min_s": 0.01, "backoff_max_s": 0.02}).config


def _host(pages: int, *, run: int) -> Row:
    """Runs of 1 are pages of states, which hang under nothing."""
    record = _record(Kind.ATTENTION if run > 1 else Kind.STATE)
    with scratch_folder("bench") as folder:
        chains = _chains(min(pages, _most_pages(folder)), run)
        memory = int(chains.count * PAGE_BYTES * ROOM) + 256 * MIB
        daemon = DaemonProcess(folder, flags={"host_memory": memory})
        with daemon:
            with connect(daemon.url, _config()) as store:
                _wait_populated(store, memory // 2)
                _store(store.open(record), chains, run)
            daemon.kill()
            return _restart(daemon, record, chains, "host", HOST_S)


def _most_pages(folder: Path) -> int:
    room = os.statvfs(folder)
    return int((room.f_bavail * room.f_frsize - GIB) / ROOM / PAGE_BYTES)


def _wait_populated(store: Store, size_bytes: int) -> None:
    """Wait for all of the memory: before that puts are refused early."""
    end_s = time.monotonic() + TIMEOUT_S
    while True:
        gauges = figures(store, "gauges")
        if gauges["populated_bytes"] >= max(size_bytes, gauges["capacity_bytes"]):
            return
        if time.monotonic() > end_s:
            raise TransferTimeout(f"memory for pages is not there after {TIMEOUT_S} s")


def _store(space: Space, chains: Chains, run: int) -> None:
    page = bytes(PAGE_BYTES)
    step = run if run > 1 else PUT_PAGES
    for first in range(0, chains.count, step):
        keys = [chains.key(at) for at in range(first, min(first + step, chains.count))]
        if not all(space.put(keys, from_=[page] * len(keys))):
            raise NexusError("the pages to restart with were refused")


def _ssd(pages: int) -> Row:
    record, chains = _record(Kind.ATTENTION), _chains(pages, RUN)
    with scratch_folder("bench") as folder, disk_folder("bench") as disk:
        fill(disk / "ssd", file_bytes=FILE_BYTES, record=record, chains=chains)
        flags = {
            "host_memory": SSD_HOST_BYTES,
            "keep_pages": False,
            "ssd_dir": disk / "ssd",
            "ssd_capacity": chains.count * PAGE_BYTES * 2 + FILE_BYTES,
            "ssd_file_bytes": FILE_BYTES,
            "ssd_slot_bytes_min": PAGE_BYTES,
        }
        return _restart(DaemonProcess(folder, flags=flags), record, chains, "ssd", SSD_S)


def _restart(
    daemon: DaemonProcess, record: NamespaceRecord, chains: Chains, tier: str, limit_s: float
) -> Row:
    """Start the daemon and time it until all samples hit."""
    samples = _samples(chains)
    start_s = time.perf_counter()
    with daemon, connect(daemon.url, _config()) as store:
        store.ping()
        answer_s = time.perf_counter() - start_s
        space = store.open(record)
        _wait_hits(space, samples)
        hits_s = time.perf_counter() - start_s
        first = figures(store, "gauges")["pages"]
    name = f"restart {tier}, {chains.count} pages, runs of {chains.length}"
    return row(name, hits_s, "s", limit_s, target=1.0, answer_s=answer_s, pages_then=first)


def _wait_hits(space: Space, samples: Sequence[list[bytes]]) -> None:
    """Get every sample until it has hit whole; those that have are not asked for again."""
    into = [bytearray(PAGE_BYTES) for _ in samples[0]]
    pause = threading.Event()  # which nobody sets
    end_s = time.monotonic() + TIMEOUT_S
    for keys in samples:
        while not all(space.get(keys, into=into)):
            if time.monotonic() > end_s:
                raise TransferTimeout(f"not all pages are served after {TIMEOUT_S} s")
            pause.wait(POLL_S)
