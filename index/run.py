"""Runs: the nodes of a radix tree. A run is a stretch of pages without a branch.

Owns the shape of one node, its place among its siblings and its place in an eviction order.
Children hang under a run's last page. Invariant: a run in a tree has at least one page, and one
key blob slice and one slot per page. Threading: one thread, the control loop.
"""

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from nexuskv.index.order import EvictionPolicy


class Link:
    """A place in an eviction order: runs and the order's own markers.

    Both fields are unset while it stands in no order, so that no reference is left behind.
    """

    __slots__ = ("colder", "hotter")

    colder: "Link"
    hotter: "Link"


def enter_after(link: Link, after: Link) -> None:
    """Put a link into an order, directly hotter than another."""
    hotter = after.hotter
    link.colder = after
    link.hotter = hotter
    after.hotter = hotter.colder = link


def leave(link: Link) -> None:
    """Take a link out of its order."""
    colder, hotter = link.colder, link.hotter
    colder.hotter = hotter
    hotter.colder = colder
    del link.colder, link.hotter


class Run(Link):
    """Consecutive pages: their keys joined in `blob`, one place each in `slots` (u32).

    `parent` is None for a root and for the head of a fragment. `touch` is the sequence number of
    the last operation that used the run; `order` is the eviction order it stands in.
    """

    __slots__ = (
        "blob",
        "first_child",
        "next_sibling",
        "order",
        "parent",
        "prev_sibling",
        "slots",
        "touch",
    )

    blob: bytes
    slots: "array[int]"
    order: "EvictionPolicy"
    touch: int
    parent: Optional["Run"]
    first_child: Optional["Run"]
    next_sibling: Optional["Run"]
    prev_sibling: Optional["Run"]

    def __init__(
        self, blob: bytes, slots: "array[int]", order: "EvictionPolicy", touch: int
    ) -> None:
        self.blob = blob
        self.slots = slots
        self.order = order
        self.touch = touch
        self.parent = self.first_child = self.next_sibling = self.prev_sibling = None

    def adopt(self, child: "Run") -> None:
        """Hang a parentless run under this one."""
        child.parent = self
        first = self.first_child
        child.next_sibling = first
        if first is not None:
            first.prev_sibling = child
        self.first_child = child

    def detach(self) -> None:
        """Leave the parent, if any. The run keeps its own children."""
        parent = self.parent
        if parent is None:
            return
        before, after = self.prev_sibling, self.next_sibling
        if before is None:
            parent.first_child = after
        else:
            before.next_sibling = after
        if after is not None:
            after.prev_sibling = before
        self.parent = self.prev_sibling = self.next_sibling = None

    def children(self) -> Iterator["Run"]:
        """Its children, newest first; the one just yielded may be detached."""
        child = self.first_child
        while child is not None:
            after = child.next_sibling
            yield child
            child = after

    def subtree(self) -> list["Run"]:
        """This run and every run below it, each before its descendants."""
        found: list[Run] = [self]
        for run in found:
            child = run.first_child
            while child is not None:
                found.append(child)
                child = child.next_sibling
        return found


def index_in(run: Run, key: bytes) -> int:
    """Where in the run, counted in pages, its page `key` is.

    Keys are looked for at whole-key offsets only: a key's bytes may also straddle two others.
    """
    blob = run.blob
    if blob.startswith(key):
        return 0
    key_bytes = len(key)
    at = len(blob) - key_bytes
    if blob.endswith(key):
        return at // key_bytes
    at = blob.find(key, key_bytes)
    while at % key_bytes:
        assert at > 0, "the page map names the run that holds the key"
        at = blob.find(key, at - at % key_bytes + key_bytes)
    return at // key_bytes


def common_pages(run: Run, index: int, blob: bytes, at: int, key_bytes: int) -> int:
    """How many pages from `index` of the run equal the keys from byte `at` of `blob`."""
    held = run.blob
    start = index * key_bytes
    length = min(len(held) - start, len(blob) - at)
    if length == len(held):
        if blob.startswith(held, at):
            return length // key_bytes
    elif held[start : start + length] == blob[at : at + length]:
        return length // key_bytes
    same, differ = 0, length // key_bytes
    while differ - same > 1:
        middle = (same + differ) // 2
        reach = (middle - same) * key_bytes
        low = same * key_bytes
        if held[start + low : start + low + reach] == blob[at + low : at + low + reach]:
            same = middle
        else:
            differ = middle
    return same
