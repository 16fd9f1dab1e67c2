"""Recovery: from the records that an earlier run left to an index that finds their pages (I11).

Runs on the control loop in slices of `recover_slice_s`, between requests. Each tier is read in
turn, then what hangs below a prefix's first page is put into the index, then the rest as fragments.
A page that was committed meanwhile wins over a recovered one; a page that was removed or cleared
meanwhile does not come back. Control loop only.
"""

import gc
import logging
from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.counters import Counters
from nexuskv.control.events import EventStream
from nexuskv.control.joining import Joiner
from nexuskv.control.namespaces import Namespace, Namespaces
from nexuskv.control.pages import as_slots
from nexuskv.control.room import Room
from nexuskv.control.waiting import Waiting
from nexuskv.index.chains import Parent
from nexuskv.index.radix import RadixIndex
from nexuskv.key import split_keys
from nexuskv.protocol import ParentState
from nexuskv.tiers.host import SlotArray
from nexuskv.tiers.record import NAMESPACE_ID_BYTES, Batch, pick
from nexuskv.types import FAR_PLACES

_STEP_RECORDS: Final = 2048

_LOG = logging.getLogger("nexuskv.control")


class Found(NamedTuple):
    """Records of committed pages, all intact, in the order of their tier."""

    records: Batch
    places: SlotArray  # u32, one a record


class RecoverySource(Protocol):
    """One tier's records, read once. Places below `FAR_PLACES` are the host tier's."""

    @property
    def rows_total(self) -> int:
        """Records on record, as far as is known."""
        ...

    @property
    def rows_done(self) -> int:
        """Records read."""
        ...

    @property
    def ended(self) -> bool:
        """Whether all were read."""
        ...

    def read(self) -> Found | None:
        """The next ones, a few ms' worth; None: none yet, and `Recovery.resume` tells when."""
        ...

    def refuse(self, places: SlotArray) -> None:
        """These pages may not come back, or are held by another place of this tier: free them."""
        ...

    def entered(self, namespace: Namespace, places: SlotArray) -> None:
        """The pages at these places of the tier are in the index."""
        ...

    def also_held(self, place: int, near: int) -> None:
        """The page at this far place is in host memory too, and in the index by that place."""
        ...


class Recovery:
    """One run of recovery; a `Ticker` that is always due until it has ended."""

    def __init__(
        self,
        *,
        config: Config,
        clock: Clock,
        namespaces: Namespaces,
        near: RecoverySource,
        far: RecoverySource | None = None,
        index: RadixIndex,
        room: Room,
        waiting: Waiting,
        events: EventStream,
        counters: Counters,
    ) -> None:
        """Nothing is read before the first tick.

        Args:
            config: for `recover_slice_s`.
            clock: measures slices.
            namespaces: those on record are known already.
            near: the host tier's records.
            far: the ssd tier's.
            index: for the number of fragments, which is out of bounds only until the end.
            room: evicts those over it.
            waiting: told of pages that are readable now.
            events: the same.
            counters: of the daemon.
        """
        self._config = config
        self._clock = clock
        self._namespaces = namespaces
        self._near = near
        self._far = far
        self._index = index
        self._room = room
        self._waiting = waiting
        self._events = events
        self._counters = counters
        self._joiners: dict[bytes, Joiner] = {}
        self._gone: set[int] = set()  # places of pages removed before they were in the index
        self._paused = False
        self._steps: Iterator[None] | None = None if near.ended and far is None else self._work()

    # --- as seen from outside

    @property
    def running(self) -> bool:
        """Whether pages may still come."""
        return self._steps is not None

    def gauges(self) -> dict[str, int]:
        """Progress, in records."""
        sources = [each for each in (self._near, self._far) if each is not None]
        return {
            "recovering": int(self.running),
            "recovery_pages_done": sum(each.rows_done for each in sources),
            "recovery_pages_total": sum(each.rows_total for each in sources),
        }

    def resume(self) -> None:
        """A source that had nothing to read has again."""
        self._paused = False

    def removed(self, places: SlotArray) -> None:
        """Pages read already, but not in the index yet, were removed: they must not get there."""
        self._gone.update(places.tolist())

    # --- as seen from the loop

    def next_due(self) -> float | None:
        """Always due while there is something to do."""
        return 0.0 if self._steps is not None and not self._paused else None

    def tick(self, now_s: float) -> None:
        """Work for one slice."""
        if self._steps is None:
            return
        until_s = now_s + self._config.recover_slice_s
        for _ in self._steps:
            if self._paused or self._clock.now() >= until_s:
                return
        self._steps = None

    def _work(self) -> Iterator[None]:
        started_s = self._clock.now()
        _LOG.info("recovery: %d records to be read", self.gauges()["recovery_pages_total"])
        try:
            for source in (self._near, self._far):
                if source is not None:
                    yield from self._read(source)
                    for joiner in list(self._joiners.values()):
                        yield from self._follow(joiner, joiner.attach())
            for joiner in list(self._joiners.values()):
                yield from self._follow(joiner, joiner.scatter())
        finally:
            for joiner in self._joiners.values():
                joiner.namespace.opened_by -= 1
            self._joiners.clear()
        over = -1
        while self._index.fragments_over not in (0, over):
            over = self._index.fragments_over
            self._room.trim()
            yield
        if not gc.isenabled():
            gc.freeze()  # a daemon that collects by hand need not look at all of this again
        count = self._counters.snapshot()
        _LOG.info(
            "recovery: %d pages found again, %d dropped, in %.2f s",
            count["recovered_pages"],
            count["recovery_dropped_pages"],
            self._clock.now() - started_s,
        )

    def _read(self, source: RecoverySource) -> Iterator[None]:
        while not source.ended:
            found = source.read()
            if found is None:
                self._paused = True
                yield
                continue
            # A tier may find much at once, where only the last record makes sense of the others.
            for start in range(0, len(found.records), _STEP_RECORDS):
                part = slice(start, start + _STEP_RECORDS)
                self._sort(source, Found(found.records[part], found.places[part]))
                yield
            yield

    def _follow(self, joiner: Joiner, steps: Iterator[None]) -> Iterator[None]:
        """Go on with a joiner until its namespace is cleared."""
        while joiner.namespace.tree.epoch == joiner.epoch:
            if next(steps, steps) is steps:
                return
            yield
        self._refuse(joiner.drop())

    # --- what becomes of a record

    def _sort(self, source: RecoverySource, found: Found) -> None:
        """Hand records to the joiners of their namespaces; refuse those that may not return."""
        ids = np.ascontiguousarray(found.records["namespace_id"]).view(f"S{NAMESPACE_ID_BYTES}")
        names = [ids[0]] if (ids == ids[0]).all() else np.unique(ids).tolist()
        for name in names:
            of_this = ids == name
            records, places = pick(found.records, of_this), found.places[of_this]
            joiner = self._joiner(bytes(name).ljust(NAMESPACE_ID_BYTES, b"\0"))
            good = np.zeros(len(records), dtype=np.bool_)
            if joiner is not None:
                namespace = joiner.namespace
                good = records["epoch"] == namespace.tree.epoch
                good &= joiner.epoch == namespace.tree.epoch
                good &= records["key_bytes"] == namespace.key_bytes
                good &= records["size_bytes"] == namespace.page_bytes
                joiner.add(pick(records, good), places[good])
            if not good.all():
                self._counters.add("recovery_dropped_pages", int((~good).sum()))
                source.refuse(places[~good])

    def _joiner(self, namespace_id: bytes) -> Joiner | None:
        joiner = self._joiners.get(namespace_id)
        if joiner is None:
            namespace = self._namespaces.by_id.get(namespace_id)
            if namespace is None:
                return None
            namespace.opened_by += 1  # or it might be forgotten while it has no pages yet
            joiner = self._joiners[namespace_id] = Joiner(namespace, self._publish)
        return joiner

    def _publish(
        self, namespace: Namespace, parent: Parent, keys: bytes, places: "array[int]"
    ) -> None:
        losers = namespace.tree.insert(parent, keys, places, used=False)
        self._counters.add("recovered_pages", len(places) - len(losers))
        if self._far is not None:
            self._enter(self._far, namespace, places, losers)
        if losers:
            self._settle_losers(namespace, keys, places, losers)
        if self._gone and not self._gone.isdisjoint(places):
            self._take_out(namespace, keys, places)
        self._announce(namespace, parent, keys)

    def _announce(self, namespace: Namespace, parent: Parent, keys: bytes) -> None:
        named = parent if isinstance(parent, bytes) else b""
        state = ParentState.KEY if named else ParentState.UNKNOWN
        if parent is None:
            state = ParentState.ROOT
        self._events.stored(namespace.id, parent_state=state, parent=named, keys=keys)
        if self._waiting.wants(namespace):
            self._waiting.committed(namespace, split_keys(keys, namespace.key_bytes))

    def _enter(
        self, tier: RecoverySource, namespace: Namespace, places: "array[int]", losers: list[int]
    ) -> None:
        every = as_slots(places)
        far = every[every >= FAR_PLACES]
        if losers:
            far = far[~np.isin(far, losers)]
        if len(far):
            tier.entered(namespace, far)

    def _settle_losers(
        self, namespace: Namespace, keys: bytes, places: "array[int]", losers: list[int]
    ) -> None:
        """Pages that the index holds by another place: one place a tier stays."""
        lost = set(losers)
        for key, place in zip(split_keys(keys, namespace.key_bytes), places, strict=True):
            if place not in lost:
                continue
            held = namespace.tree.slot_of(key)
            assert held is not None, "what lost has met a winner"
            if (held < FAR_PLACES) == (place < FAR_PLACES):
                self._refuse(array("I", [place]))
            elif place < FAR_PLACES:
                namespace.tree.move(key, array("I", [held]), array("I", [place]))
                self._note_both(held, place)
            else:
                self._note_both(place, held)

    def _note_both(self, far: int, near: int) -> None:
        assert self._far is not None, "a far place without a far tier"
        self._far.also_held(far, near)

    def _take_out(self, namespace: Namespace, keys: bytes, places: "array[int]") -> None:
        """Take pages that were removed meanwhile out of the index again."""
        for key, place in zip(split_keys(keys, namespace.key_bytes), places, strict=True):
            if place in self._gone:
                self._gone.discard(place)
                if namespace.tree.drop(key, place):
                    self._counters.add("recovered_pages", -1)
                    self._refuse(array("I", [place]))

    def _refuse(self, places: "array[int]") -> None:
        """Give pages back to the tiers that hold them."""
        every = as_slots(places)
        self._counters.add("recovery_dropped_pages", len(every))
        near = every < FAR_PLACES
        if near.any():
            self._near.refuse(every[near])
        if self._far is not None and not near.all():
            self._far.refuse(every[~near])
