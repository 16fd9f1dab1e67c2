"""`nexuskv bench shm`: get, put and view through shared memory beside bare copies of those bytes.

One daemon of its own. The limit is the same native call on private, populated memory in this
process, taken in turns with the measured call, medians of all rounds. Puts are of keys never seen:
the pool is full after the warm-up, so that each put evicts as many pages as it stores; the bare
call walks through as much memory as the pool holds, so that neither finds its slots in a cache.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Final

from nexuskv import connect
from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.config import KIB, MIB, load_config
from nexuskv.errors import NexusError, TransferTimeout
from nexuskv.tools.bench.bare import KEY_BYTES, BareSegment, Memory, batch_name
from nexuskv.tools.bench.report import Row, row
from nexuskv.tools.bench.timing import BusyThread, alternate
from nexuskv.tools.daemon_process import DaemonProcess, scratch_folder
from nexuskv.types import PageStatus

POOL_BYTES: Final = 1024 * MIB
CHUNK_BYTES: Final = 32 * MIB
POPULATE_S: Final = 120.0
GIL_WAIT_S: Final = 0.005
VIEW_FACTOR: Final = 10.0
BATCH: Final = 32
LARGE_BATCH: Final = 512
BUSY_KEPT: Final = 0.9
BUSY_PAIRS: Final = 5
BUSY_GETS: Final = 10
TARGETS: Final = {  # get, put; 64 KiB has none
    64 * KIB: (None, None),
    256 * KIB: (0.90, 0.85),
    MIB: (0.95, 0.92),
    4 * MIB: (0.95, 0.92),
}
BUSY_CASES: Final = tuple((size, count) for size in (64 * KIB, MIB) for count in (32, 512))


def rows(quick: bool) -> list[Row]:
    """All rows; `quick` takes fewer rounds."""
    rounds, busy_rounds = (9, 5) if quick else (61, 21)
    found: list[Row] = []
    for page_bytes, targets in TARGETS.items():
        found += _with_daemon(partial(_idle, rounds=rounds, targets=targets), page_bytes, BATCH)
    found += _with_daemon(lambda bench: [_view(bench, rounds)], MIB, BATCH)
    for page_bytes, count in BUSY_CASES:
        found += _with_daemon(lambda bench: _busy(bench, busy_rounds), page_bytes, count)
    return found + _with_daemon(lambda bench: [_first_get(bench)], MIB, 256)


class _Bench:
    """One space of a running daemon, one page size and batch, and the bare counterpart."""

    def __init__(self, url: str, store: Store, *, page_bytes: int, count: int) -> None:
        self.url = url
        self.store = store
        self.page_bytes = page_bytes
        self.count = count
        self.batch_bytes = page_bytes * count
        self.name = batch_name(page_bytes, count)
        self.space = space_of(store, page_bytes)
        self.source = Memory(self.batch_bytes)
        self.target = Memory(self.batch_bytes)
        self.from_ = self.source.pages(page_bytes, count)
        self.into = self.target.pages(page_bytes, count)
        for page in self.from_:
            page[:] = os.urandom(min(page_bytes, 64 * KIB)) * max(1, page_bytes // (64 * KIB))
        self.bare = BareSegment(page_bytes=page_bytes, slot_count=POOL_BYTES // page_bytes)
        self.keys: list[list[bytes]] = []
        self.stored = 0  # batches put so far

    def warm(self) -> None:
        """Fill the pool and the bare segment once over, when the pool has all its memory."""
        end_s = time.monotonic() + POPULATE_S
        while not self._populated():
            if time.monotonic() > end_s:
                raise TransferTimeout(f"the daemon has no {POOL_BYTES} bytes after {POPULATE_S} s")
            self.space.put(self._fresh_keys(), from_=self.from_)  # refused while memory is to come
        for turn in range(POOL_BYTES // self.batch_bytes + 1):
            self.prepare(1)
            self.put(turn)
            self.bare.store(turn, self.from_)
        for turn in range(POOL_BYTES // self.batch_bytes):
            self.bare.load(turn, self.into)

    def _populated(self) -> bool:
        gauges = self.store.stats()["gauges"]
        assert isinstance(gauges, dict)
        return bool(gauges["populated_bytes"] >= POOL_BYTES)

    def prepare(self, batches: int) -> None:
        """Make keys for so many puts, so that no measured call does."""
        while len(self.keys) < self.stored + batches:
            self.keys.append(self._fresh_keys())

    def _fresh_keys(self) -> list[bytes]:
        raw = os.urandom(KEY_BYTES * self.count)
        return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]

    def put(self, _turn: int) -> None:
        """Store the next batch of keys that nobody has seen."""
        statuses = self.space.put(self.keys[self.stored], from_=self.from_)
        self.stored += 1
        if statuses.count(PageStatus.STORED) != self.count:
            raise NexusError(f"a put of {self.name} was refused: {set(statuses)}")

    def get(self, turn: int) -> None:
        """Load a batch that is held for sure, one of the later half of the pool."""
        back = turn % max(1, POOL_BYTES // self.batch_bytes // 2)
        statuses = self.space.get(self.keys[self.stored - 1 - back], into=self.into)
        if statuses.count(PageStatus.HIT) != self.count:
            raise NexusError(f"a get of {self.name} missed: {set(statuses)}")


def space_of(store: Store, page_bytes: int) -> Space:
    """The space that the benchmarks use."""
    return store.namespace(
        model="bench", dtype="uint8", page_tokens=16, page_bytes=page_bytes, key_bytes=KEY_BYTES
    )


def _with_daemon(measure: Callable[[_Bench], list[Row]], page_bytes: int, count: int) -> list[Row]:
    """Run a measurement against a fresh daemon that is warm."""
    flags = {"host_memory": POOL_BYTES, "chunk_bytes": CHUNK_BYTES}
    with (
        scratch_folder("bench") as folder,
        DaemonProcess(folder, flags=flags) as daemon,
        connect(daemon.url, load_config(env={}).config) as store,
    ):
        bench = _Bench(daemon.url, store, page_bytes=page_bytes, count=count)
        bench.warm()
        return measure(bench)


def _idle(bench: _Bench, *, rounds: int, targets: tuple[float | None, float | None]) -> list[Row]:
    get_s, bare_get_s, copy_s = alternate(
        rounds,
        bench.get,
        lambda turn: bench.bare.load(turn, bench.into),
        lambda turn: bench.bare.copy(turn, bench.target, bench.count),
    )
    bench.prepare(rounds)
    put_s, bare_put_s = alternate(
        rounds,
        bench.put,
        lambda turn: bench.bare.store(turn, bench.from_),
    )
    copy_rate = _rate(bench, copy_s)
    return [
        _rate_row("get", bench, get_s, bare_get_s, targets[0], copy_rate),
        _rate_row("put", bench, put_s, bare_put_s, targets[1], copy_rate),
        row(f"memcpy {bench.name}", copy_rate, "GB/s", copy_rate, physical=True),
    ]


def _rate(bench: _Bench, times_s: Sequence[float]) -> float:
    return bench.batch_bytes / median(times_s) / 1e9


def _rate_row(
    verb: str,
    bench: _Bench,
    times_s: Sequence[float],
    bare_s: Sequence[float],
    target: float | None,
    copy_rate: float,
) -> Row:
    rate = _rate(bench, times_s)
    return row(
        f"{verb} {bench.name}",
        rate,
        "GB/s",
        _rate(bench, bare_s),
        target=target,
        physical=True,
        of_memcpy=rate / copy_rate,
    )


def _view(bench: _Bench, rounds: int) -> Row:
    """An unhashed view of the batch, every page touched, against ten copying gets."""

    def view(turn: int) -> None:
        back = turn % 4
        with bench.space.view(bench.keys[bench.stored - 1 - back]) as opened:
            for page in opened.pages:
                if page is None:
                    raise NexusError("a view missed a page that is held")
                page[0]

    view_s, get_s = alternate(rounds, view, bench.get)
    limit = VIEW_FACTOR * _rate(bench, get_s)
    return row(f"view {bench.name}", _rate(bench, view_s), "GB/s", limit, target=1.0)


def _busy(bench: _Bench, rounds: int) -> list[Row]:
    """The same calls beside a thread that keeps the GIL busy."""
    bench.prepare(rounds)
    with BusyThread() as busy:
        get_s, bare_get_s = alternate(
            rounds,
            bench.get,
            lambda turn: bench.bare.load(turn, bench.into),
        )
        put_s, bare_put_s = alternate(
            rounds,
            bench.put,
            lambda turn: bench.bare.store(turn, bench.from_),
        )
        beside, alone = busy.rates(BUSY_PAIRS, lambda: alternate(BUSY_GETS, bench.get))
    return [
        _busy_row("get", bench, get_s, bare_get_s, waits=1),
        _busy_row("put", bench, put_s, bare_put_s, waits=2),
        row(f"busy thread beside get {bench.name}", beside, "1/s", alone, target=BUSY_KEPT),
    ]


def _busy_row(
    verb: str, bench: _Bench, times_s: Sequence[float], bare_s: Sequence[float], *, waits: int
) -> Row:
    return row(
        f"busy {verb} {bench.name}",
        median(times_s),
        "s",
        median(bare_s) + waits * GIL_WAIT_S,
        target=1.0,
        bare_s=median(bare_s),
        gigabytes_per_s=_rate(bench, times_s),
    )


def _first_get(bench: _Bench) -> Row:
    """What a busy thread keeps of its speed while a client connects and gets for the first time."""

    def connect_and_get() -> None:
        with connect(bench.url, load_config(env={}).config) as store:
            space = space_of(store, bench.page_bytes)
            if not all(space.get(bench.keys[bench.stored - 1], into=bench.into)):
                raise NexusError("the first get missed")

    with BusyThread() as busy:
        beside, alone = busy.rates(BUSY_PAIRS, connect_and_get)
    name = f"busy thread beside connect and first get {bench.name}"
    return row(name, beside, "1/s", alone, target=BUSY_KEPT)
