"""One namespace's tree: which of its pages are held, and where.

Owns the answers to find, match, insert, move and remove. Times come in as arguments. Slots are
places: u32 numbers of which the index knows only whether they are near, below `FAR_PLACES`, or far.
The tree never frees one: it hands them back. Threading: one thread, the control loop.
"""

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from nexuskv import UNKNOWN
from nexuskv.errors import ConfigError
from nexuskv.index.chains import Chains, Parent
from nexuskv.index.run import Run, common_pages, index_in
from nexuskv.key import split_keys
from nexuskv.types import FAR_PLACES, Kind

ABSENT: Final = 0xFFFF_FFFF
"""Stands in an array of slots for a page that is not held."""


class Row(NamedTuple):
    """One held page, as `inspect` shows it.

    `linked` says whether its parent is held and known, or it is a prefix's first page; else it is
    the head of a fragment and `parent` what is recorded: an absent page's key, or UNKNOWN.
    """

    key: bytes
    parent: Parent
    slot: int
    linked: bool


class Tree:
    """The pages of one namespace. Made by `RadixIndex.open`."""

    __slots__ = ("_chain_kind", "chains", "epoch", "group", "key_bytes", "kind", "namespace_id")

    def __init__(self, namespace_id: bytes, *, kind: Kind, group: int, chains: Chains) -> None:
        self.namespace_id = namespace_id
        self.kind = kind
        self.group = group
        self.chains = chains
        self.key_bytes = chains.key_bytes
        self.epoch = 0
        self._chain_kind = kind is Kind.ATTENTION

    @property
    def page_count(self) -> int:
        """Pages held."""
        return self.chains.page_count

    @property
    def fragment_page_count(self) -> int:
        """Pages held below the head of a fragment."""
        return self.chains.fragments.page_count

    @property
    def rooted_page_count(self) -> int:
        """Pages held whose chain is whole down to a first page."""
        return self.chains.page_count - self.chains.fragments.page_count

    @property
    def fragment_count(self) -> int:
        """Fragments, counted by their heads."""
        return len(self.chains.fragments)

    # --- looking up

    def find(self, blob: bytes, *, touch: bool = True) -> "array[int]":
        """Look up every key of a request.

        Args:
            blob: joined keys in prefix order.
            touch: count as a use of the chains found, and graft fragments that the request shows
                to be consecutive. Without it nothing changes.

        Returns:
            One slot a key, `ABSENT` where the page is not held; held pages may follow a hole.

        Raises:
            ConfigError: the blob is no whole number of keys.
        """
        slots: array[int] = array("I")
        tails: list[Run] = []
        at, end, key_bytes = self._check(blob), len(blob), self.key_bytes
        shards, byte = self.chains.pages.shards, self.chains.pages.byte
        while at < end:
            key = blob[at : at + key_bytes]
            run = shards[key[byte]].get(key)
            if run is None:
                slots.append(ABSENT)
                at += key_bytes
            elif self._chain_kind:
                at, run = self._follow(run, key, blob, at, slots, graft=touch)
                tails.append(run)
            else:
                slots.append(run.slots[0])
                tails.append(run)
                at += key_bytes
        if touch and tails:
            self.chains.touch(tails)
        return slots

    def match(self, blob: bytes) -> int:
        """Count the pages of the longest held prefix of a request; a use of that chain.

        The first key may be any page: a key commits to its whole prefix. Each next page must be
        linked to the one before it, or head a fragment that can be grafted there.

        Raises:
            ConfigError: the blob is no whole number of keys.
        """
        at, key_bytes = self._check(blob), self.key_bytes
        if not self._chain_kind:
            return self._match_leaves(blob)
        key = blob[:key_bytes]
        run = self.chains.pages.get(key) if blob else None
        if run is None:
            return 0
        at, run = self._follow(run, key, blob, at, array("I"), graft=True)
        self.chains.touch([run])
        return at // key_bytes

    def missing(self, blob: bytes) -> list[int]:
        """The positions, counted from 0, of the keys that are not held. Touches nothing.

        Raises:
            ConfigError: the blob is no whole number of keys.
        """
        slots = self.find(blob, touch=False)
        return [index for index, slot in enumerate(slots) if slot == ABSENT]

    def slot_of(self, key: bytes) -> int | None:
        """The slot of one page; None when it is not held."""
        self._check(key)
        place = self.chains.locate(key)
        return None if place is None else place[0].slots[place[1]]

    def parent_of(self, key: bytes) -> Parent:
        """The page before a held page: its key, None for a prefix's first page, or UNKNOWN.

        Raises:
            KeyError: the page is not held.
        """
        place = self.chains.locate(key)
        if place is None:
            raise KeyError(key)
        return self.chains.parent_of(*place)

    def _check(self, blob: bytes) -> int:
        """Return 0, where every walk begins."""
        if len(blob) % self.key_bytes:
            raise ConfigError(
                f"{len(blob)} bytes are no whole number of keys of {self.key_bytes} bytes"
            )
        return 0

    def _match_leaves(self, blob: bytes) -> int:
        tails: list[Run] = []
        for at in range(0, len(blob), self.key_bytes):
            run = self.chains.pages.get(blob[at : at + self.key_bytes])
            if run is None:
                break
            tails.append(run)
        if tails:
            self.chains.touch(tails)
        return len(tails)

    def _follow(
        self, run: Run, key: bytes, blob: bytes, at: int, slots: "array[int]", *, graft: bool
    ) -> tuple[int, Run]:
        """Follow one chain of linked pages as far as the request goes along it.

        `run` holds `key`, the request's key at byte `at`. The slots of the pages passed are added
        to `slots`; `graft` says whether the tree may be changed.

        Returns:
            The byte of the request where the chain leaves it, and the last run used.
        """
        chains, key_bytes, length = self.chains, self.key_bytes, len(blob)
        pages = chains.pages
        index = index_in(run, key)
        while True:
            end = index + common_pages(run, index, blob, at, key_bytes)
            at += (end - index) * key_bytes
            whole = end == len(run.slots)
            slots.extend(run.slots if whole and not index else run.slots[index:end])
            if at >= length:
                break
            key = blob[at : at + key_bytes]
            child = pages.get(key)
            if child is None:
                break
            index = index_in(child, key)
            if index or not whole or child.parent is not run:
                if not graft or not chains.join(run, end, child, index):
                    break
                whole = True
            run = child
        if graft and not whole:
            # Cut off what was not used, so that it ages alone: hit rates then are those of a
            # least-recently-used order of pages (without cuts under 8 pages they were 0.3 % less).
            run = chains.split(run, end)
        return at, run

    # --- changing

    def insert(
        self, parent: Parent, blob: bytes, slots: Sequence[int], *, used: bool = True
    ) -> list[int]:
        """Publish pages in chain order; a use of their chain unless `used` says otherwise.

        Args:
            parent: the page before the first: its key, held or not, None when the first begins a
                prefix, or UNKNOWN. Pages of kind window and state have none; it is ignored.
            blob: joined keys.
            slots: one a key.
            used: False for pages of an earlier run: new ones are placed just before the chain they
                hang under, and that is not touched, however long it is.

        Returns:
            The slots of pages that were held already, or came twice: they stay the caller's.

        Raises:
            ConfigError: lengths disagree.
        """
        self._check(blob)
        if len(blob) != len(slots) * self.key_bytes:
            raise ConfigError(f"{len(slots)} slots for {len(blob) // self.key_bytes} keys")
        given = slots if isinstance(slots, array) else array("I", slots)
        self.chains.pages.make_room(blob, self.key_bytes)
        if self._chain_kind:
            return self._insert_chain(parent, blob, given, used=used)
        return self._insert_leaves(blob, given)

    def _insert_leaves(self, blob: bytes, slots: "array[int]") -> list[int]:
        lost: list[int] = []
        tails: list[Run] = []
        chains, key_bytes = self.chains, self.key_bytes
        for index, slot in enumerate(slots):
            key = blob[index * key_bytes : (index + 1) * key_bytes]
            run = chains.pages.get(key)
            if run is None:
                run = Run(key, slots[index : index + 1], chains.rooted, chains.ledger.touch)
                chains.pages.shards[key[chains.pages.byte]][key] = run
                chains.hang(run, None, None)
            else:
                lost.append(slot)
            tails.append(run)
        if tails:
            chains.touch(tails)
        return lost

    def _insert_chain(
        self, parent: Parent, blob: bytes, slots: "array[int]", *, used: bool
    ) -> list[int]:
        chains, key_bytes = self.chains, self.key_bytes
        lost: list[int] = []
        tails: list[Run] = []
        run, end = self._anchor(parent)
        index = 0
        while index < len(slots):
            key = blob[index * key_bytes : (index + 1) * key_bytes]
            held = chains.pages.get(key)
            if held is None:
                run, index = self._grow(run, end, parent, key, blob, slots, index, used=used)
                end = len(run.slots)
                continue
            place = index_in(held, key)
            if run is None:
                chains.settle(held, place, parent)
            elif not (run is held and end == place) and not chains.join(run, end, held, place):
                tails.append(run)
            same = common_pages(held, place, blob, index * key_bytes, key_bytes)
            lost.extend(slots[index : index + same])
            run, end, index = held, place + same, index + same
        if run is not None:
            tails.append(run)
            # What is no use stands in order all the same if all of it is new: see `Chains.hang`.
            # Pages met on the way may have been grafted, and a graft counts as a use.
            if used or lost or run.parent is None:
                chains.touch(tails)
        return lost

    def _anchor(self, parent: Parent) -> tuple[Run | None, int]:
        """The run that holds the parent and the index after it; no run if it is not held."""
        if parent is None or parent is UNKNOWN:
            return None, 0
        assert isinstance(parent, bytes)
        if len(parent) != self.key_bytes:
            raise ConfigError(f"the parent has {len(parent)} bytes, keys have {self.key_bytes}")
        place = self.chains.locate(parent)
        return (None, 0) if place is None else (place[0], place[1] + 1)

    def _grow(
        self,
        run: Run | None,
        end: int,
        origin: Parent,
        key: bytes,
        blob: bytes,
        slots: "array[int]",
        index: int,
        *,
        used: bool,
    ) -> tuple[Run, int]:
        """Add new pages from `index` on, at most to the end of one run.

        `key` is the one at `index`. The page before it is the last before the index `end` of `run`;
        without a run, `origin` says what the parent is.

        Returns:
            The run that holds them and the index of the first page not added.
        """
        chains, key_bytes = self.chains, self.key_bytes
        room = chains.ledger.run_pages_max
        extends = False
        if run is not None:
            if end < len(run.slots):
                run = chains.split(run, end)
            extends = run.first_child is None and end < room
        if run is not None and extends:
            grown = run
            room -= end
        else:
            grown = Run(b"", array("I"), chains.rooted, chains.ledger.touch)
        shards, byte = chains.pages.shards, chains.pages.byte
        shards[key[byte]][key] = grown
        first = index * key_bytes
        at = first + key_bytes
        limit = min(len(blob), first + room * key_bytes)
        while at < limit:
            later = blob[at : at + key_bytes]
            shard = shards[later[byte]]
            if later in shard:
                break
            shard[later] = grown
            at += key_bytes
        stop = at // key_bytes
        if extends:
            chains.append(grown, blob[first:at], slots[index:stop])
        else:
            grown.blob = blob[first:at] if stop - index > 1 else key  # one object with the map's
            grown.slots = slots[index:stop]
            chains.hang(grown, run, origin, used=used)
        return grown, stop

    def move(
        self, blob: bytes, old: Sequence[int], new: Sequence[int], *, touch: bool = False
    ) -> list[bool]:
        """Give pages another place each, near or far, if they still have the one that is named.

        Args:
            blob: joined keys, in any order.
            old: one place a key.
            new: one a key.
            touch: count as a use of the chains of the pages moved.

        Returns:
            Which pages moved; nothing changed for the others.

        Raises:
            ConfigError: lengths disagree.
        """
        self._check(blob)
        key_bytes, pages = self.key_bytes, self.chains.pages
        if not len(blob) == len(old) * key_bytes == len(new) * key_bytes:
            raise ConfigError(
                f"{len(old)} old and {len(new)} new places for {len(blob) // key_bytes} keys"
            )
        moved: list[bool] = []
        used: list[Run] = []
        run: Run | None = None
        index = at = 0
        for before, after in zip(old, new, strict=True):
            key = blob[at : at + key_bytes]
            at += key_bytes
            index += 1  # most often the page after the last one
            if run is None or not run.blob.startswith(key, index * key_bytes):
                run = pages.get(key)
                index = 0 if run is None else index_in(run, key)
                if run is not None:
                    used.append(run)
            follows = run is not None and run.slots[index] == before
            moved.append(follows)
            if run is not None and follows:
                run.slots[index] = after
                if before >= FAR_PLACES > after and not touch:
                    run.order.near.noticed(run)
        if touch and used:
            self.chains.touch(used)
        return moved

    def remove(self, blob: bytes) -> "array[int]":
        """Unlink pages and return the slots of those that were held, last first.

        Their children become fragments. Readers and pins are the caller's business: leased pages
        are unlinked too.

        Raises:
            ConfigError: the blob is no whole number of keys.
        """
        self._check(blob)
        slots: array[int] = array("I")
        # Last first: a whole chain then goes without a cut inside a run.
        for at in reversed(range(0, len(blob), self.key_bytes)):
            place = self.chains.locate(blob[at : at + self.key_bytes])
            if place is not None:
                slots.append(self.chains.unlink(*place))
        return slots

    def drop(self, key: bytes, slot: int) -> bool:
        """Unlink one page if it is still held in `slot`; its children become fragments."""
        self._check(key)
        place = self.chains.locate(key)
        if place is None or place[0].slots[place[1]] != slot:
            return False
        self.chains.unlink(*place)
        return True

    def clear(self) -> "array[int]":
        """Unlink every page, begin the next epoch, and return all slots."""
        self.epoch += 1
        return self.chains.clear()

    # --- pins

    def pin(self, blob: bytes, until: float) -> int:
        """Make eviction pass over pages, and so over their ancestors, until a time in seconds.

        Soft: when nothing else can be evicted they go all the same.

        Returns:
            How many of the pages are held, and so pinned.

        Raises:
            OutOfSpace: the index has `pins_max` pins; the pages before that one are pinned.
            ConfigError: the blob is no whole number of keys.
        """
        self._check(blob)
        pinned = 0
        for key in split_keys(blob, self.key_bytes):
            if self.chains.pages.get(key) is not None:
                self.chains.ledger.pins.add((self.chains.number, key), until)
                pinned += 1
        return pinned

    def unpin(self, blob: bytes) -> int:
        """End the pins of pages; returns how many were pinned."""
        self._check(blob)
        pins, number = self.chains.ledger.pins, self.chains.number
        return sum(pins.remove((number, key)) for key in split_keys(blob, self.key_bytes))

    def is_pinned(self, key: bytes, now: float) -> bool:
        """Whether one page is pinned at `now`, in seconds."""
        return self.chains.ledger.pins.is_pinned((self.chains.number, key), now)

    # --- showing

    def inspect(self, cursor: bytes | None, limit: int) -> tuple[list[Row], bytes | None]:
        """Show up to `limit` pages from a cursor on, in an order that other changes keep.

        A page held from the first call to the last is shown; one inserted or removed meanwhile may
        be. (It is shown twice only if the tree outgrew its first dict in between.)

        Args:
            cursor: None to begin, then what the call before returned.
            limit: rows, at least 1.

        Returns:
            The rows and the next cursor, None when there are no more.
        """
        keys, after = self.chains.pages.keys_after(cursor, limit)
        return [self._row(key) for key in keys], after

    def _row(self, key: bytes) -> Row:
        place = self.chains.locate(key)
        assert place is not None
        run, index = place
        linked = bool(index) or self.chains.fragments.parent_of(run) is None
        return Row(key, self.chains.parent_of(run, index), run.slots[index], linked)
