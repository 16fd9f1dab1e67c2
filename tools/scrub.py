"""Reading and checking every page of a store, tier by tier, in bounded batches. See `verify`.

The daemon's worker reads and hashes; bad pages have left their tier when it answers. Pages come and
go meanwhile: one that is gone when its turn comes is counted as that and is no fault.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nexuskv.tools.pace import Pace
from nexuskv.types import PageStatus

if TYPE_CHECKING:
    from nexuskv.client.store import Store

TIERS: Final = ("host", "ssd")
BATCH_PAGES: Final = 256  # of one message
BATCH_BYTES: Final = 64 * 1024**2  # a slow disk reads them well within one transfer's time
BATCHES_PER_S: Final = 4  # under a rate: smaller batches, so that it is kept at any moment


@dataclass(slots=True)
class Tally:
    """What was found in one tier. `bytes` are those of the pages that were read."""

    tier: str
    pages: int = 0
    bytes: int = 0
    good: int = 0
    corrupt: int = 0
    gone: int = 0  # left the tier before they were read
    unreadable: int = 0

    @property
    def bad(self) -> int:
        """Pages that are damaged or cannot be read."""
        return self.corrupt + self.unreadable


@dataclass(slots=True)
class Batch:
    """Pages of one namespace in one tier, to be read by one message."""

    namespace_id: bytes
    tier: str
    keys: list[bytes]
    size_bytes: int = 0


def scrub(
    store: "Store",
    namespaces: Sequence[bytes],
    *,
    tiers: Sequence[str],
    pace: Pace,
    progress: Callable[[int, Sequence[Tally]], None],
) -> Sequence[Tally]:
    """Check every page of some namespaces; one tally a tier.

    Args:
        store: an open store.
        namespaces: their ids.
        tiers: which, of `TIERS`.
        pace: waits after each batch, and says how large one may be.
        progress: told after each batch how many rows were looked at, and the tallies.

    Raises:
        NexusError: the daemon is away or refuses.
    """
    tallies = {tier: Tally(tier) for tier in tiers}
    most_bytes = min(pace.bytes_per_s // BATCHES_PER_S or BATCH_BYTES, BATCH_BYTES)
    for seen, batch in _batches(store, namespaces, tiers, most_bytes):
        statuses = store.verify(batch.namespace_id, b"".join(batch.keys), tier=batch.tier)
        tally = tallies[batch.tier]
        _count(tally, statuses, batch)
        progress(seen, tuple(tallies.values()))
        pace.did(batch.size_bytes)
    return tuple(tallies.values())


def _count(tally: Tally, statuses: Sequence[PageStatus], batch: Batch) -> None:
    tally.pages += len(statuses)
    tally.good += statuses.count(PageStatus.HIT)
    tally.corrupt += statuses.count(PageStatus.CORRUPT)
    tally.gone += statuses.count(PageStatus.MISS)
    tally.unreadable += statuses.count(PageStatus.UNAVAILABLE)
    read = statuses.count(PageStatus.HIT) + statuses.count(PageStatus.CORRUPT)
    tally.bytes += batch.size_bytes * read // max(len(statuses), 1)


def _batches(
    store: "Store", namespaces: Sequence[bytes], tiers: Sequence[str], most_bytes: int
) -> Iterator[tuple[int, Batch]]:
    """Batches, each with the number of rows looked at so far."""
    seen = 0
    for namespace_id in namespaces:
        open_ = {tier: Batch(namespace_id, tier, []) for tier in tiers}
        for key, size_bytes, residency in _rows(store.inspect("pages", namespace_id)):
            seen += 1
            for tier in residency:
                batch = open_.get(tier)
                if batch is None:
                    continue
                batch.keys.append(key)
                batch.size_bytes += size_bytes
                if len(batch.keys) >= BATCH_PAGES or batch.size_bytes >= most_bytes:
                    open_[tier] = Batch(namespace_id, tier, [])
                    yield seen, batch
        yield from _rest(seen, open_)


def _rest(seen: int, open_: Mapping[str, Batch]) -> Iterator[tuple[int, Batch]]:
    for batch in open_.values():
        if batch.keys:
            yield seen, batch


def _rows(rows: Iterable[Sequence[object]]) -> Iterator[tuple[bytes, int, Sequence[str]]]:
    """Key, bytes and tiers of each page row."""
    for row in rows:
        key, residency, size_bytes = row[0], row[4], row[5]
        assert isinstance(key, bytes)
        assert isinstance(residency, list)
        assert isinstance(size_bytes, int)
        yield key, size_bytes, residency
