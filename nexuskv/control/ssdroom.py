"""Making room on the ssd: free slots, then a new file, then eviction, then copies held twice.

Nothing here waits: a slot whose copy is dropped can be used once its row has been deleted, so
`take` gives what is free now and sees to it that more will come. Order of sacrifice: the coldest
leaves with an ssd slot go from both tiers (I3); where every leaf is in host memory only, pages that
are there too give up their copies, coldest first; at last pages of other sizes go, until one of
their files is free as a whole. So the tier never locks up, whatever it holds. Control thread only.
"""

import logging
from itertools import chain

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.copies import Copies
from nexuskv.control.counters import Counters
from nexuskv.control.namespaces import Namespace, Namespaces
from nexuskv.control.pages import Pages, as_slots
from nexuskv.index.radix import RadixIndex
from nexuskv.tiers.host import SlotArray
from nexuskv.tiers.ssd import FileToMake
from nexuskv.worker.commands import CommandQueue, FileMade, MakeFile

_LOG = logging.getLogger("nexuskv.control")


class SsdRoom:
    """Finds ssd slots for copies."""

    def __init__(
        self,
        *,
        config: Config,
        clock: Clock,
        index: RadixIndex,
        pages: Pages,
        copies: Copies,
        namespaces: Namespaces,
        worker: CommandQueue,
        counters: Counters,
    ) -> None:
        self._config = config
        self._clock = clock
        self._index = index
        self._pages = pages
        self._copies = copies
        self._namespaces = namespaces
        self._worker = worker
        self._counters = counters
        self._to_make: list[FileToMake] = []  # the data plane did not take the command yet
        self._making: dict[int, int] = {}  # file index → slot size, those included

    def take(self, slot_bytes: int, count: int) -> SlotArray:
        """Up to `count` slots for copies, now WRITING; more will be free later if that can be."""
        taken = self._copies.tier.take(slot_bytes, count)
        self._ask_for(taken.files)
        if len(taken.slots) < count and slot_bytes not in self._making.values():
            self._give_up(slot_bytes, count - len(taken.slots))
        return taken.slots

    def will_come(self, slot_bytes: int) -> bool:
        """Whether slots of this size may come free without another `take`."""
        return slot_bytes in self._making.values() or self._copies.drops.waiting_count > 0

    def make_ahead(self, slot_bytes: int) -> None:
        """See to it that the next group of copies finds slots whose rows are gone already."""
        tier = self._copies.tier
        if not slot_bytes or slot_bytes in self._making.values() or self._can_grow():
            return
        usage = tier.usage_of(slot_bytes)
        group = max(1, self._config.copy_group_bytes // slot_bytes)
        # A small tier is not emptied for what may come.
        wanted = min(group, usage.used // 16)
        if usage.free < wanted:
            self._give_up(slot_bytes, wanted - usage.free)

    def pump(self) -> None:
        """Send the commands that were not taken before."""
        waiting, self._to_make = self._to_make, []
        self._ask_for(waiting)

    def file_made(self, result: FileMade) -> None:
        """A file can be used, or could not be made."""
        self._making.pop(result.file_index, None)
        if result.error is None:
            self._copies.tier.file_made(result.file_index)
            return
        self._counters.add("ssd_errors")
        _LOG.error("ssd file %d cannot be made: %s", result.file_index, result.error)
        self._copies.tier.file_failed(result.file_index)

    def _ask_for(self, files: list[FileToMake]) -> None:
        for file in files:
            self._making[file.file_index] = file.slot_bytes
            if not self._worker.submit(MakeFile(file.file_index, file.slot_bytes)):
                self._to_make.append(file)

    def _can_grow(self) -> bool:
        tier = self._copies.tier
        files = tier.file_bytes_on_disk // tier.geometry.file_bytes + len(self._making)
        return tier.growing and files < tier.file_count

    def _give_up(self, slot_bytes: int, count: int) -> None:
        """Drop `count` copies of this size, those on their way out included."""
        own = [ns for ns in self._with_pages() if self._copies.slot_bytes_of(ns) == slot_bytes]
        dropping = self._copies.tier.usage_of(slot_bytes).dropping
        wanted = count - dropping
        if wanted > 0:
            wanted -= self._evict(own, wanted)
        if wanted > 0:
            wanted -= self._detach(own, wanted)
        if wanted == count:
            # Nothing of this size is to be had: a file of another must change hands.
            others = [ns for ns in self._with_pages() if ns not in own and ns.copy_count]
            if others and not self._copies.drops.waiting_count:
                largest = min(map(self._copies.slot_bytes_of, others))
                self._evict(others, self._copies.tier.geometry.slot_count(largest))

    def _with_pages(self) -> list[Namespace]:
        return [ns for ns in self._namespaces.by_id.values() if ns.tree.page_count]

    def _evict(self, namespaces: list[Namespace], count: int) -> int:
        """Evict coldest leaves from all tiers; how many ssd slots that gives."""
        if not namespaces:
            return 0
        before = sum(namespace.copy_count for namespace in namespaces)
        evicted = self._index.evict(
            count,
            is_free=self._may_go,
            now=self._clock.now(),
            trees=[namespace.tree for namespace in namespaces],
        )
        self._pages.evicted(evicted)
        return before - sum(namespace.copy_count for namespace in namespaces)

    def _may_go(self, place: int) -> bool:
        """Whether a page may go for room here; one without an ssd slot would give none."""
        return self._copies.has(place) and self._pages.is_free(place)

    def _detach(self, namespaces: list[Namespace], count: int) -> int:
        """Let pages in host memory give up their copies; how many."""
        wanted = {namespace.tree for namespace in namespaces}
        sizes = {namespace.slot_bytes for namespace in namespaces}
        cold = chain.from_iterable(
            self._index.cold_near(count, wants=self._copies.has, group=size) for size in sizes
        )
        chosen = [(tree, slot) for tree, _key, slot in cold if tree in wanted][:count]
        for tree, slot in chosen:
            self._copies.detach(self._pages.namespace_of(tree), as_slots([slot]))
        self._counters.add("ssd_evicted_pages", len(chosen))
        return len(chosen)
