"""`bench hitrate`: hit rates of the index on the request traces, beside an exact LRU.

In one tier here, in two by each placement policy in placement.py.

A request hits as many pages as it has in one unbroken run from its start; the rate is hits over
pages asked for, of all requests. Every page asked for is stored afterwards. One thread; nothing is
timed, so a run is repeatable to the digit.
"""

from array import array
from collections.abc import Iterable
from typing import Final

from nexuskv.index.radix import RadixIndex
from nexuskv.tools.bench import placement
from nexuskv.tools.bench.lru import Request, lru_rate
from nexuskv.tools.bench.report import Row, row
from nexuskv.tools.trace import TRACES, read_trace
from nexuskv.types import Kind

KEY_BYTES: Final = 8
CAPACITIES: Final = (1_000, 5_000, 10_000, 30_000, 50_000)
QUICK_REQUESTS: Final = 2_000
TARGETS: Final = {("conversation", 10_000): 0.211}


def rows(quick: bool) -> list[Row]:
    """A row a trace and capacity, its limit the LRU's rate; `quick` replays 2 000 requests.

    A row with a rate to reach of its own stands beside it; then come those of two tiers.
    """
    found: list[Row] = []
    for trace in TRACES:
        requests = load(trace, QUICK_REQUESTS if quick else None)
        for capacity in CAPACITIES:
            rate, exact = index_rate(requests, capacity), lru_rate(requests, capacity)
            found.append(row(f"{trace} {capacity} pages", rate, "hit rate", exact, target=1.0))
            reach = TARGETS.get((trace, capacity))
            if reach is not None and not quick:
                name = f"{trace} {capacity} pages, to reach"
                found.append(row(name, rate, "hit rate", reach, target=1.0))
        found += placement.rows(trace, requests, quick=quick)
    return found


def load(trace: str, request_count: int | None) -> list[Request]:
    """The page ids of a trace's requests, or of its first `request_count`."""
    return [request.hash_ids for request in read_trace(trace, limit=request_count)]


def index_rate(requests: Iterable[Request], capacity: int) -> float:
    """The hit rate of a `RadixIndex` that holds `capacity` pages."""
    index = RadixIndex(fragments_max=capacity)
    tree = index.open(bytes(16), kind=Kind.ATTENTION, key_bytes=KEY_BYTES, group=1)
    hits = asked = 0
    for request in requests:
        # What cannot be held at all is not stored: the request's own tail.
        keys = b"".join(page.to_bytes(KEY_BYTES, "little") for page in request[:capacity])
        hits += tree.match(keys)
        asked += len(request)
        over = tree.page_count + len(tree.missing(keys)) - capacity
        if over > 0:
            index.evict(over, is_free=_is_free, now=0.0)
        tree.insert(None, keys, array("I", bytes(4 * len(request[:capacity]))))
    return hits / asked


def _is_free(_slot: int) -> bool:
    return True
