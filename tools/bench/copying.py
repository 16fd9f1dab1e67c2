"""`nexuskv bench copying`: the native copy-and-hash alone, beside plain memcpy of the same bytes.

No daemon: both sides are populated private mappings. The limit of a plain row is one memcpy of the
whole batch, which hashes nothing and may therefore be slower than the loop it is compared with. The
limit of a busy row is the same call alone plus one wait for the interpreter's lock.
"""

from functools import partial
from statistics import median
from typing import Final

from nexuskv.config import KIB, MIB
from nexuskv.tools.bench.bare import BareSegment, Memory, batch_name
from nexuskv.tools.bench.report import Row, row
from nexuskv.tools.bench.timing import BusyThread, alternate

POOL_BYTES: Final = 256 * MIB
GIL_WAIT_S: Final = 0.005
BUSY_S: Final = 0.5  # many switches of the interpreter's lock, or the busy thread's rate is chance
CASES: Final = ((64 * KIB, 32), (64 * KIB, 512), (256 * KIB, 32), (MIB, 32), (4 * MIB, 8))


def rows(quick: bool) -> list[Row]:
    """All rows; `quick` takes fewer rounds."""
    rounds = 9 if quick else 41
    return [each for page_bytes, count in CASES for each in _case(page_bytes, count, rounds=rounds)]


class _Batch:
    """A batch of pages in private memory, a segment that holds many such, and room for one."""

    def __init__(self, page_bytes: int, count: int) -> None:
        self.name = batch_name(page_bytes, count)
        self.batch_bytes = page_bytes * count
        self.segment = BareSegment(page_bytes=page_bytes, slot_count=POOL_BYTES // page_bytes)
        source, target = Memory(self.batch_bytes), Memory(self.batch_bytes)
        from_, into = source.pages(page_bytes, count), target.pages(page_bytes, count)
        self.load = partial(self.segment.load, into=into)
        self.store = partial(self.segment.store, from_=from_)
        self.copy = partial(self.segment.copy, into=target, count=count)
        for turn in range(POOL_BYTES // self.batch_bytes):
            self.store(turn)
            self.load(turn)


def _case(page_bytes: int, count: int, *, rounds: int) -> list[Row]:
    batch = _Batch(page_bytes, count)
    copies, loads, stores = alternate(rounds, batch.copy, batch.load, batch.store)
    copy_s, load_s, store_s = median(copies), median(loads), median(stores)
    rate = batch.batch_bytes / 1e9
    busy_rounds = max(rounds, int(BUSY_S / (load_s + GIL_WAIT_S)))
    with BusyThread() as busy:
        alone = busy.rate_alone()
        busy_loads: list[float] = []
        during = busy.rate(lambda: busy_loads.extend(alternate(busy_rounds, batch.load)[0]))
    return [
        row(f"memcpy {batch.name}", rate / copy_s, "GB/s", None),
        row(f"load {batch.name}", rate / load_s, "GB/s", rate / copy_s),
        row(f"store {batch.name}", rate / store_s, "GB/s", rate / copy_s),
        row(f"busy load {batch.name}", median(busy_loads), "s", load_s + GIL_WAIT_S),
        row(f"busy thread beside load {batch.name}", during, "counts/s", alone, target=0.9),
    ]
