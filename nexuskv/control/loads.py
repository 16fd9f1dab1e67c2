"""Pages on their way from the ssd into host memory.

Owns the loads under way, at most `load_inflight_bytes`: the host slot each goes to, and the ssd
slot it comes from, which no other copy gets meanwhile. Everybody who wants a page shares its load.
The slot's header names the worker before the command is sent (I14); the slot is freed only after
the worker's answer, and the supervisor answers for a dead worker only once it was reaped.

A load's page may have been cleared, removed or stored anew meanwhile: then its bytes are discarded.
Control thread only.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

from nexuskv.config import Config
from nexuskv.control.asked import Asked, TokenAnswer
from nexuskv.control.bandwidth import Bandwidth
from nexuskv.control.copies import Copies
from nexuskv.control.counters import Counters
from nexuskv.control.namespaces import Namespace
from nexuskv.control.pages import Pages, as_slots, on_record
from nexuskv.control.room import Room, Writer
from nexuskv.types import DESCRIPTOR_BYTES, FAR_PLACES, PageStatus
from nexuskv.worker.commands import CopiedIn, CopyIn, CopyInRow

_LOG = logging.getLogger("nexuskv.control")
_COMMAND_PAGES_MAX: Final = 256

Page = tuple[Namespace, bytes]


class Listener(Protocol):
    """Who wants loaded pages."""

    def loaded(self, page: Page, slot: int) -> None:
        """The page is in this host slot now."""
        ...

    def not_loaded(self, page: Page) -> None:
        """The page has not come, or is not what it was; it may be held all the same."""
        ...


@dataclass(slots=True, eq=False)
class Load:
    """One page on its way."""

    page: Page
    epoch: int
    ssd_slot: int
    generation: int  # of the ssd slot
    checksum: int
    slot: int  # in host memory
    number: int  # they are numbered as they are asked for


class Loads:
    """Ssd → host."""

    def __init__(
        self,
        *,
        config: Config,
        pages: Pages,
        copies: Copies,
        room: Room,
        asked: Asked,
        bandwidth: Bandwidth,
        counters: Counters,
        writer: Callable[[], Writer | None],
    ) -> None:
        self._config = config
        self._pages = pages
        self._copies = copies
        self._room = room
        self._asked = asked
        self._bandwidth = bandwidth
        self._counters = counters
        self._writer = writer
        self._under_way: dict[Page, Load] = {}
        self._answered: list[tuple[Load, int]] = []  # with their statuses, not settled yet
        self._numbers = count()
        self.inflight_bytes = 0
        self.listener: Listener | None = None

    def __len__(self) -> int:
        return len(self._under_way)

    def under_way(self) -> Iterable[Load]:
        """The loads that have begun and not ended."""
        return self._under_way.values()

    def is_under_way(self, page: Page) -> bool:
        """Whether somebody has asked for it."""
        return page in self._under_way

    def has_room(self, size_bytes: int) -> bool:
        """Whether another load may be begun; one always may."""
        within = self.inflight_bytes + size_bytes <= self._config.load_inflight_bytes
        return within or not self._under_way

    @property
    def serves(self) -> bool:
        """Whether there is a worker that could load."""
        return self._writer() is not None

    def begin(self, namespace: Namespace, wanted: Sequence[tuple[bytes, int]]) -> int:
        """Load pages of one namespace into host memory.

        Args:
            namespace: theirs.
            wanted: key and far place of each; none of them is under way.

        Returns:
            How many loads have begun, from the first page on: as far as host slots could be had and
            `load_inflight_bytes` allows.
        """
        writer = self._writer()
        left = max(0, self._config.load_inflight_bytes - self.inflight_bytes)
        most = min(len(wanted), left // namespace.slot_bytes, _COMMAND_PAGES_MAX)
        if not most and not self._under_way:
            most = 1  # a page larger than all that may be under way
        if writer is None or not most or not wanted:
            return 0
        chosen = wanted[:most]
        # What is read must still be there when the room for it has been made.
        ssd_slots = [place - FAR_PLACES for _key, place in chosen]
        self._copies.drops.read(ssd_slots)
        slots = self._room.take(namespace, len(chosen), writer=writer).tolist()
        self._copies.drops.read_ended(ssd_slots[len(slots) :])
        loads = [
            self._load(namespace, key, ssd_slot, slot)
            for (key, _place), ssd_slot, slot in zip(chosen, ssd_slots, slots, strict=False)
        ]
        if loads and not self._send(namespace, loads):
            self._pages.tier.free(as_slots(slots))
            self._copies.drops.read_ended(ssd_slots[: len(slots)])
            return 0
        return len(loads)

    def _load(self, namespace: Namespace, key: bytes, ssd_slot: int, slot: int) -> Load:
        tier = self._copies.tier
        return Load(
            (namespace, key),
            namespace.tree.epoch,
            ssd_slot,
            tier.generation_of(ssd_slot),
            tier.checksum_of(ssd_slot),
            slot,
            next(self._numbers),
        )

    def _send(self, namespace: Namespace, loads: list[Load]) -> bool:
        descriptors = self._pages.tier.descriptors(as_slots([load.slot for load in loads]), 1)
        offsets = offsets_in(descriptors)
        files, indexes = self._copies.tier.place_of(as_slots([load.ssd_slot for load in loads]))
        rows = tuple(
            CopyInRow(
                file_index,
                slot_index,
                namespace.page_bytes,
                load.checksum,
                namespace.id,
                load.page[1],
                offset,
            )
            for load, file_index, slot_index, offset in zip(
                loads, files.tolist(), indexes.tolist(), offsets, strict=True
            )
        )

        def came(answer: TokenAnswer) -> None:
            assert isinstance(answer, CopiedIn)
            first = answer.first_index
            self._came(loads[first : first + len(answer.statuses)], answer.statuses)

        if not self._asked.ask(lambda token: CopyIn(token, rows), came, page_count=len(rows)):
            return False
        self._under_way.update((load.page, load) for load in loads)
        self.inflight_bytes += namespace.slot_bytes * len(loads)
        self._bandwidth.began()
        return True

    # --- answers

    def _came(self, loads: list[Load], statuses: bytes) -> None:
        """Take note; `settle` does the rest, for all that came together at once."""
        self._answered += zip(loads, statuses, strict=True)

    def settle(self) -> None:
        """Publish the pages that have come, and tell who wants them. Call it after answers."""
        if not self._answered:
            return
        # The worker answers as reads complete: in the order asked, neighbours are published as one.
        answered = sorted(self._answered, key=lambda each: each[0].number)
        self._answered = []
        good: list[Load] = []
        bad: list[tuple[Load, int]] = []
        hit_bytes = 0
        for load, status in answered:
            del self._under_way[load.page]
            self.inflight_bytes -= load.page[0].slot_bytes
            hit_bytes += load.page[0].page_bytes if status == PageStatus.HIT else 0
            if status == PageStatus.HIT and self._is_same(load):
                good.append(load)
            else:
                bad.append((load, status))
        self._bandwidth.arrived(hit_bytes, idle=not self._under_way)
        self._pages.tier.free(as_slots([load.slot for load, _status in bad]))
        self._publish(good)
        # Only now: a copy that is still read is neither dropped for room nor written over.
        self._copies.drops.read_ended(load.ssd_slot for load, _status in answered)
        for load, status in bad:
            self._failed(load, status)
        if self.listener is not None:
            for load in good:
                self.listener.loaded(load.page, load.slot)
            for load, _status in bad:
                self.listener.not_loaded(load.page)

    def _is_same(self, load: Load) -> bool:
        """Whether the page is still held by that very copy alone."""
        namespace, key = load.page
        return (
            load.epoch == namespace.tree.epoch
            and namespace.tree.find(key, touch=False)[0] == load.ssd_slot + FAR_PLACES
            and self._copies.tier.generation_of(load.ssd_slot) == load.generation
        )

    def _publish(self, loads: list[Load]) -> None:
        """Write the headers of pages that have come, a chain's stretch at a time, and move them."""
        start = 0
        for at in range(1, len(loads) + 1):
            if at < len(loads) and self._follows(loads[at - 1], loads[at]):
                continue
            self._publish_run(loads[start:at])
            start = at
        self._counters.add("loads_done", len(loads))

    def _follows(self, before: Load, load: Load) -> bool:
        same = before.page[0] is load.page[0]
        return same and load.page[0].tree.parent_of(load.page[1]) == before.page[1]

    def _publish_run(self, loads: list[Load]) -> None:
        namespace, first = loads[0].page
        tree = namespace.tree
        keys = b"".join(load.page[1] for load in loads)
        near = as_slots([load.slot for load in loads])
        ssd_slots = as_slots([load.ssd_slot for load in loads])
        state, parent = on_record(tree.parent_of(first))
        self._pages.tier.publish(
            near,
            namespace_id=namespace.id,
            keys=keys,
            key_bytes=namespace.key_bytes,
            parent_state=state,
            parent=parent,
            epoch=tree.epoch,
            checksums=self._copies.tier.checksums_of(ssd_slots),
        )
        far = [load.ssd_slot + FAR_PLACES for load in loads]
        moved = tree.move(keys, far, near.tolist())
        assert all(moved), "pages just found at their far places"
        self._copies.promoted(namespace, near, ssd_slots)

    def _failed(self, load: Load, status: int) -> None:
        if status == PageStatus.CORRUPT:
            self._counters.add("loads_corrupt")
            namespace, key = load.page
            if not self._is_same(load):
                return
            _LOG.error(
                "page %s of %s is corrupt on the ssd; dropped", key.hex(), namespace.record.model
            )
            self._pages.lose_copy(namespace, key, load.ssd_slot + FAR_PLACES)
            self._room.trim()
        elif status != PageStatus.HIT:
            self._counters.add("loads_failed")
            self._counters.add("ssd_errors")


def offsets_in(descriptors: bytes) -> list[int]:
    """The offsets in the data file that joined descriptors name."""
    return [
        int.from_bytes(descriptors[at + 8 : at + 16], "little")
        for at in range(0, len(descriptors), DESCRIPTOR_BYTES)
    ]
