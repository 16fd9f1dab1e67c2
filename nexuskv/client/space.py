"""A namespace to put pages into and get them from. The calls an engine makes all day.

Store faults are statuses; only a caller's mistakes raise, before anything is sent. Thread-safe.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nexuskv.client.answers import as_statuses
from nexuskv.client.batches import check_duration, check_memory, first_places
from nexuskv.client.identity import Identity
from nexuskv.client.matching import match_chain
from nexuskv.client.prefetching import prefetch
from nexuskv.client.reading import Reader
from nexuskv.client.view import View, check_page_count
from nexuskv.client.writing import Writer, check_parent
from nexuskv.dataplane.batch import Regions
from nexuskv.key import PageKey
from nexuskv.namespace import NamespaceRecord
from nexuskv.protocol import Type
from nexuskv.types import Match, PageStatus

if TYPE_CHECKING:
    from nexuskv.client.store import Store


class Space:
    """One namespace of a store. Made by `Store.namespace`."""

    def __init__(self, store: "Store", record: NamespaceRecord) -> None:
        self._store = store
        self.identity = Identity.of(record)

    @property
    def record(self) -> NamespaceRecord:
        """Everything that must be equal for pages to be interchangeable."""
        return self.identity.record

    @property
    def id(self) -> bytes:
        """The namespace's 16 bytes."""
        return self.identity.id

    def match(self, keys: Sequence[PageKey]) -> Match:
        """Find the longest held prefix of a chain. Takes no lease and loads no bytes.

        Args:
            keys: chained page keys in prefix order, all of the namespace's length.

        Returns:
            Page count, tiers and estimated load seconds, this process's copies included. A miss, or
            a daemon that is away, is a result of 0 pages.

        Raises:
            ConfigError: a key has a wrong length.
        """
        blob = self.identity.join(keys)
        return match_chain(self._store.process, self.identity, blob) if blob else Match(0)

    def get(
        self,
        keys: Sequence[PageKey],
        *,
        into: Sequence[Regions],
        wait_s: float = 0.0,
        load: bool = True,
    ) -> list[PageStatus]:
        """Copy pages into the caller's memory, each checked against its checksum.

        Args:
            keys: pages to get, in chain order; a key may come twice.
            into: one item a key: a writable buffer of `page_bytes` bytes, or a list of them whose
                lengths add up to that, filled in order. Contents are undefined unless HIT.
            wait_s: how long to wait for pages that are missing now. Holds one of the
                `client_connections` meanwhile.
            load: whether to have pages brought into host memory that are held elsewhere; False
                leaves them misses. All in all a get takes `transfer_timeout_s` and `wait_s` at
                most; what has not come by then is a miss.

        Returns:
            One status a key. HIT alone means that the bytes are there and good.

        Raises:
            ConfigError: a key of a wrong length, or memory that does not fit, is read-only or
            overlaps.
        """
        check_duration("wait_s", wait_s)
        blob = self.identity.join(keys)
        page_bytes = self.identity.page_bytes
        check_memory(into, page_count=len(keys), page_bytes=page_bytes, writable=True)
        if not blob:
            return []
        reader = Reader(self._store.process, self.identity, blob, into, wait_s=wait_s, load=load)
        return as_statuses(reader.read())

    def put(
        self,
        keys: Sequence[PageKey],
        *,
        from_: Sequence[Regions],
        parent: object = None,
    ) -> list[PageStatus]:
        """Store pages of a chain; held ones are skipped.

        Args:
            keys: pages in chain order, each the child of the one before.
            from_: one item a key: a buffer of `page_bytes` bytes, or a list of them in order. Must
            not
                change during the call; a page that does is corrupt at the next get, never wrong.
            parent: what the first page follows: a key, None (it is a chain's first page) or
                `nexuskv.UNKNOWN`.

        Returns:
            One status a key: STORED, EXISTS (held already, or another writer won), NO_SPACE,
            DROPPED (after a failed page of its chain, or cleared meanwhile), UNAVAILABLE.

        Raises:
            ConfigError: a key or parent of a wrong length, memory that does not fit, one key with
            two
                contents; or, once the daemon is asked, pages larger than it can hold.
        """
        identity = self.identity
        check_memory(from_, page_count=len(keys), page_bytes=identity.page_bytes, writable=False)
        blob, above = identity.join(keys), check_parent(parent, identity)
        if not blob:
            return []
        places = first_places(keys, from_)
        if places is None:
            writer = Writer(self._store.process, identity, blob, from_, parent=above)
            return as_statuses(writer.write())
        kept = [keys[place] for place in places]
        memory = [from_[place] for place in places]
        writer = Writer(self._store.process, identity, b"".join(kept), memory, parent=above)
        by_key = dict(zip(kept, as_statuses(writer.write()), strict=True))
        return [by_key[key] for key in keys]

    def view(self, keys: Sequence[PageKey], *, check: bool = False, load: bool = True) -> View:
        """Read pages in place, without a copy; see `View`. With `check` each is hashed first.

        With `load` pages that are held elsewhere are brought into host memory first, as many as one
        acquire may hold at a time (`acquire_window_bytes`).

        Raises:
            ConfigError: a key has a wrong length, or there are more keys than a view may have.
        """
        process = self._store.process
        check_page_count(keys, pages_max=process.config.batch_pages_max)
        return View(process, self.identity, self.identity.join(keys), check=check, load=load)

    def prefetch(self, keys: Sequence[PageKey]) -> int:
        """Have pages brought into host memory, where a get finds them fast; how many are there.

        Waits until they are, for at most `transfer_timeout_s`; whoever cannot wait calls it from a
        thread of its own. Takes no memory and keeps no lease: what is not got soon may go again.

        Raises:
            ConfigError: a key has a wrong length.
        """
        if not keys:
            return 0
        return prefetch(self._store.process, self.identity, self.identity.join(keys))

    def pin(self, keys: Sequence[PageKey], *, ttl_s: float) -> int:
        """Keep pages from eviction as long as anything else can go; the number of pages pinned.

        Raises:
            ConfigError: a key of a wrong length, or a negative `ttl_s`.
            NexusError: the daemon is away or refuses; nothing is known to be pinned.
        """
        check_duration("ttl_s", ttl_s)
        return self._count(Type.PIN, keys, int(ttl_s * 1000))

    def unpin(self, keys: Sequence[PageKey]) -> int:
        """End pins early; the number of pages that were pinned. Errors as `pin`."""
        return self._count(Type.UNPIN, keys)

    def remove(self, keys: Sequence[PageKey]) -> int:
        """Drop pages from all tiers; the number dropped. Errors as `pin`."""
        return self._count(Type.REMOVE, keys)

    def clear(self) -> int:
        """Drop every page of the namespace, and work in progress on it; the number dropped.

        Raises:
            NexusError: the daemon is away or refuses; the namespace may not be cleared.
        """
        body = self._store.ask_about(self.identity, Type.CLEAR, ())
        count = body[0]
        assert isinstance(count, int)
        return count

    def _count(self, kind: Type, keys: Sequence[PageKey], *rest: int) -> int:
        blob = self.identity.join(keys)
        return self._store.count_pages(self.identity, kind, blob, rest) if blob else 0
