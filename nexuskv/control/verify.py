"""verify: pages read where they lie and checked, in host memory or on the ssd (I2, I9).

A bad page leaves the tier it was read in before anybody is told; the other tier keeps what it has.
A request is carried out in parts of `copy_group_bytes`, one after another. Control loop.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from nexuskv.config import Config
from nexuskv.control.asked import Asked, TokenAnswer
from nexuskv.control.counters import Counters
from nexuskv.control.later import Later, Under
from nexuskv.control.namespaces import Namespace, Namespaces
from nexuskv.control.pages import Pages, as_slots
from nexuskv.control.room import Room
from nexuskv.control.sessions import Session
from nexuskv.errors import ConfigError
from nexuskv.index.tree import ABSENT
from nexuskv.key import split_keys
from nexuskv.types import FAR_PLACES, PageStatus
from nexuskv.worker.commands import (
    CheckCopies,
    CheckPages,
    CheckRow,
    CopiesChecked,
    CopyRow,
    PagesChecked,
)

_LOG = logging.getLogger("nexuskv.control")

Then = Callable[[bytes], None]
"""Told once: a status for each page."""


@dataclass(slots=True, eq=False)
class Check:
    """Pages of one namespace that are checked in one tier."""

    namespace: Namespace
    names: list[bytes]
    on_ssd: bool
    then: Then
    statuses: bytearray = field(default_factory=bytearray)
    next_index: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """A page that is being read: its index in the request, its slot, and that slot's generation."""

    index: int
    slot: int
    generation: int


class Verify:
    """Checks pages on request, and copies of pages that were found bad."""

    def __init__(
        self,
        *,
        config: Config,
        namespaces: Namespaces,
        pages: Pages,
        room: Room,
        asked: Asked,
        counters: Counters,
        serves_ssd: Callable[[], bool],
    ) -> None:
        self._config = config
        self._namespaces = namespaces
        self._pages = pages
        self._room = room
        self._asked = asked
        self._counters = counters
        self._serves_ssd = serves_ssd
        self._under = Under(config.verifies_max, "verifies_max")

    def verify(self, _session: Session, body: list[object], later: Later) -> None:
        """The message's handler."""
        namespace_id, keys, tier = body
        assert isinstance(namespace_id, bytes)
        assert isinstance(keys, bytes)
        namespace = self._namespaces.by_id.get(namespace_id)
        if namespace is None:
            raise ConfigError(f"no namespace {namespace_id.hex()!r:.40} is known here")
        namespace.key_count(keys, pages_max=self._config.verify_pages_max)
        if tier not in ("host", "ssd"):
            raise ConfigError(f"cannot verify tier {tier!r:.40}, only host and ssd")
        self._under.enter()

        def then(statuses: bytes) -> None:
            self._under.leave()
            later.reply(statuses)

        self.check(namespace, keys, on_ssd=tier == "ssd", then=then)

    def check(self, namespace: Namespace, keys: bytes, *, on_ssd: bool, then: Then) -> None:
        """Check pages in one tier; bad ones have left it when `then` is told."""
        names = split_keys(keys, namespace.key_bytes)
        check = Check(namespace, names, on_ssd, then)
        check.statuses = bytearray([PageStatus.MISS] * len(names))
        self._step(check)

    def check_copy(self, namespace: Namespace, key: bytes) -> None:
        """Check the copy of a page that was bad in host memory, and tell nobody."""
        self.check(namespace, key, on_ssd=True, then=lambda _statuses: None)

    def _step(self, check: Check) -> None:
        """Send the next part, or answer."""
        while check.next_index < len(check.names):
            reads = self._next(check)
            if not reads:
                continue
            if not self._ask(check, reads):
                for read in reads:
                    check.statuses[read.index] = PageStatus.UNAVAILABLE
                continue
            return
        check.then(bytes(check.statuses))

    def _next(self, check: Check) -> list[Read]:
        """The pages of the next part that the tier holds."""
        namespace = check.namespace
        count = max(1, self._config.copy_group_bytes // namespace.slot_bytes)
        start = check.next_index
        names = check.names[start : start + count]
        check.next_index += len(names)
        copies, tier = self._pages.copies, self._pages.tier
        reads: list[Read] = []
        for at, place in enumerate(namespace.tree.find(b"".join(names), touch=False)):
            if check.on_ssd and copies is not None and place != ABSENT:
                far = place if place >= FAR_PLACES else copies.far_of(place)
                if far != ABSENT:
                    slot = far - FAR_PLACES
                    reads.append(Read(start + at, slot, copies.tier.generation_of(slot)))
            elif not check.on_ssd and place < FAR_PLACES:
                reads.append(Read(start + at, place, tier.generation_of(place)))
        return reads

    def _ask(self, check: Check, reads: list[Read]) -> bool:
        if check.on_ssd:
            return self._ask_ssd(check, reads)
        namespace = check.namespace
        width = 32
        raw = self._pages.tier.descriptors(
            as_slots([read.slot for read in reads]), namespace.page_bytes
        )
        rows = tuple(
            CheckRow(raw[at * width : (at + 1) * width], namespace.id, check.names[read.index])
            for at, read in enumerate(reads)
        )

        def checked(answer: TokenAnswer) -> None:
            assert isinstance(answer, PagesChecked)
            self._settle(check, reads, answer.statuses)

        return self._asked.ask(lambda token: CheckPages(token, rows), checked)

    def _ask_ssd(self, check: Check, reads: list[Read]) -> bool:
        copies, namespace = self._pages.copies, check.namespace
        assert copies is not None
        if not self._serves_ssd():
            return False
        slots = as_slots([read.slot for read in reads])
        files, indexes = copies.tier.place_of(slots)
        sums = copies.tier.checksums_of(slots)
        rows = tuple(
            CopyRow(
                file_index,
                slot_index,
                namespace.page_bytes,
                checksum,
                namespace.id,
                check.names[read.index],
            )
            for read, file_index, slot_index, checksum in zip(
                reads, files.tolist(), indexes.tolist(), sums.tolist(), strict=True
            )
        )

        def checked(answer: TokenAnswer) -> None:
            assert isinstance(answer, CopiesChecked)
            copies.drops.read_ended(read.slot for read in reads)
            self._settle(check, reads, answer.statuses)

        if not self._asked.ask(lambda token: CheckCopies(token, rows), checked):
            return False
        copies.drops.read(read.slot for read in reads)
        return True

    def _settle(self, check: Check, reads: list[Read], statuses: bytes) -> None:
        """Note what became of one part, take out what is bad, go on."""
        self._counters.add("verified_pages", len(reads))
        for read, status in zip(reads, statuses, strict=True):
            if status == PageStatus.CORRUPT:
                status = self._lose(check, read)
            elif status == PageStatus.STALE:
                status = PageStatus.MISS
            check.statuses[read.index] = status
        self._room.trim()
        self._step(check)

    def _lose(self, check: Check, read: Read) -> PageStatus:
        """Take a bad page out of the tier; MISS when it has left it since it was read."""
        namespace, key = check.namespace, check.names[read.index]
        if check.on_ssd:
            assert self._pages.copies is not None
            same = self._pages.copies.tier.generation_of(read.slot) == read.generation
            lost = same and self._pages.lose_copy(namespace, key, read.slot + FAR_PLACES)
        else:
            same = self._pages.tier.generation_of(read.slot) == read.generation
            lost = same and self._pages.lose_host(namespace, key, read.slot)
        if not lost:
            return PageStatus.MISS
        self._counters.add("verify_corrupt")
        _LOG.error(
            "page %s of %s is corrupt %s; dropped",
            key.hex(),
            namespace.record.model,
            "on the ssd" if check.on_ssd else "in host memory",
        )
        return PageStatus.CORRUPT
