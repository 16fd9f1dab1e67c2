"""`nexuskv bench ssd`: cold gets beside raw reads, puts beside copies, lookups beside a busy disk.

Each part has a daemon of its own, its pages in shared memory and on the disk of TMPDIR. Cold means:
the host tier is far smaller than the set, which is read round after round, so that a page has left
host memory when its turn comes (each chain is asked for by `match` before it is timed); and both
sides read with O_DIRECT, past the page cache. Disks drift: the raw reads are taken in turns with
the gets, and alone before and after; where these two differ by more than `DRIFT`, the row says so.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

from nexuskv import connect
from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.config import KIB, MIB, format_size, load_config
from nexuskv.errors import NexusError
from nexuskv.tools.bench.bare import Memory
from nexuskv.tools.bench.disk import RawFile
from nexuskv.tools.bench.report import Row, row
from nexuskv.tools.bench.ssd_pages import chain_keys, check_ssd, figures, space_of, wait_copied
from nexuskv.tools.bench.timing import alternate, percentile
from nexuskv.tools.daemon_process import DaemonProcess, disk_folder, scratch_folder
from nexuskv.types import PageStatus

HOST_BYTES: Final = 256 * MIB
SET_BYTES: Final = 1024 * MIB
QUICK_SET_BYTES: Final = 512 * MIB
FILE_BYTES: Final = 256 * MIB
CHUNK_BYTES: Final = 16 * MIB
THREADS: Final = 8
BATCH_BYTES: Final = 64 * MIB  # of one get: a chain
TARGETS: Final = {MIB: 0.9, 256 * KIB: 0.8}
DRIFT: Final = 0.15
PUT_TARGET: Final = 0.8
LOOKUP_FACTOR: Final = 3.0
LOOKUP_PAGES: Final = 512
AMPLIFICATION: Final = 1.1


@dataclass(frozen=True, slots=True)
class _Daemon:
    """A running daemon, a store of it, and the folder of its slab files."""

    store: Store
    url: str
    disk: Path


def rows(quick: bool) -> list[Row]:
    """All rows; `quick` takes fewer rounds and a smaller set."""
    set_bytes = QUICK_SET_BYTES if quick else SET_BYTES
    found: list[Row] = []
    for page_bytes, target in TARGETS.items():
        with _running(set_bytes) as daemon:
            found += _cold(daemon, page_bytes, set_bytes, target, rounds=9 if quick else 31)
    found += _puts(rounds=9 if quick else 41)
    with _running(set_bytes) as daemon:
        found += _lookups(daemon, set_bytes, rounds=500 if quick else 3000)
    return found


@contextmanager
def _running(
    set_bytes: int, *, host_bytes: int = HOST_BYTES, ssd: bool = True
) -> Generator[_Daemon, None, None]:
    flags: dict[str, object] = {
        "host_memory": host_bytes,
        "chunk_bytes": CHUNK_BYTES,
        "keep_pages": False,
    }
    with scratch_folder("bench") as folder, disk_folder("bench") as disk:
        if ssd:
            flags |= {
                "ssd_dir": disk / "ssd",
                "ssd_capacity": set_bytes * 2,
                "ssd_file_bytes": FILE_BYTES,
                "ssd_threads": THREADS,
            }
        with (
            DaemonProcess(folder, flags=flags) as daemon,
            connect(daemon.url, load_config(env={}).config) as store,
        ):
            if ssd:
                check_ssd(store)
            yield _Daemon(store, daemon.url, disk)


def _fill(daemon: _Daemon, page_bytes: int, set_bytes: int) -> int:
    """Store chains of one batch each until the set is on disk; their number."""
    space = space_of(daemon.store, page_bytes)
    pages = BATCH_BYTES // page_bytes
    source = Memory(BATCH_BYTES)
    source.map[:] = os.urandom(BATCH_BYTES)
    from_ = source.pages(page_bytes, pages)
    copied = figures(daemon.store, "counters").get("copies_done", 0)
    for chain in range(chains := set_bytes // BATCH_BYTES):
        statuses = space.put(chain_keys(chain, pages), from_=from_)
        if not all(statuses):
            raise NexusError(f"pages of the set were refused: {set(statuses)}")
        wait_copied(daemon.store, copied + (chain + 1) * pages)
    return chains


def _cold(
    daemon: _Daemon, page_bytes: int, set_bytes: int, target: float, *, rounds: int
) -> list[Row]:
    written = _WorkerWrites(daemon.store)
    chains, pages = _fill(daemon, page_bytes, set_bytes), BATCH_BYTES // page_bytes
    amplification = written.bytes() / set_bytes
    space = space_of(daemon.store, page_bytes)
    target_memory = Memory(BATCH_BYTES)
    into = target_memory.pages(page_bytes, pages)
    name = f"{format_size(page_bytes)} x{pages}"
    keys: list[bytes] = []

    def get(_turn: int) -> None:
        statuses = space.get(keys, into=into)
        if statuses.count(PageStatus.HIT) != pages:
            raise NexusError(f"a cold get of {name} missed: {set(statuses)}")

    raw_path = daemon.disk / "raw"
    with RawFile(raw_path, size_bytes=set_bytes, page_bytes=page_bytes, threads=THREADS) as raw:
        control = max(5, rounds // 3)
        (before_s,) = alternate(control, lambda turn: raw.read(turn, pages))
        gets_s: list[float] = []
        raws_s: list[float] = []
        for turn in range(rounds):
            keys[:] = chain_keys(turn % chains, pages)
            _check_cold(space, keys)
            sides: list[tuple[list[float], Callable[[int], None]]] = [
                (gets_s, get),
                (raws_s, partial(raw.read, count=pages)),
            ]
            for times_s, side in sides if turn % 2 else reversed(sides):
                start_s = time.perf_counter()
                side(turn)
                times_s.append(time.perf_counter() - start_s)
        (after_s,) = alternate(control, lambda turn: raw.read(turn, pages))
    drift = median(before_s) / median(after_s)
    note = "" if abs(drift - 1) <= DRIFT else f"the disk drifted: control run {drift:.2f}"
    return [
        row(
            f"cold get {name}",
            BATCH_BYTES / median(gets_s) / 1e9,
            "GB/s",
            BATCH_BYTES / median(raws_s) / 1e9,
            target=target,
            control=drift,
            note=note,
        ),
        row(
            f"bytes written a byte copied {format_size(page_bytes)}",
            amplification,
            "bytes",
            AMPLIFICATION,
            target=1.0,
        ),
    ]


def _check_cold(space: Space, keys: list[bytes]) -> None:
    """Check that no page of a chain is in host memory.

    Raises:
        NexusError: one is: the set is too small for the host tier.
    """
    match = space.match(keys)
    if match.tier_counts["ssd"] != len(keys):
        raise NexusError(f"{dict(match.tier_counts)} of {len(keys)} pages: this chain is not cold")


class _WorkerWrites:
    """What the worker process has caused to be written to disks, its catalogue's threads too."""

    def __init__(self, store: Store) -> None:
        self._io = Path(f"/proc/{figures(store, 'gauges')['worker_pid']}/io")
        self._start_bytes = self._total()

    def bytes(self) -> int:
        """Since this object was made."""
        return self._total() - self._start_bytes

    def _total(self) -> int:
        lines = dict(line.split(": ") for line in self._io.read_text(encoding="utf-8").splitlines())
        return int(lines["write_bytes"])


def _puts(*, rounds: int) -> list[Row]:
    """Puts of fresh keys to a daemon that copies and to one without a disk, in turns."""
    page_bytes, pages = MIB, 32
    with (
        _running(SET_BYTES, host_bytes=2 * HOST_BYTES) as copying,
        _running(SET_BYTES, host_bytes=2 * HOST_BYTES, ssd=False) as plain,
    ):
        source = Memory(pages * page_bytes)
        source.map[:] = os.urandom(pages * page_bytes)
        from_ = source.pages(page_bytes, pages)
        numbers = count(1 << 32)

        def putter(daemon: _Daemon) -> "_Putter":
            return _Putter(daemon, page_bytes, pages, from_)

        with_copies, without = putter(copying), putter(plain)
        for _ in range(2 * HOST_BYTES // (pages * page_bytes) + 1):  # until each put evicts
            with_copies.put(next(numbers))
            without.put(next(numbers))
        before = figures(copying.store, "counters")
        ours_s, bare_s = alternate(
            rounds,
            lambda _: with_copies.put(next(numbers)),
            lambda _: without.put(next(numbers)),
        )
        after = figures(copying.store, "counters")
    size = pages * page_bytes / 1e9
    return [
        row(
            f"put beside copies {format_size(page_bytes)} x{pages}",
            size / median(ours_s),
            "GB/s",
            size / median(bare_s),
            target=PUT_TARGET,
            copied=_grown(before, after, "copies_done"),
            dropped=_grown(before, after, "copies_dropped"),
            put=rounds * pages,
        )
    ]


def _grown(before: Mapping[str, int], after: Mapping[str, int], name: str) -> int:
    return after.get(name, 0) - before.get(name, 0)


class _Putter:
    """Puts one batch of pages under the keys of ever new chains."""

    def __init__(
        self, daemon: _Daemon, page_bytes: int, pages: int, from_: list[memoryview]
    ) -> None:
        self._space = space_of(daemon.store, page_bytes)
        self._pages = pages
        self._from = from_

    def put(self, chain: int) -> None:
        """Store a chain."""
        statuses = self._space.put(chain_keys(chain, self._pages), from_=self._from)
        if not all(statuses):
            raise NexusError(f"a put was refused: {set(statuses)}")


def _lookups(daemon: _Daemon, set_bytes: int, *, rounds: int) -> list[Row]:
    """Round trips of a match, alone and while other clients have the worker read from disk."""
    page_bytes, pages = MIB, BATCH_BYTES // MIB
    chains = _fill(daemon, page_bytes, set_bytes)
    small = space_of(daemon.store, 4 * KIB, model="bench/lookups")
    keys = chain_keys(1 << 40, LOOKUP_PAGES)
    if not all(small.put(keys, from_=[bytes(4 * KIB)] * LOOKUP_PAGES)):
        raise NexusError("the pages to match could not be stored")

    def match(_turn: int) -> None:
        if small.match(keys).page_count != LOOKUP_PAGES:
            raise NexusError("a match fell short")

    (idle_s,) = alternate(rounds, match)
    copiers = max(1, len(os.sched_getaffinity(0)) - 1)
    with _loads(daemon.url, page_bytes, pages, chains, copiers):
        before = figures(daemon.store, "counters")
        (busy_s,) = alternate(rounds, match)
        after = figures(daemon.store, "counters")
    idle, busy = percentile(idle_s, 0.99), percentile(busy_s, 0.99)
    return [
        row(
            f"match x{LOOKUP_PAGES} beside a busy disk, p99",
            busy,
            "s",
            LOOKUP_FACTOR * idle,
            target=1.0,
            p50=median(busy_s),
            idle_p50=median(idle_s),
            idle_p99=idle,
            copiers=copiers,
            loaded_pages=_grown(before, after, "loads_done"),
        )
    ]


@contextmanager
def _loads(
    url: str, page_bytes: int, pages: int, chains: int, processes: int
) -> Generator[None, None, None]:
    """Client processes that get cold chains, while the block runs."""
    arguments = map(str, (page_bytes, pages, chains))
    command = (sys.executable, "-m", "nexuskv.tools.bench.disk_load", url, *arguments)
    loads = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
        for _ in range(processes)
    ]
    try:
        for load in loads:
            assert load.stdout is not None
            if load.stdout.readline().strip() != "ready":
                raise NexusError("a client that was to keep the disk busy ended")
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()
            assert load.stdout is not None
            load.stdout.close()
