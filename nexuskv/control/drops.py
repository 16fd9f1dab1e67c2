"""Copies that are on their way out: rows deleted durably before their slots are used again.

Owns the ssd slots that are DROPPING, and those that are still being read. A slot becomes free when
its row is gone and nobody reads it. Deletions are sent in batches, a few at a time; one that fails
is sent again after a pause: until it succeeds its slots stay out of use. Control thread only.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.asked import Asked, TokenAnswer
from nexuskv.control.counters import Counters
from nexuskv.control.namespaces import Namespace
from nexuskv.tiers.host import SlotArray
from nexuskv.tiers.ssd import SsdTier
from nexuskv.worker.commands import CopiesDropped, DropCopies, PlaceRow

_LOG = logging.getLogger("nexuskv.control")
_BATCH_MAX: Final = 4096  # places of one command
_COMMANDS_MAX: Final = 4  # under way at a time

Done = Callable[[str | None], None]
"""Told once: None when the rows are gone for good, else why that is not known."""


@dataclass(slots=True, eq=False)
class Wish:
    """Somebody waits until some slots' rows are gone."""

    left: set[int]
    done: Done


class Drops:
    """Deletes rows and frees their slots. Slots enter by `add` or `add_unclaimed`; a `Ticker`."""

    def __init__(
        self, *, config: Config, tier: SsdTier, asked: Asked, clock: Clock, counters: Counters
    ) -> None:
        self._config = config
        self._tier = tier
        self._asked = asked
        self._clock = clock
        self._counters = counters
        self._waiting: deque[int] = deque()
        self._sent = 0  # commands
        self._owner: dict[int, Namespace | None] = {}  # of every slot that is DROPPING
        self._wishes: dict[int, list[Wish]] = {}
        self._reads: dict[int, int] = {}  # ssd slot → readers
        self._parked: set[int] = set()  # rows gone, still read
        self._resume_s: float | None = None
        self._in_service = True
        self.on_free: list[Callable[[], None]] = []  # told when slots came free

    # --- readers

    def is_read(self, ssd_slot: int) -> bool:
        """Whether the data plane reads a slot now."""
        return ssd_slot in self._reads

    def read(self, ssd_slots: Iterable[int]) -> None:
        """The data plane begins to read these slots."""
        for slot in ssd_slots:
            self._reads[slot] = self._reads.get(slot, 0) + 1

    def read_ended(self, ssd_slots: Iterable[int]) -> None:
        """It has answered."""
        freed: list[int] = []
        for slot in ssd_slots:
            self._reads[slot] -= 1
            if not self._reads[slot]:
                del self._reads[slot]
                if slot in self._parked:
                    self._parked.discard(slot)
                    freed.append(slot)
        if freed:
            self._free(freed)

    # --- dropping

    def add(self, namespace: Namespace, ssd_slots: SlotArray) -> None:
        """Delete the rows of slots that are READY or WRITING."""
        if not len(ssd_slots) or not self._in_service:
            return
        self._tier.drop(ssd_slots)
        slots = ssd_slots.tolist()
        self._owner.update(dict.fromkeys(slots, namespace))
        namespace.dropping_count += len(slots)
        self._waiting.extend(slots)

    def add_unclaimed(self, ssd_slots: SlotArray) -> None:
        """Delete rows that belong to no namespace that is known."""
        if len(ssd_slots) and self._in_service:
            self._tier.drop(ssd_slots)
            slots = ssd_slots.tolist()
            self._owner.update(dict.fromkeys(slots))
            self._waiting.extend(slots)

    def when_gone(self, ssd_slots: Sequence[int], done: Done) -> None:
        """Call `done` once the rows of those slots that are DROPPING are gone; else at once."""
        dropping = {slot for slot in ssd_slots if slot in self._owner}
        if not dropping or not self._in_service:
            done(None if self._in_service else "the ssd tier has left service")
            return
        wish = Wish(dropping, done)
        for slot in dropping:
            self._wishes.setdefault(slot, []).append(wish)

    def pump(self) -> None:
        """Send what waits, as far as it is taken."""
        if self._resume_s is not None or not self._in_service:
            return
        while self._waiting and self._sent < _COMMANDS_MAX:
            count = min(len(self._waiting), _BATCH_MAX)
            batch = [self._waiting.popleft() for _ in range(count)]
            files, indexes = self._tier.place_of(np.array(batch, dtype=np.uint32))
            places = tuple(map(PlaceRow, files.tolist(), indexes.tolist()))
            if not self._send(batch, places):
                self._waiting.extendleft(reversed(batch))
                return

    def end_service(self) -> None:
        """The tier has left service: whoever waits is told so, and nothing is sent any more."""
        self._in_service = False
        self._waiting.clear()
        self._resume_s = None
        wishes = {id(wish): wish for each in self._wishes.values() for wish in each}
        self._wishes.clear()
        for namespace in self._owner.values():
            if namespace is not None:
                namespace.dropping_count -= 1
        self._owner.clear()
        for wish in wishes.values():
            wish.done("the ssd tier has left service")

    @property
    def waiting_count(self) -> int:
        """Slots whose rows are still to be deleted."""
        return len(self._owner)

    # --- time

    def next_due(self) -> float | None:
        """When deletions that failed are tried again."""
        return self._resume_s

    def tick(self, now_s: float) -> None:
        """Try again."""
        if self._resume_s is not None and self._resume_s <= now_s:
            self.resume()

    def resume(self) -> None:
        """There may be a better worker now."""
        self._resume_s = None
        self.pump()

    # --- inside

    def _send(self, batch: list[int], places: tuple[PlaceRow, ...]) -> bool:
        def dropped(answer: TokenAnswer) -> None:
            assert isinstance(answer, CopiesDropped)
            self._dropped(batch, answer.error)

        taken = self._asked.ask(lambda token: DropCopies(token, places), dropped)
        self._sent += taken
        return taken

    def _dropped(self, batch: list[int], error: str | None) -> None:
        self._sent -= 1
        if not self._in_service:
            return
        if error is not None:
            self._counters.add("ssd_errors")
            _LOG.error("%d rows of the ssd's catalogue cannot be deleted: %s", len(batch), error)
            self._waiting.extendleft(reversed(batch))
            self._resume_s = self._clock.now() + self._config.ssd_retry_s
        for slot in batch:
            for wish in self._wishes.pop(slot, ()):
                self._advance(wish, slot, error)
        if error is None:
            for slot in batch:
                namespace = self._owner.pop(slot, None)
                if namespace is not None:
                    namespace.dropping_count -= 1
            self._parked.update(slot for slot in batch if slot in self._reads)
            self._free([slot for slot in batch if slot not in self._reads])

    def _advance(self, wish: Wish, slot: int, error: str | None) -> None:
        if not wish.left:
            return
        wish.left.discard(slot)
        if error is not None:
            wish.left.clear()
        if not wish.left:
            wish.done(error)

    def _free(self, slots: list[int]) -> None:
        if slots and self._in_service:
            self._tier.free(np.array(slots, dtype=np.uint32))
            for told in self.on_free:
                told()
