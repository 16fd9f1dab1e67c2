"""`bench index`: match, put, eviction, demotion, memory and stalls of the radix index alone.

One process, one thread, the cyclic collector off, as in the daemon. Keys have 32 bytes, as vLLM's.
Limits are the targets of the design. Stalls are counted in CPU time of the thread, so that a pause
that another process caused is not charged to the index.
"""

import gc
import os
import random
import time
from array import array
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Final

from nexuskv.index.radix import RadixIndex, count_pages
from nexuskv.index.tree import Tree
from nexuskv.tools.bench.report import Row, row
from nexuskv.tools.bench.timing import percentile
from nexuskv.types import FAR_PLACES, Kind

KEY_BYTES: Final = 32
CHAIN_PAGES: Final = 512
DEMOTED_PAGES: Final = 64  # a call
HOT_S: Final = 10e-6
COLD_S: Final = 30e-6
PUT_PAGE_S: Final = 1.5e-6
STALL_S: Final = 15e-3
RUN_BYTES: Final = {30: 200, 1: 400}  # pages a run → bytes a page
GROWTH_NOISE: Final = 1.25  # a match in the large index may take this much longer


def rows(quick: bool) -> list[Row]:
    """The index's rows of the design's table; `quick` stops at 100 000 pages."""
    small, large = (10_000, 100_000) if quick else (10_000, 1_000_000)
    with _collector_off():
        first, second = _Filled(small), _Filled(large)
        found = [*first.matches(), *second.matches(), _growth(first, second), second.put()]
        found += _churn(second, 1_000 if quick else 10_000)
        found += _demote(second)
    return found + [_memory(run_pages, large) for run_pages in RUN_BYTES]


@contextmanager
def _collector_off() -> Generator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _chain(number: int, page_count: int = CHAIN_PAGES) -> bytes:
    return random.Random(number).randbytes(page_count * KEY_BYTES)


def _new_index() -> tuple[RadixIndex, Tree]:
    index = RadixIndex(fragments_max=65536)
    return index, index.open(bytes(16), kind=Kind.ATTENTION, key_bytes=KEY_BYTES, group=1)


class _Filled:
    """An index of `page_count` pages in chains of 512, and how long its lookups take."""

    def __init__(self, page_count: int) -> None:
        self.index, self.tree = _new_index()
        self.page_count = page_count
        self.chain_count = page_count // CHAIN_PAGES
        self._put_s = [self._timed_put(number) for number in range(self.chain_count)]
        numbers = random.Random(1).sample(range(self.chain_count), min(300, self.chain_count))
        self._cold_s = [self._timed_match(number) for number in numbers]
        self._hot_s = [self._timed_match(0) for _ in range(300)]
        self.hot_s = median(self._hot_s)

    def _timed_put(self, number: int) -> float:
        blob, slots = _chain(number), array("I", range(CHAIN_PAGES))
        start_s = time.perf_counter()
        self.tree.insert(None, blob, slots)
        return time.perf_counter() - start_s

    def _timed_match(self, number: int) -> float:
        # Made here, so the request is in the cache, as one just received is.
        blob = _chain(number)
        start_s = time.perf_counter()
        held = self.tree.match(blob)
        spent_s = time.perf_counter() - start_s
        assert held == CHAIN_PAGES
        return spent_s

    def matches(self) -> list[Row]:
        """A held chain of 512 pages, matched again and again, and matched once."""
        return [
            row(
                f"match {CHAIN_PAGES} {how} at {self.page_count}",
                median(times_s),
                "s",
                limit_s,
                target=1.0,
                p99=percentile(times_s, 0.99),
            )
            for how, times_s, limit_s in (
                ("hot", self._hot_s, HOT_S),
                ("cold", self._cold_s, COLD_S),
            )
        ]

    def put(self) -> Row:
        """Seconds a page of the last tenth put."""
        last_s = self._put_s[-max(1, self.chain_count // 10) :]
        value = median(last_s) / CHAIN_PAGES
        return row(f"put page at {self.page_count}", value, "s", PUT_PAGE_S, target=1.0)


def _growth(first: _Filled, second: _Filled) -> Row:
    """A hot match must cost the same however many pages are held."""
    return row(
        f"match {CHAIN_PAGES} hot at {second.page_count} against {first.page_count}",
        second.hot_s,
        "s",
        first.hot_s,
        target=1.0 / GROWTH_NOISE,
    )


def _churn(filled: _Filled, operations: int) -> list[Row]:
    """A full index takes new chains, half of them branches of held ones, and evicts for them."""
    source = random.Random(2)
    index, tree = filled.index, filled.tree
    spent_s: list[float] = []
    evict_s = evicted = 0.0
    for number in range(operations):
        fresh = _chain(10_000_000 + number, source.randint(1, CHAIN_PAGES))
        kept = source.choice((0, source.randrange(CHAIN_PAGES))) * KEY_BYTES
        blob = _chain(source.randrange(filled.chain_count))[:kept] + fresh
        start_s = time.thread_time()
        held = tree.match(blob)
        wanted = len(blob) // KEY_BYTES - held
        middle_s = time.thread_time()
        gone = index.evict(wanted, is_free=_is_free, now=0.0)
        end_s = time.thread_time()
        evict_s, evicted = evict_s + end_s - middle_s, evicted + count_pages(gone)
        slots = array("I", bytes(4 * (len(blob) // KEY_BYTES)))
        tree.insert(None, blob, slots)
        spent_s.append(time.thread_time() - start_s)
    return [
        row(
            f"worst stall in churn at {filled.page_count}",
            max(spent_s),
            "s",
            STALL_S,
            target=1.0,
            p99=percentile(spent_s, 0.99),
        ),
        row(f"evict page at {filled.page_count}", evict_s / evicted, "s", None),
    ]


def _demote(filled: _Filled) -> list[Row]:
    """Nine tenths of the pages get far places, a few a call, coldest first."""
    index, left = filled.index, filled.tree.page_count * 9 // 10
    spent_s: list[float] = []
    demoted = 0
    while left > demoted:
        start_s = time.thread_time()
        went = index.demote(DEMOTED_PAGES, far_of=_far_of, is_free=_is_free, now=0.0)
        spent_s.append(time.thread_time() - start_s)
        demoted += sum(len(each.near) for each in went)
        assert went
    return [
        row(f"demote page at {filled.page_count}", sum(spent_s) / demoted, "s", None),
        row(
            f"worst stall in demoting {DEMOTED_PAGES}",
            max(spent_s),
            "s",
            STALL_S,
            target=1.0,
            p99=percentile(spent_s, 0.99),
        ),
    ]


def _far_of(place: int) -> int:
    return FAR_PLACES + place


def _is_free(_slot: int) -> bool:
    return True


def _memory(run_pages: int, page_count: int) -> Row:
    """Bytes a page of resident memory, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        value = pool.submit(_resident_growth, run_pages, page_count).result() / page_count
    limit = RUN_BYTES[run_pages]
    return row(f"memory a page, runs of {run_pages}", value, "bytes", limit, target=1.0)


def _resident_growth(run_pages: int, page_count: int) -> int:
    gc.disable()
    _, tree = _new_index()
    trunk = _chain(-1, 1)
    tree.insert(None, trunk, [0])
    before = _resident_bytes()
    for number in range(page_count // run_pages):
        tree.insert(trunk, _chain(number, run_pages), array("I", range(run_pages)))
    return _resident_bytes() - before


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
