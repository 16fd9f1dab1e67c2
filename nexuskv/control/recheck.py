"""Pages reported corrupt: read again by the data plane before they are dropped (I2).

A client with broken memory must not be able to empty the cache: its word only causes a second look.
"""

import logging
from collections.abc import Callable

from nexuskv.control.asked import Asked, TokenAnswer
from nexuskv.control.counters import Counters
from nexuskv.control.namespaces import Namespace
from nexuskv.control.pages import Pages, as_slots
from nexuskv.control.room import Room
from nexuskv.control.sessions import Session
from nexuskv.errors import ConfigError
from nexuskv.types import FAR_PLACES, PageStatus
from nexuskv.worker.commands import CheckPages, CheckRow, PagesChecked

_LOG = logging.getLogger("nexuskv.control")


class Recheck:
    """Asks the worker to re-read reported pages and drops those that are bad."""

    def __init__(
        self,
        *,
        pages: Pages,
        room: Room,
        asked: Asked,
        counters: Counters,
        also_check: Callable[[Namespace, bytes], None] = lambda _namespace, _key: None,
    ) -> None:
        """`also_check` is told of a page that was bad here and is held by a copy on the ssd."""
        self._pages = pages
        self._room = room
        self._asked = asked
        self._counters = counters
        self._also_check = also_check
        self._slots: set[int] = set()  # that the worker is still to read

    @property
    def pending_count(self) -> int:
        """Pages that the worker is still to read."""
        return len(self._slots)

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
        if slot >= FAR_PLACES or slot in self._slots:
            return
        if (tier.checksum_of(slot), tier.generation_of(slot)) != (checksum, generation):
            return
        descriptor = tier.descriptors(as_slots([slot]), namespace.page_bytes)
        page = CheckRow(descriptor, namespace.id, key)

        def checked(answer: TokenAnswer) -> None:
            assert isinstance(answer, PagesChecked)
            self._slots.discard(slot)
            if answer.statuses[0] == PageStatus.CORRUPT:
                self._found_bad(namespace, key, slot, generation)

        if self._asked.ask(lambda token: CheckPages(token, (page,)), checked):
            self._slots.add(slot)

    def _found_bad(self, namespace: Namespace, key: bytes, slot: int, generation: int) -> None:
        # What was read may have left the slot since, and good bytes of the same page come into it.
        if self._pages.tier.generation_of(slot) != generation:
            return
        if not self._pages.lose_host(namespace, key, slot):
            return
        self._counters.add("corrupt_pages")
        _LOG.error(
            "page %s of %s is corrupt in host memory; dropped", key.hex(), namespace.record.model
        )
        if namespace.tree.slot_of(key) is not None:
            # Whatever damaged it may have been there before it was copied.
            self._also_check(namespace, key)
        self._room.trim()
