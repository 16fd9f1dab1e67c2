"""The ssd tier's part of a recovery: the catalogue's rows, read by the worker batch by batch.

Owns what is between a row and the index: a slot whose row is good is READY before its page is
found, a row that may not come back is deleted like any dropped copy. Control loop only.
"""

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.asked import Asked, TokenAnswer
from nexuskv.control.copies import Copies, far_places
from nexuskv.control.namespaces import Namespace, Namespaces
from nexuskv.control.recovery import Found
from nexuskv.tiers.arrays import lazy_zeros
from nexuskv.tiers.host import HostTier, SlotArray
from nexuskv.tiers.record import RECORD_DTYPE
from nexuskv.tiers.ssd import SsdSlotState
from nexuskv.types import FAR_PLACES
from nexuskv.worker.commands import LoadRows, RowsLoaded

_LOG = logging.getLogger("nexuskv.control")


class SsdRecords:
    """A `RecoverySource` over the catalogue."""

    def __init__(
        self,
        *,
        config: Config,
        clock: Clock,
        copies: Copies,
        asked: Asked,
        host: HostTier,
        namespaces: Namespaces,
    ) -> None:
        self._config = config
        self._clock = clock
        self._copies = copies
        self._asked = asked
        self._host = host
        self._namespaces = namespaces
        self._batch: RowsLoaded | None = None
        self._cursor = b""
        self._is_asked = False
        self._is_open = False  # whether a worker serves
        self._entered: npt.NDArray[np.uint8] = lazy_zeros(copies.tier.slot_count, "u1")
        self._total = 0
        self.ended = False
        self.retry_s: float | None = None
        """When rows are asked for again after they could not be read."""
        self.rows_done = 0
        self.resume: Callable[[], None] = lambda: None

    @property
    def rows_total(self) -> int:
        """Slots that may have a row, free ones among them."""
        return max(self._total, self.rows_done)

    def start(self) -> None:
        """A worker serves the catalogue: read on."""
        if self.ended:
            return
        if not self._total:
            self._total = sum(usage.unknown for usage in self._copies.tier.usage_by_size())
        self._is_open = True
        self.resume()

    def stop(self) -> None:
        """No worker serves for now."""
        self._is_open = False

    def give_up(self) -> None:
        """The tier has left service: there is nothing more to be had."""
        self._end()

    def pump(self) -> None:
        """The worker may take a command again."""
        idle = self._is_open and not self._is_asked and self.retry_s is None
        if idle and self._batch is None and not self.ended:
            self.resume()

    def retry(self, now_s: float) -> None:
        """Ask again, if it is time."""
        if self.retry_s is not None and self.retry_s <= now_s:
            self.retry_s = None
            self.pump()

    def read(self) -> Found | None:
        """The rows of the next batch, and ask for the one after it."""
        batch, self._batch = self._batch, None
        if batch is None:
            self._ask()
            return None
        self._cursor = batch.cursor
        found = self._take(batch)
        self.rows_done += len(found.records)
        if batch.cursor:
            self._ask()
        else:
            for file_index in self._copies.tier.unknown_files():
                self._copies.tier.settle_file(file_index)
            self._end()
        return found

    def refuse(self, places: SlotArray) -> None:
        """Delete the rows of these places."""
        if len(places):
            self._copies.drops.add_unclaimed(places - np.uint32(FAR_PLACES))

    def entered(self, namespace: Namespace, places: SlotArray) -> None:
        """The pages at these far places are in the index."""
        self._entered[(places - np.uint32(FAR_PLACES)).astype(np.intp)] = 1
        namespace.far_count += len(places)
        namespace.copy_count += len(places)

    def also_held(self, place: int, near: int) -> None:
        """The page at this far place is in host memory too: it is the copy, if it is the same."""
        ssd_slot = place - FAR_PLACES
        page = self._host.page_of(near)
        namespace = None if page is None else self._namespaces.by_id.get(page[0])
        assert namespace is not None, "a page in the index has a namespace"
        if self._entered[ssd_slot]:
            namespace.far_count -= 1
            namespace.copy_count -= 1
            self._entered[ssd_slot] = 0
        same = self._copies.tier.checksum_of(ssd_slot) == self._host.checksum_of(near)
        one = np.array([ssd_slot], dtype=np.uint32)
        if same and not self._copies.has(near):
            self._copies.attach(namespace, np.array([near], dtype=np.uint32), one)
        else:
            self._copies.drops.add_unclaimed(one)

    def _take(self, batch: RowsLoaded) -> Found:
        records = np.frombuffer(batch.records, dtype=RECORD_DTYPE)
        places = np.frombuffer(batch.places, dtype="<u4").reshape(-1, 2)
        tier = self._copies.tier
        # A copy made since the start has a row too, and needs none of this.
        inside = places[:, 0] < tier.file_count
        inside &= places[:, 1] < tier.geometry.stride
        records, places = records[inside], places[inside]
        slots = tier.slots_at(places[:, 0], places[:, 1])
        unknown = tier.states_of(slots) == SsdSlotState.UNKNOWN.value
        records, slots = records[unknown], slots[unknown]
        tier.adopt(
            slots,
            np.ascontiguousarray(records["checksum"]),
            np.ascontiguousarray(records["generation"]),
        )
        return Found(records, far_places(slots))

    def _ask(self) -> None:
        if self._is_asked or not self._is_open or self.ended or self.retry_s is not None:
            return
        cursor = self._cursor
        self._is_asked = self._asked.ask(lambda token: LoadRows(token, cursor), self._loaded)

    def _loaded(self, answer: TokenAnswer) -> None:
        assert isinstance(answer, RowsLoaded)
        self._is_asked = False
        if self.ended:
            return
        if answer.error is not None:
            # An ssd that fails for good leaves service; a worker that was lost has a successor.
            _LOG.error("the ssd's catalogue cannot be read: %s", answer.error)
            self.retry_s = self._clock.now() + self._config.ssd_retry_s
            return
        self._batch = answer
        self.resume()

    def _end(self) -> None:
        self.ended = True
        self.retry_s = None
        self.resume()
