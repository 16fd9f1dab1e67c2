"""The reference of `bench hitrate`: an exact least-recently-used order of pages.

Pure; one thread.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

Request = Sequence[int]


def lru_rate(requests: Iterable[Request], capacity: int) -> float:
    """The hit rate of an exact LRU of pages, touched tail to head."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = asked = 0
    for request in requests:
        for page in request:
            if page not in held:
                break
            hits += 1
        asked += len(request)
        for page in reversed(request):
            held[page] = None
            held.move_to_end(page)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits / asked
