"""Resident pages: where the index, the host tier and the leases meet.

Owns the rule that a slot is freed only when nobody reads it under a lease (I5): a page that leaves
the index while leased stays where it is, unlinked, until its last lease ends.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from nexuskv.control.counters import Counters
from nexuskv.control.events import EventStream
from nexuskv.errors import ConfigError
from nexuskv.index.leases import Lease, LeaseTable
from nexuskv.index.radix import Evicted
from nexuskv.key import split_keys
from nexuskv.tiers.host import HostTier, SlotArray

Page = tuple[bytes, bytes]  # namespace id and key


def as_slots(slots: "array[int] | Sequence[int]") -> SlotArray:
    """The index's slots as the tier wants them."""
    if isinstance(slots, array):
        return np.frombuffer(slots, dtype=np.uint32)
    return np.asarray(slots, dtype=np.uint32)


class Pages:
    """Takes pages out of the index and their slots back into the tier; leases and returns them."""

    def __init__(
        self, *, tier: HostTier, leases: LeaseTable, events: EventStream, counters: Counters
    ) -> None:
        self.tier = tier
        self.leases = leases
        self._events = events
        self._counters = counters
        # Slots whose pages left the index while they were leased: what they hold, and the reverse.
        self._unlinked: dict[int, Page] = {}
        self._unlinked_by_page: defaultdict[Page, set[int]] = defaultdict(set)

    def is_free(self, slot: int) -> bool:
        """Whether a page may be evicted: nobody leases it."""
        return not self.leases.is_leased(slot)

    def lease(
        self,
        slots: Iterable[int],
        *,
        tenant: str,
        request_id: bytes,
        lease_id: int,
        expires_s: float,
    ) -> Lease:
        """Lease slots, none of them ABSENT, under `request_id`.

        Raises:
            LeaseExpired: `lease_id` is not 0 and that lease has ended.
            ConfigError: it was taken under another request id.
            OutOfSpace: leases_max are held.
        """
        if lease_id and self.leases.get(lease_id, tenant).request_id != request_id:
            raise ConfigError(f"lease {lease_id:#x} was taken under another request id")
        return self.leases.take(
            tenant=tenant, request_id=request_id, slots=slots, expires_s=expires_s
        )

    def unleased(self, slots: SlotArray) -> None:
        """These slots are leased by nobody now: free those whose page has left."""
        if not self._unlinked:
            return
        ready = [slot for slot in set(slots.tolist()) if slot in self._unlinked]
        if ready:
            for slot in ready:
                page = self._unlinked.pop(slot)
                others = self._unlinked_by_page[page]
                others.discard(slot)
                if not others:
                    del self._unlinked_by_page[page]
            self.tier.free(as_slots(ready))

    def unlink(self, slots: Sequence[int]) -> None:
        """Pages that just left the index: free their slots, or keep them while they are leased."""
        if not len(slots):
            return
        is_leased = self.leases.is_leased
        leased = [slot for slot in slots if is_leased(slot)]
        if leased:
            for slot in leased:
                page = self.tier.page_of(slot) or (b"", b"")
                self._unlinked[slot] = page
                self._unlinked_by_page[page].add(slot)
            self.tier.unlink(as_slots(leased))
            kept = set(leased)
            slots = [slot for slot in slots if slot not in kept]
        self.tier.free(as_slots(slots))

    def unlinked_slots(self, namespace_id: bytes, keys: bytes, *, key_bytes: int) -> list[int]:
        """Leased slots of pages that have left the index: a release names pages by their keys."""
        if not self._unlinked:
            return []
        table = self._unlinked_by_page
        names = split_keys(keys, key_bytes)
        return [slot for name in names for slot in table.get((namespace_id, name), ())]

    def evicted(self, pages: Sequence[Evicted]) -> None:
        """Pages that the index gave up to make room; none of them is leased."""
        if not pages:
            return
        slots = np.concatenate([as_slots(each.slots) for each in pages])
        self.tier.free(slots)
        self._counters.add("evicted_pages", len(slots))
        for each in pages:
            self._events.removed(each.tree.namespace_id, each.keys)

    @property
    def unlinked_count(self) -> int:
        """Slots kept only because a lease has not ended."""
        return len(self._unlinked)
