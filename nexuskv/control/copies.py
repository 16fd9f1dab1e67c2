"""Which pages have a copy on the ssd: host slot → ssd slot, and counts of each namespace.

Owns the link between the two tiers. A page's place in the index is its host slot while it is in
host memory; its copy is then known here alone. A page that is only on the ssd has a far place.
Knows nothing of leases, sends nothing to the data plane but through `Drops`. Control thread only.

Invariants: a host slot has an entry only while its page is in the index at that slot; the ssd slot
of an entry, and of every far place in the index, is READY; while an ssd slot is read it is not
given to another copy.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from nexuskv.control.drops import Drops
from nexuskv.control.namespaces import Namespace
from nexuskv.errors import ConfigError
from nexuskv.index.tree import ABSENT
from nexuskv.tiers.arrays import lazy_zeros
from nexuskv.tiers.host import SlotArray
from nexuskv.tiers.ssd import SsdTier
from nexuskv.types import FAR_PLACES

_FAR: Final = np.uint32(FAR_PLACES)
_ONE: Final = np.uint32(1)


class Copies:
    """Copies of pages on the ssd."""

    def __init__(self, *, tier: SsdTier, drops: Drops, host_slot_count: int) -> None:
        self.tier = tier
        self.drops = drops
        # One more than the ssd slot of a page's copy; 0: it has none.
        self._copy_of: npt.NDArray[np.uint32] = lazy_zeros(host_slot_count, "<u4")
        self._in_service = True

    # --- looking

    def slot_bytes_of(self, namespace: Namespace) -> int:
        """The ssd slot size for a namespace's pages; 0 when they are larger than a file."""
        try:
            return self.tier.slot_bytes_of(namespace.page_bytes)
        except ConfigError:
            return 0

    def far_of(self, slot: int) -> int:
        """The far place of the copy of the page in a host slot; ABSENT when it has none."""
        copy = int(self._copy_of[slot])
        return copy - 1 + FAR_PLACES if copy else ABSENT

    def has(self, place: int) -> bool:
        """Whether the page at a place has an ssd slot."""
        return place >= FAR_PLACES or bool(self._copy_of[place])

    def may_go(self, place: int) -> bool:
        """Whether nobody reads the ssd slot of a far place."""
        return not self.drops.is_read(place - FAR_PLACES)

    def without(self, slots: SlotArray) -> SlotArray:
        """Those of some host slots whose pages have no copy."""
        bare: SlotArray = slots[self._copy_of[slots.astype(np.intp)] == 0]
        return bare

    # --- changes

    def attach(self, namespace: Namespace, near: SlotArray, ssd_slots: SlotArray) -> None:
        """Copies of the pages in host slots became durable."""
        self._copy_of[near.astype(np.intp)] = ssd_slots + _ONE
        namespace.copy_count += len(near)

    def demoted(self, namespace: Namespace, near: SlotArray) -> None:
        """Pages have left their host slots for their far places."""
        self._copy_of[near.astype(np.intp)] = 0
        namespace.far_count += len(near)

    def promoted(self, namespace: Namespace, near: SlotArray, ssd_slots: SlotArray) -> None:
        """Far pages are in host slots too now."""
        namespace.far_count -= len(near)
        if self._in_service:
            self._copy_of[near.astype(np.intp)] = ssd_slots + _ONE
        else:
            namespace.copy_count -= len(near)

    def left(self, namespace: Namespace, places: SlotArray) -> SlotArray:
        """Pages have left the index: their copies are dropped.

        Returns:
            The host slots among the places; they are the caller's.
        """
        is_far = places >= _FAR
        near, far = places[~is_far], places[is_far] - _FAR
        namespace.far_count -= len(far)
        copies = self._take(near)
        self._drop(namespace, np.concatenate((far, copies)))
        return near

    def detach(self, namespace: Namespace, near: SlotArray) -> None:
        """Pages in host memory give up their copies."""
        self._drop(namespace, self._take(near))

    def end_service(self) -> None:
        """The tier has left service: no page in host memory has a copy any more."""
        self._in_service = False
        self._copy_of = lazy_zeros(len(self._copy_of), "<u4")

    def _take(self, near: SlotArray) -> SlotArray:
        at = near.astype(np.intp)
        copies = self._copy_of[at]
        self._copy_of[at] = 0
        return copies[copies > 0] - _ONE

    def _drop(self, namespace: Namespace, ssd_slots: SlotArray) -> None:
        namespace.copy_count -= len(ssd_slots)
        if self._in_service and len(ssd_slots):
            self.drops.add(namespace, ssd_slots)


def far_places(ssd_slots: SlotArray) -> SlotArray:
    """The places of pages that are in these ssd slots only."""
    return ssd_slots + _FAR
