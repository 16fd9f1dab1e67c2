"""The runs of one tree: how they are cut, hung, grafted, moved and unlinked.

Owns the tree's shape. Invariants: every page is in the page map under its run; children hang under
a run's last page; a run stands in the rooted order or, below the head of a fragment, in the
fragments' order, and before its ancestors there. Threading: one thread, the control loop.
"""

from array import array
from collections.abc import Callable

from nexuskv import UNKNOWN, Unknown
from nexuskv.index.fragments import Fragments
from nexuskv.index.ledger import Ledger
from nexuskv.index.order import EvictionPolicy
from nexuskv.index.pagemap import PageMap
from nexuskv.index.run import Run, index_in

Parent = bytes | None | Unknown
"""The page before a page: a key, None for none (the page is a prefix's first), or UNKNOWN."""


class Chains:
    """The shape of one tree. `number` tells it from the index's other trees."""

    __slots__ = ("fragments", "key_bytes", "ledger", "number", "page_count", "pages", "rooted")

    def __init__(
        self,
        *,
        key_bytes: int,
        number: int,
        policy: Callable[[], EvictionPolicy],
        ledger: Ledger,
    ) -> None:
        self.key_bytes = key_bytes
        self.number = number
        self.ledger = ledger
        self.pages = PageMap()
        self.rooted = policy()
        self.fragments = Fragments(policy(), ledger)
        self.page_count = 0

    # --- looking

    def locate(self, key: bytes) -> tuple[Run, int] | None:
        """The run that holds a page and the page's index in it."""
        run = self.pages.get(key)
        return None if run is None else (run, index_in(run, key))

    def key_at(self, run: Run, index: int) -> bytes:
        """The key of a run's page."""
        return run.blob[index * self.key_bytes : (index + 1) * self.key_bytes]

    def parent_of(self, run: Run, index: int) -> Parent:
        """The page before a page as far as it is known; it need not be held."""
        if index:
            return self.key_at(run, index - 1)
        if run.parent is not None:
            return run.parent.blob[-self.key_bytes :]
        return self.fragments.parent_of(run)

    # --- growing

    def append(self, run: Run, blob: bytes, slots: "array[int]") -> None:
        """Add pages at the end of a run that has no children; their keys are mapped already."""
        run.blob += blob
        run.slots.extend(slots)
        self._count(run, len(slots))

    def hang(self, run: Run, under: Run | None, origin: Parent, *, used: bool = True) -> None:
        """Enter a new run under another's last page, or under no held page.

        `origin` says, when `under` is None, what the parent is: None for a root. A run that was not
        `used` stands just before the one above it, which then need not be touched.
        """
        if under is not None:
            run.order = under.order
            under.adopt(run)
        elif origin is None:
            run.order = self.rooted
        else:
            run.order = self.fragments.order
            self.fragments.record(run, origin)
        if used or under is None:
            run.order.add(run)
        else:
            run.touch = under.touch
            run.order.place_colder(run, under)
            run.order.near.noticed(run)
        self._count(run, len(run.slots))

    def _count(self, run: Run, page_count: int) -> None:
        self.page_count += page_count
        if run.order is self.fragments.order:
            self.fragments.page_count += page_count

    def split(self, run: Run, index: int) -> Run:
        """Cut a run before the page `index`; return the part that now ends there.

        The part with children keeps its identity, and so do they; else the longer part does.
        """
        cut = index * self.key_bytes
        head_blob, tail_blob = run.blob[:cut], run.blob[cut:]
        head_slots, tail_slots = run.slots[:index], run.slots[index:]
        self.ledger.splits += 1
        if run.first_child is None and len(tail_slots) <= index:
            tail = Run(tail_blob, tail_slots, run.order, run.touch)
            run.blob, run.slots = head_blob, head_slots
            run.order.place_colder(tail, run)
            run.adopt(tail)
            self.pages.repoint(tail, self.key_bytes)
            return run
        head = Run(head_blob, head_slots, run.order, run.touch)
        run.blob, run.slots = tail_blob, tail_slots
        run.order.place_hotter(head, run)
        recorded = self.fragments.parent_of(run)
        if run.parent is not None:
            above = run.parent
            run.detach()
            above.adopt(head)
        elif recorded is not None:
            self.fragments.forget(run)
            self.fragments.record(head, recorded)
        head.adopt(run)
        self.pages.repoint(head, self.key_bytes)
        return head

    # --- grafting

    def join(self, run: Run, end: int, child: Run, index: int) -> bool:
        """Make the page `index` of `child` follow the page `end - 1` of `run`, if it may.

        Grafts `child` when it heads a fragment whose recorded parent does not say otherwise.

        Returns:
            Whether it follows now; False is a contradiction or a cycle, and is counted.
        """
        if index:
            follows = run is child and index == end
        elif child.parent is run and end == len(run.slots):
            return True
        else:
            follows = self._graft(run, end, child)
        if not follows:
            self.ledger.grafts_refused += 1
        return follows

    def _graft(self, run: Run, end: int, head: Run) -> bool:
        if not self.fragments.agrees(head, self.key_at(run, end - 1)):
            return False
        above: Run | None = run
        while above is not None:
            if above is head:
                return False
            above = above.parent
        if end < len(run.slots):
            run = self.split(run, end)
        self.fragments.forget(head)
        if run.order is not head.order:
            self._move(head, run.order)
        run.adopt(head)
        self.ledger.grafts += 1
        return True

    def settle(self, run: Run, index: int, origin: Parent) -> None:
        """Record what a commit says of the parent of a page held already, if it is news.

        `origin` names no held page: None for a root, an absent key, or UNKNOWN. A contradiction
        is counted and changes nothing.
        """
        if origin is UNKNOWN or origin == self.parent_of(run, index):
            return
        if index or self.fragments.parent_of(run) is not UNKNOWN:
            self.ledger.grafts_refused += 1
        elif origin is None:
            self.fragments.forget(run)
            self._move(run, self.rooted)
            self.ledger.grafts += 1
        else:
            self.fragments.record(run, origin)

    def _move(self, top: Run, order: EvictionPolicy) -> None:
        """Move a subtree to another order, as just used, descendants before ancestors."""
        moved = 0
        touch = self.ledger.touch
        for run in reversed(top.subtree()):
            run.order.remove(run)
            run.order = order
            run.touch = touch
            order.add(run)
            moved += len(run.slots)
        self.fragments.page_count += moved if order is self.fragments.order else -moved

    # --- use

    def touch(self, tails: list[Run]) -> None:
        """Note that the chains which end in these runs were used, all in one operation.

        Tail to head, one record a run. A run that a later chain of the operation went through is
        skipped: its ancestors were touched after it already.
        """
        self.ledger.touch = touch = self.ledger.touch + 1
        for tail in reversed(tails):
            if tail.touch == touch:
                continue
            run: Run | None = tail
            while run is not None:
                run.touch = touch
                run.order.touch(run)
                run = run.parent

    # --- shrinking

    def cut(self, run: Run, index: int) -> None:
        """Unlink the pages from `index` on of a run without children; at 0 the run goes too."""
        key_bytes, shards, byte = self.key_bytes, self.pages.shards, self.pages.byte
        blob, pins = run.blob, self.ledger.pins
        any_pinned = len(pins) > 0
        for at in range(index * key_bytes, len(blob), key_bytes):
            key = blob[at : at + key_bytes]
            del shards[key[byte]][key]
            if any_pinned:
                pins.remove((self.number, key))
        self._count(run, index - len(run.slots))
        if index:
            run.blob = blob[: index * key_bytes]
            run.slots = run.slots[:index]
            return
        run.order.remove(run)
        if run.parent is None:
            self.fragments.forget(run)
        else:
            run.detach()

    def unlink(self, run: Run, index: int) -> int:
        """Unlink one page wherever it is and return its slot; what hangs under it is fragments."""
        if index + 1 < len(run.slots):
            run = self.split(run, index + 1)
        key, slot = self.key_at(run, index), run.slots[index]
        for child in run.children():
            child.detach()
            self.fragments.record(child, key)
            if child.order is not self.fragments.order:
                self._move(child, self.fragments.order)
        self.cut(run, index)
        return slot

    def clear(self) -> "array[int]":
        """Unlink every page and return all slots; nothing refers to the old runs any more."""
        slots: array[int] = array("I")
        for order in (self.rooted, self.fragments.order):
            # No reference may stay between runs: the process runs without the cyclic collector.
            for run in list(order):
                slots.extend(run.slots)
                order.remove(run)
                run.parent = run.first_child = run.next_sibling = run.prev_sibling = None
        self.fragments.clear()
        self.pages.clear()
        self.page_count = 0
        self.ledger.pins.remove_tree(self.number)
        return slots

    def close(self) -> None:
        """Take an empty tree apart, so that no reference cycle is left."""
        self.rooted.close()
        self.fragments.order.close()
