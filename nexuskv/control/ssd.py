"""The ssd tier as a whole: its state, its parts, and the worker's word about it.

States: `starting` (no worker serves it now), `ready`, `failed` for good. A tier that has failed
takes no copies and loads nothing; what only it held leaves the index, in slices, and host memory
serves on (I9, I10). Rows that were not deleted stay on disk then, so nothing they might bring back
can be cleared or removed any more.

Build it with `Ssd`, then `join` it with the parts that themselves need its copies. Control loop.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.asked import Asked
from nexuskv.control.bandwidth import Bandwidth
from nexuskv.control.copies import Copies
from nexuskv.control.copying import Copying
from nexuskv.control.counters import Counters
from nexuskv.control.drops import Done, Drops
from nexuskv.control.epochs import Epochs
from nexuskv.control.events import EventStream
from nexuskv.control.loading import Loading
from nexuskv.control.loads import Loads
from nexuskv.control.loop import Loop
from nexuskv.control.namespaces import Namespace, Namespaces
from nexuskv.control.pages import Pages, as_slots
from nexuskv.control.placement import make_policy
from nexuskv.control.recovery import Recovery
from nexuskv.control.room import Room, Writer
from nexuskv.control.ssdrecords import SsdRecords
from nexuskv.control.ssdroom import SsdRoom
from nexuskv.control.waiting import Waiting
from nexuskv.errors import Unavailable
from nexuskv.index.radix import RadixIndex
from nexuskv.index.tree import ABSENT
from nexuskv.tiers.host import HostTier
from nexuskv.tiers.owner import Process
from nexuskv.tiers.ssd import SsdSlotState, SsdTier
from nexuskv.types import FAR_PLACES
from nexuskv.worker.commands import CommandQueue, FileMade, WorkerReady

_LOG = logging.getLogger("nexuskv.control")
_SWEEP_ROWS: Final = 1024  # pages looked at in one slice after the tier has failed

Told = Callable[[str | None], None]


class Ssd:
    """The second tier of one control plane."""

    def __init__(
        self,
        *,
        config: Config,
        clock: Clock,
        host: HostTier,
        asked: Asked,
        namespaces: Namespaces,
        counters: Counters,
        incarnation: bytes,
    ) -> None:
        """The parts that need nothing of the host's side.

        Raises:
            ConfigError: a size of the tier is wrong.
        """
        self._config = config
        self._clock = clock
        self._asked = asked
        self._namespaces = namespaces
        self._counters = counters
        self.tier = SsdTier.open(
            capacity_bytes=config.ssd_capacity,
            file_bytes=config.ssd_file_bytes,
            slot_bytes_min=config.ssd_slot_bytes_min,
            incarnation=incarnation,
        )
        self.drops = Drops(
            config=config, tier=self.tier, asked=asked, clock=clock, counters=counters
        )
        self.copies = Copies(tier=self.tier, drops=self.drops, host_slot_count=host.slot_count)
        self.epochs = Epochs(asked=asked, namespaces_max=config.ssd_namespaces_max)
        namespaces.epoch_before = self.epochs.epoch_of
        self.records = SsdRecords(
            config=config,
            clock=clock,
            copies=self.copies,
            asked=asked,
            host=host,
            namespaces=namespaces,
        )
        self.bandwidth = Bandwidth(clock)
        self._writer: Writer | None = None
        self._failure: str | None = None
        self._was_ready = False
        self._sweep: Iterator[None] | None = None
        self._waiting_for_rows: list[Told] = []

    def join(
        self,
        *,
        index: RadixIndex,
        pages: Pages,
        room: Room,
        waiting: Waiting,
        events: EventStream,
        recovery: Recovery,
        worker: CommandQueue,
        loop: Loop,
    ) -> None:
        """The parts that move pages between the tiers."""
        config, counters = self._config, self._counters
        self._pages = pages
        self._events = events
        self._host_room = room
        self._recovery = recovery
        self.records.resume = recovery.resume
        self.room = SsdRoom(
            config=config,
            clock=self._clock,
            index=index,
            pages=pages,
            copies=self.copies,
            namespaces=self._namespaces,
            worker=worker,
            counters=counters,
        )
        self.copying = Copying(
            config=config,
            index=index,
            pages=pages,
            copies=self.copies,
            epochs=self.epochs,
            room=self.room,
            asked=self._asked,
            policy=make_policy(
                config.ssd_policy,
                second_use_pages_max=config.ssd_second_use_pages_max,
                ahead_pages_max=config.ssd_ahead_pages_max,
            ),
            counters=counters,
            ready=lambda: self.writer is not None,
        )
        self.drops.on_free.append(self.copying.resume)
        self.loads = Loads(
            config=config,
            pages=pages,
            copies=self.copies,
            room=room,
            asked=self._asked,
            bandwidth=self.bandwidth,
            counters=counters,
            writer=lambda: self.writer,
        )
        self.loads.listener = waiting
        self.loading = Loading(
            config=config, clock=self._clock, pages=pages, loads=self.loads, groups=waiting
        )
        waiting.loading = self.loading
        loop.add_drain(self.turn)
        loop.add_ticker(self.drops)
        loop.add_ticker(self.loading)
        loop.add_ticker(self)

    # --- what it is good for now

    @property
    def state(self) -> str:
        """`starting`, `ready`, or `failed: ` and why."""
        if self._failure is not None:
            return f"failed: {self._failure}"
        return "ready" if self._writer is not None else "starting"

    @property
    def writer(self) -> Writer | None:
        """The worker's process while it serves the tier."""
        return self._writer if self._failure is None else None

    def may_hold(self, namespace: Namespace) -> bool:
        """Whether the catalogue has, or may have, pages of a namespace."""
        return not self._was_ready or self.epochs.has(namespace)

    def check_writable(self) -> None:
        """Check that the catalogue can be written.

        Raises:
            Unavailable: it cannot be now.
        """
        if self._failure is not None:
            raise Unavailable(
                f"the ssd tier has left service ({self._failure}): what it holds of this namespace "
                "could come back; nothing is changed"
            )
        if self._writer is None:
            raise Unavailable("no worker serves the ssd's catalogue now; nothing is changed")

    # --- removals

    def slots_of(self, namespace: Namespace, keys: bytes) -> tuple[list[int], list[int]]:
        """Ssd slots of the copies of some pages, and host slots of those being copied now."""
        copies: list[int] = []
        copying: list[int] = []
        for place in namespace.tree.find(keys, touch=False):
            if place == ABSENT:
                continue
            far = place if place >= FAR_PLACES else self.copies.far_of(place)
            if far != ABSENT:
                copies.append(far - FAR_PLACES)
            elif self.copying.is_under_way(place):
                copying.append(place)
        return copies, copying

    def when_gone(self, ssd_slots: Sequence[int], copying: Sequence[int], done: Done) -> None:
        """Call `done` once these slots' rows are gone and what became of these copies too."""
        gone = list(ssd_slots)
        left = len(copying)

        def settled(ssd_slot: int) -> None:
            nonlocal left
            left -= 1
            gone.append(ssd_slot)
            if not left:
                self.drops.when_gone(gone, done)

        if not left:
            self.drops.when_gone(gone, done)
        for slot in copying:
            self.copying.when_settled(slot, settled)
        self.drops.pump()

    def when_read(self, told: Told) -> None:
        """Call `told` once every row that an earlier run left is accounted for."""
        if not self._recovery.running:
            told(None)
        else:
            self._waiting_for_rows.append(told)

    # --- the worker's word

    def worker_ready(self, news: WorkerReady) -> None:
        """A worker serves now, with these files and namespaces."""
        process = Process.of(news.pid)
        if process is None or self._failure is not None:
            return
        if news.ssd_error is not None:
            self.fail(news.ssd_error)
            return
        self._writer = Writer(process.pid, process.start_time)
        for file in news.files:
            if self.tier.found(file.file_index, file.slot_bytes) and self._was_ready:
                # Made by the worker before, which died before it said so: no row names it.
                self.tier.settle_file(file.file_index)
        if not self._was_ready:
            for row in news.namespaces:
                self.epochs.found(row.namespace_id, row.epoch)
                self._namespaces.found(row.namespace_id, row.record, row.epoch)
        self._was_ready = True
        self.tier.resume_growth()
        self.records.start()
        self.drops.resume()
        self.answered()

    def worker_lost(self) -> None:
        """No worker serves for now."""
        self._writer = None
        self.records.stop()
        self.loading.changed()

    def file_made(self, result: FileMade) -> None:
        """A file can be used, or could not be made."""
        self.room.file_made(result)

    def answered(self) -> None:
        """Answers of the worker have been handled: there may be room for more commands."""
        self.loads.settle()
        self.room.pump()
        self.drops.pump()
        self.copying.resume()
        self.loading.changed()
        self.records.pump()

    def fail(self, reason: str) -> None:
        """The tier leaves service, for as long as this daemon runs. Idempotent."""
        if self._failure is not None:
            return
        self._failure = reason
        _LOG.error("the ssd tier leaves service: %s", reason)
        self.copies.end_service()
        self.copying.end_service()
        for namespace in self._namespaces.by_id.values():
            namespace.copy_count = namespace.far_count
        self.records.give_up()
        self.drops.end_service()
        self.loading.changed()
        self._sweep = self._swept()

    # --- time

    def turn(self) -> None:
        """What may be done once a turn, when replies are out."""
        self.copying.make_ahead()
        self.drops.pump()
        self.loading.pump()
        if self._waiting_for_rows and not self._recovery.running:
            waiting, self._waiting_for_rows = self._waiting_for_rows, []
            for told in waiting:
                told(None)

    def next_due(self) -> float | None:
        """At once while far pages are swept out; else when rows are asked for again."""
        return 0.0 if self._sweep is not None else self.records.retry_s

    def tick(self, now_s: float) -> None:
        """Sweep on, or read on."""
        self.records.retry(now_s)
        if self._sweep is not None and next(self._sweep, self) is self:
            self._sweep = None

    def _swept(self) -> Iterator[None]:
        """Take the pages out of the index that only the failed tier held."""
        while True:
            more_may_come = self._recovery.running
            for namespace in list(self._namespaces.by_id.values()):
                yield from self._sweep_namespace(namespace)
            if not more_may_come:
                return
            yield

    def _sweep_namespace(self, namespace: Namespace) -> Iterator[None]:
        cursor: bytes | None = None
        while namespace.far_count:
            rows, cursor = namespace.tree.inspect(cursor, _SWEEP_ROWS)
            for row in rows:
                if row.slot >= FAR_PLACES and namespace.tree.drop(row.key, row.slot):
                    self.copies.left(namespace, as_slots([row.slot]))
                    self._events.removed(namespace.id, row.key)
            self._host_room.trim()
            yield
            if cursor is None:
                return

    # --- looking

    def namespaces(self) -> list[Namespace]:
        """All that are known."""
        return list(self._namespaces.by_id.values())

    def gauges(self) -> dict[str, int]:
        """Numbers that go up and down, by name."""
        tier = self.tier
        return {
            "ssd_capacity_bytes": tier.capacity_bytes,
            "ssd_file_bytes": tier.file_bytes_on_disk,
            "ssd_used_bytes": tier.used_bytes,
            "ssd_writing_bytes": tier.bytes_in(SsdSlotState.WRITING),
            "ssd_dropping_bytes": tier.bytes_in(SsdSlotState.DROPPING),
            "ssd_unknown_bytes": tier.bytes_in(SsdSlotState.UNKNOWN),
            "ssd_pages": sum(ns.copy_count for ns in self._namespaces.by_id.values()),
            "ssd_only_pages": sum(ns.far_count for ns in self._namespaces.by_id.values()),
            "copy_queue_bytes": self.copying.queued_bytes,
            "copies_in_flight": self.copying.under_way_count,
            "loads_in_flight": len(self.loads),
            "load_inflight_bytes": self.loads.inflight_bytes,
            "ssd_rows_to_drop": self.drops.waiting_count,
        }
