"""Resident pages: where the index, the tiers and the leases meet.

Owns the rule that a host slot is freed only when nobody reads it (I5), be it under a lease or
because the data plane copies it: a page that leaves the index meanwhile stays where it is,
unlinked, until the last of them has ended. Copies on the ssd, if there are any, go with their page.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from nexuskv.control.copies import Copies
from nexuskv.control.counters import Counters
from nexuskv.control.events import EventStream
from nexuskv.control.namespaces import Namespace, Namespaces
from nexuskv.errors import ConfigError
from nexuskv.index.chains import Parent
from nexuskv.index.leases import Lease, LeaseTable
from nexuskv.index.radix import Demoted, Evicted
from nexuskv.index.tree import ABSENT, Tree
from nexuskv.key import split_keys
from nexuskv.protocol import ParentState
from nexuskv.tiers.host import HostTier, SlotArray
from nexuskv.types import FAR_PLACES

Page = tuple[bytes, bytes]  # namespace id and key


def as_slots(slots: "array[int] | Sequence[int]") -> SlotArray:
    """The index's slots as the tier wants them."""
    if isinstance(slots, array):
        return np.frombuffer(slots, dtype=np.uint32)
    return np.asarray(slots, dtype=np.uint32)


def on_record(parent: Parent) -> tuple[ParentState, bytes]:
    """A parent as headers, catalogue rows and events carry it."""
    if isinstance(parent, bytes):
        return ParentState.KEY, parent
    return (ParentState.ROOT if parent is None else ParentState.UNKNOWN), b""


class Pages:
    """Takes pages out of the index and their slots back into the tier; leases and returns them."""

    def __init__(
        self,
        *,
        tier: HostTier,
        leases: LeaseTable,
        namespaces: Namespaces,
        events: EventStream,
        counters: Counters,
        copies: Copies | None = None,
    ) -> None:
        self.tier = tier
        self.leases = leases
        self.copies = copies
        self.is_free: Callable[[int], bool]
        """Whether the page at a place may be evicted: nobody reads it."""
        self.is_free = self._is_unleased if copies is None else self._is_unread
        self._namespaces = namespaces
        self._events = events
        self._counters = counters
        # Slots whose pages left the index while they were leased: what they hold, and the reverse.
        self._unlinked: dict[int, Page] = {}
        self._unlinked_by_page: defaultdict[Page, set[int]] = defaultdict(set)
        self.releases = 0
        """Grows whenever pages have stopped being read: others may have room now."""
        # Host slot → how many transfers and waiting acquires need its bytes.
        self._kept: dict[int, int] = {}

    def _is_unleased(self, slot: int) -> bool:
        return not self.leases.is_leased(slot)

    def _is_unread(self, place: int) -> bool:
        if place >= FAR_PLACES:
            assert self.copies is not None
            return self.copies.may_go(place)
        return not self.leases.is_leased(place) and place not in self._kept

    def namespace_of(self, tree: Tree) -> Namespace:
        """The namespace whose pages a tree holds."""
        return self._namespaces.by_id[tree.namespace_id]

    # --- who reads

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

    def keep(self, slots: Iterable[int]) -> None:
        """Hold pages where they are until `let_go`: their bytes are read without a lease."""
        for slot in slots:
            self._kept[slot] = self._kept.get(slot, 0) + 1

    def let_go(self, slots: Iterable[int]) -> None:
        """End one `keep` of each slot."""
        ended: list[int] = []
        for slot in slots:
            self._kept[slot] -= 1
            if not self._kept[slot]:
                del self._kept[slot]
                ended.append(slot)
        self.releases += 1
        if self._unlinked:
            is_leased = self.leases.is_leased
            self._free_unlinked([slot for slot in ended if not is_leased(slot)])

    def unleased(self, slots: SlotArray) -> None:
        """These slots are leased by nobody now: free those whose page has left."""
        self.releases += 1
        if self._unlinked:
            self._free_unlinked([slot for slot in set(slots.tolist()) if slot not in self._kept])

    def _free_unlinked(self, slots: list[int]) -> None:
        ready = [slot for slot in slots if slot in self._unlinked]
        if ready:
            for slot in ready:
                page = self._unlinked.pop(slot)
                others = self._unlinked_by_page[page]
                others.discard(slot)
                if not others:
                    del self._unlinked_by_page[page]
            self.tier.free(as_slots(ready))

    # --- pages that leave

    def unlink(self, namespace: Namespace, places: Sequence[int]) -> None:
        """Pages that just left the index: free their slots, or keep them while they are read."""
        if not len(places):
            return
        if self.copies is not None:
            places = self.copies.left(namespace, as_slots(places)).tolist()
        self._release(places)

    def _release(self, slots: Sequence[int]) -> None:
        """Free host slots whose pages have left them; those that are read, later."""
        is_leased, kept = self.leases.is_leased, self._kept
        read = [slot for slot in slots if is_leased(slot) or slot in kept]
        if read:
            for slot in read:
                page = self.tier.page_of(slot) or (b"", b"")
                self._unlinked[slot] = page
                self._unlinked_by_page[page].add(slot)
            self.tier.unlink(as_slots(read))
            still = set(read)
            slots = [slot for slot in slots if slot not in still]
        self.tier.free(as_slots(slots))

    def unlinked_slots(self, namespace_id: bytes, keys: bytes, *, key_bytes: int) -> list[int]:
        """Leased slots of pages that have left the index: a release names pages by their keys."""
        if not self._unlinked:
            return []
        table = self._unlinked_by_page
        names = split_keys(keys, key_bytes)
        return [slot for name in names for slot in table.get((namespace_id, name), ())]

    def evicted(self, pages: Sequence[Evicted]) -> None:
        """Pages that the index gave up to make room; nobody reads any of them."""
        if not pages:
            return
        if self.copies is None:
            slots = np.concatenate([as_slots(each.slots) for each in pages])
            self.tier.free(slots)
            self._counters.add("evicted_pages", len(slots))
        else:
            self._evicted_from_tiers(self.copies, pages)
        for each in pages:
            self._events.removed(each.tree.namespace_id, each.keys)

    def _evicted_from_tiers(self, copies: Copies, pages: Sequence[Evicted]) -> None:
        near: list[SlotArray] = []
        for each in pages:
            namespace = self.namespace_of(each.tree)
            before = namespace.copy_count
            near.append(copies.left(namespace, as_slots(each.slots)))
            self._counters.add("evicted_pages", len(each.slots))
            self._counters.add("ssd_evicted_pages", before - namespace.copy_count)
        self.tier.free(np.concatenate(near))

    def demoted(self, pages: Sequence[Demoted]) -> int:
        """Pages that are held by their copies alone now: free their host slots; how many."""
        if not pages:
            return 0
        assert self.copies is not None
        for each in pages:
            namespace = self.namespace_of(each.tree)
            self.copies.demoted(namespace, as_slots(each.near))
        near = np.concatenate([as_slots(each.near) for each in pages])
        self.tier.free(near)
        self._counters.add("demoted_pages", len(near))
        return len(near)

    def lose_host(self, namespace: Namespace, key: bytes, slot: int) -> bool:
        """Take a bad page out of host memory; it stays held by its copy, if it has one.

        Returns:
            False, and nothing was changed, when it is not held in that slot any more.
        """
        tree = namespace.tree
        far = ABSENT if self.copies is None else self.copies.far_of(slot)
        if far == ABSENT:
            if not tree.drop(key, slot):
                return False
            self._events.removed(namespace.id, key)
        elif not tree.move(key, [slot], [far])[0]:
            return False
        elif self.copies is not None:
            self.copies.demoted(namespace, as_slots([slot]))
        self._release([slot])
        return True

    def lose_copy(self, namespace: Namespace, key: bytes, far: int) -> bool:
        """Take a bad copy off the ssd; the page stays held in host memory, if it is there.

        Returns:
            False, and nothing was changed, when that copy is not the page's any more.
        """
        assert self.copies is not None
        (place,) = namespace.tree.find(key, touch=False)
        if place == far:
            namespace.tree.drop(key, far)
            self.copies.left(namespace, as_slots([far]))
            self._events.removed(namespace.id, key)
        elif place < FAR_PLACES and self.copies.far_of(place) == far:
            self.copies.detach(namespace, as_slots([place]))
        else:
            return False
        return True

    @property
    def unlinked_count(self) -> int:
        """Slots kept only because a lease or a transfer has not ended."""
        return len(self._unlinked)
