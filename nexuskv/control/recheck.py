"""Pages reported corrupt: read again by the data plane before they are dropped (I2).

A client with broken memory must not be able to empty the cache: its word only causes a second look.
"""

import logging
from itertools import count

from nexuskv.control.counters import Counters
from nexuskv.control.events import EventStream
from nexuskv.control.namespaces import Namespace
from nexuskv.control.pages import Pages, as_slots
from nexuskv.control.room import Room
from nexuskv.control.sessions import Session
from nexuskv.errors import ConfigError
from nexuskv.index.tree import ABSENT
from nexuskv.types import PageStatus
from nexuskv.worker.commands import CheckPages, CheckRow, CommandQueue, PagesChecked

_LOG = logging.getLogger("nexuskv.control")


class Recheck:
    """Asks the worker to re-read reported pages and drops those that are bad."""

    def __init__(
        self,
        *,
        pages: Pages,
        room: Room,
        worker: CommandQueue,
        events: EventStream,
        counters: Counters,
    ) -> None:
        self._pages = pages
        self._room = room
        self._worker = worker
        self._events = events
        self._counters = counters
        self._tokens = count(1)
        self._asked: dict[int, tuple[Namespace, bytes, int, int]] = {}  # slot and generation
        self._slots: set[int] = set()

    @property
    def pending_count(self) -> int:
        """Pages that the worker is still to read."""
        return len(self._asked)

    def reported(self, session: Session, row: object) -> None:
        """A client says that a page's bytes did not match their checksum."""
        match row:
            case [number, bytes(key), int(checksum), int(generation)]:
                namespace = session.namespace(number)
            case _:
                raise ConfigError("a corrupt page is [namespace, key, checksum, generation]")
        self._counters.add("corrupt_reports")
        if namespace.key_count(key, pages_max=1) != 1:
            return
        slot = namespace.tree.find(key, touch=False)[0]
        tier = self._pages.tier
        if slot == ABSENT or slot in self._slots:
            return
        if (tier.checksum_of(slot), tier.generation_of(slot)) != (checksum, generation):
            return
        token = next(self._tokens)
        descriptor = tier.descriptors(as_slots([slot]), namespace.page_bytes)
        page = CheckRow(descriptor, namespace.id, key)
        if not self._worker.submit(CheckPages(token, (page,))):
            self._counters.add("worker_queue_full")
            return
        self._asked[token] = (namespace, key, slot, generation)
        self._slots.add(slot)

    def checked(self, result: PagesChecked) -> None:
        """The worker has read the page again."""
        namespace, key, slot, generation = self._asked.pop(result.token)
        self._slots.discard(slot)
        if result.statuses[0] != PageStatus.CORRUPT:
            return
        # What was read may have left the slot since, and good bytes of the same page come into it.
        if self._pages.tier.generation_of(slot) != generation or not namespace.tree.drop(key, slot):
            return
        self._counters.add("corrupt_pages")
        _LOG.error(
            "page %s of %s is corrupt in host memory; dropped", key.hex(), namespace.record.model
        )
        self._pages.unlink([slot])
        self._events.removed(namespace.id, key)
        self._room.trim()
