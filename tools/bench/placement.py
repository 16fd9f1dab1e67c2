"""Replays of a trace through two tiers: what each placement policy hits, and what it writes.

The index and the policy are the daemon's own; slots are counted, nothing is stored. One thread;
nothing is timed, so a replay is repeatable to the digit.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from nexuskv.config import SSD_POLICIES, Config
from nexuskv.control.placement import Policy, make_policy
from nexuskv.index.radix import Evicted, RadixIndex
from nexuskv.index.tree import ABSENT
from nexuskv.tools.bench.lru import Request, lru_rate
from nexuskv.tools.bench.report import Row, row
from nexuskv.types import FAR_PLACES, Kind

KEY_BYTES: Final = 8
NAMESPACE_ID: Final = bytes(16)
QUEUE_PAGES: Final = 256
"""Pages that may wait for a copy where the ssd is slow: 256 MiB of 1 MiB pages."""

SLOW_COPIES: Final = 8
"""Copies that a slow ssd ends between two requests; these bring 11 to 16 new pages on average."""

CASES: Final = ((1_000, 10_000, None), (5_000, 30_000, None), (5_000, 30_000, SLOW_COPIES))
"""Pages of host memory, pages of the ssd, copies between two requests."""


@dataclass(slots=True)
class Tally:
    """Pages counted over one replay."""

    asked: int = 0
    host_hits: int = 0
    ssd_hits: int = 0  # each is also promoted, room allowing
    promoted: int = 0
    written: int = 0  # copies made
    dropped: int = 0  # copies wanted while too many waited
    demoted: int = 0
    evicted: int = 0

    @property
    def hits(self) -> int:
        """Pages hit in either tier."""
        return self.host_hits + self.ssd_hits


def rows(trace: str, requests: Sequence[Request], *, quick: bool) -> list[Row]:
    """Three rows a case and policy: the hit rate, its share from host memory, pages written.

    The limits are the rates of an exact LRU of as many pages as the ssd, or host memory, holds.
    """
    found: list[Row] = []
    for host_pages, ssd_pages, copies in CASES[:1] if quick else CASES:
        limit, host_limit = lru_rate(requests, ssd_pages), lru_rate(requests, host_pages)
        slow = "" if copies is None else f", {copies} copies a request"
        for policy in SSD_POLICIES:
            tally = replay(
                requests,
                policy=policy,
                host_pages=host_pages,
                ssd_pages=ssd_pages,
                copies_per_request=copies,
            )
            name = f"{trace} {host_pages}+{ssd_pages} pages {policy}{slow}"
            asked = tally.asked
            found += [
                row(name, tally.hits / asked, "hit rate", limit, **asdict(tally)),
                row(f"{name}, host", tally.host_hits / asked, "hit rate", host_limit),
                row(f"{name}, written", tally.written / asked, "pages a page asked for", None),
            ]
    return found


def replay(
    requests: Iterable[Request],
    *,
    policy: str,
    host_pages: int,
    ssd_pages: int,
    copies_per_request: int | None = None,
) -> Tally:
    """Ask for and then store the pages of each request in order.

    Args:
        requests: page ids of whole prefixes.
        policy: a name of `ssd_policy`.
        host_pages: capacity of host memory; no request may be longer.
        ssd_pages: capacity of the ssd; 0: none.
        copies_per_request: copies that end between two requests; None: all that wait.
    """
    tiers = TwoTiers(
        make_policy(
            policy,
            # As many as the ssd holds: what the default is to an ssd of a million pages.
            second_use_pages_max=max(1, ssd_pages),
            ahead_pages_max=Config().ssd_ahead_pages_max,
        ),
        host_pages=host_pages,
        ssd_pages=ssd_pages,
        queue_pages=QUEUE_PAGES if copies_per_request is not None else host_pages,
    )
    for request in requests:
        tiers.request(request[:host_pages])
        tiers.tally.asked += len(request)
        tiers.copy(copies_per_request)
    return tiers.tally


class TwoTiers:
    """Host memory and an ssd as numbers: the control plane's rules without its bytes.

    A page is at one place in the index, near while it is in host memory; `_copy_of` says which near
    pages have a copy. Pages of the request at hand are no victims; those that wait for a copy are,
    and then wait no more.
    """

    def __init__(
        self, policy: Policy, *, host_pages: int, ssd_pages: int, queue_pages: int
    ) -> None:
        self.tally = Tally()
        self._policy = policy
        self._has_ssd = ssd_pages > 0
        self._queue_pages = queue_pages if self._has_ssd else 0
        self._index = RadixIndex(fragments_max=host_pages + ssd_pages)
        self._tree = self._index.open(
            NAMESPACE_ID, kind=Kind.ATTENTION, key_bytes=KEY_BYTES, group=1
        )
        self._host_free = list(range(host_pages))
        self._ssd_free = list(range(FAR_PLACES, FAR_PLACES + ssd_pages))
        self._copy_of = array("I", [ABSENT] * host_pages)
        self._queue: OrderedDict[int, None] = OrderedDict()  # near places
        self._kept: set[int] = set()

    # --- a request

    def request(self, pages: Request) -> None:
        """Look pages up, promote those hit on the ssd, and store those missed."""
        keys = b"".join(page.to_bytes(KEY_BYTES, "little") for page in pages)
        places = self._tree.find(keys)
        self._kept = set(places)
        hit = places.index(ABSENT) if ABSENT in places else len(places)
        near = [place for place in places[:hit] if place < FAR_PLACES]
        self.tally.host_hits += len(near)
        self.tally.ssd_hits += hit - len(near)
        self._want(self._policy.used(np.array(near, dtype=np.uint32)).tolist())
        self._promote(keys, places[:hit])
        self._store(keys, places)
        self._kept = set()

    def _promote(self, keys: bytes, places: "array[int]") -> None:
        far = [index for index, place in enumerate(places) if place >= FAR_PLACES]
        self._make_host_room(len(far))
        far = far[: len(self._host_free)]
        old = [places[index] for index in far]
        new = [self._host_free.pop() for _ in far]
        moved = self._tree.move(b"".join(_key(keys, index) for index in far), old, new)
        assert all(moved)
        for place, copy in zip(new, old, strict=True):
            self._copy_of[place] = copy
        self._kept.update(new)
        self.tally.promoted += len(far)

    def _store(self, keys: bytes, places: "array[int]") -> None:
        missing = [index for index, place in enumerate(places) if place == ABSENT]
        self._make_host_room(len(missing))
        assert len(missing) <= len(self._host_free)
        slots = [self._host_free.pop() for _ in missing]
        for index, slot in zip(missing, slots, strict=True):
            places[index] = slot
        self._tree.insert(None, keys, places)
        names = b"".join(_key(keys, index) for index in missing)
        given = np.array(slots, dtype=np.uint32)
        pressed = 2 * len(self._queue) >= self._queue_pages
        self._want(self._policy.committed(NAMESPACE_ID, names, given, pressed=pressed).tolist())
        cold = self._policy.leaving(len(missing), free_count=len(self._host_free))
        if cold and self._queue_pages:
            found = self._index.cold_near(cold, wants=self._needs_copy)
            self._want([place for _, _, place in found])

    # --- copies

    def _needs_copy(self, place: int) -> bool:
        return self._copy_of[place] == ABSENT and place not in self._queue

    def _want(self, places: Iterable[int]) -> None:
        for place in filter(self._needs_copy, places):
            if len(self._queue) < self._queue_pages:
                self._queue[place] = None
            elif self._queue_pages:
                self.tally.dropped += 1

    def copy(self, count: int | None) -> None:
        """End up to `count` of the copies that wait; None: all of them."""
        self._make_ssd_room(len(self._queue) if count is None else min(count, len(self._queue)))
        for _ in range(len(self._queue) if count is None else count):
            if not self._queue or not self._ssd_free:
                return
            place, _ = self._queue.popitem(last=False)
            self._copy_of[place] = self._ssd_free.pop()
            self.tally.written += 1

    # --- room

    def _is_free(self, place: int) -> bool:
        return place not in self._kept

    def _has_copy(self, place: int) -> bool:
        return place >= FAR_PLACES or self._copy_of[place] != ABSENT

    def _make_host_room(self, count: int) -> None:
        """Give up the coldest near pages until `count` slots are free."""
        while (short := count - len(self._host_free)) > 0:
            if not self._has_ssd:
                self._gone(self._index.evict(short, is_free=self._is_free, now=0.0))
                return
            cold = self._index.cold_near(short, wants=self._is_free)
            bare = [key for _, key, place in cold if not self._has_copy(place)]
            gone = 0
            if len(bare) < len(cold):
                gone = sum(self._lose_leaf(key) for key in bare)
                gone += self._demote(count - len(self._host_free))
            if not gone and not self._gone(
                self._index.evict_near(short, is_free=self._is_free, now=0.0)
            ):
                return

    def _lose_leaf(self, key: bytes) -> int:
        if self._index.descendant_count(self._tree, key, limit=1):
            return 0
        return self._gone(
            self._index.evict_subtrees(self._tree, [key], is_free=self._is_free) or ()
        )

    def _demote(self, count: int) -> int:
        demoted = self._index.demote(
            count, far_of=self._copy_of.__getitem__, is_free=self._is_free, now=0.0
        )
        for each in demoted:
            for place in each.near:
                self._copy_of[place] = ABSENT
                self._host_free.append(place)
            self.tally.demoted += len(each.near)
        return len(demoted)

    def _make_ssd_room(self, count: int) -> None:
        """Give up the coldest copies until `count` slots of the ssd are free."""
        while (short := count - len(self._ssd_free)) > 0:
            if not self._gone(self._index.evict(short, is_free=self._gives_ssd_room, now=0.0)):
                self._detach(short)
                return

    def _gives_ssd_room(self, place: int) -> bool:
        return self._is_free(place) and self._has_copy(place)

    def _detach(self, count: int) -> None:
        """Let pages in host memory give up their copies: no leaf has one."""
        for _, _, place in self._index.cold_near(count, wants=self._has_copy):
            self._ssd_free.append(self._copy_of[place])
            self._copy_of[place] = ABSENT

    def _gone(self, evicted: Sequence[Evicted]) -> int:
        for each in evicted:
            for place in each.slots:
                if place >= FAR_PLACES:
                    self._ssd_free.append(place)
                    continue
                if self._copy_of[place] != ABSENT:
                    self._ssd_free.append(self._copy_of[place])
                    self._copy_of[place] = ABSENT
                self._queue.pop(place, None)
                self._host_free.append(place)
            self.tally.evicted += len(each.slots)
        return len(evicted)


def _key(keys: bytes, index: int) -> bytes:
    return keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
