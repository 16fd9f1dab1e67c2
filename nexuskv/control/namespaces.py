"""The namespaces that the daemon knows: records, trees, usage. Bounded by namespaces_max.

Each is on record in the segment's folder before its first page can be, and each new epoch before a
`clear` is answered, so that a restart knows whose pages it finds and which of them were cleared.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from nexuskv.errors import ConfigError, NexusError, OutOfSpace
from nexuskv.index.radix import RadixIndex
from nexuskv.index.tree import Tree
from nexuskv.namespace import NamespaceRecord, namespace_id
from nexuskv.tiers.host import slot_bytes_of
from nexuskv.tiers.namespace_table import NamespaceTable

_LOG = logging.getLogger("nexuskv.control")


@dataclass(slots=True, eq=False)
class Namespace:
    """One namespace of the daemon."""

    id: bytes
    record: NamespaceRecord
    tree: Tree
    slot_bytes: int
    page_bytes: int
    key_bytes: int
    opened_by: int = 0  # sessions that hold a number for it
    reserved_count: int = 0  # slots lent for its pages and not yet committed or given back
    asked_pages: int = 0  # by matches, and by acquires that take a lease
    hit_pages: int = 0
    far_count: int = 0  # pages that are held on the ssd only
    copy_count: int = 0  # pages that have a copy on the ssd, those included
    dropping_count: int = 0  # ssd slots whose rows are still to be deleted

    @property
    def near_count(self) -> int:
        """Pages in host memory."""
        return self.tree.page_count - self.far_count

    @property
    def used_bytes(self) -> int:
        """Bytes of the host slots its pages fill."""
        return self.near_count * self.slot_bytes

    def key_count(self, keys: bytes, *, pages_max: int) -> int:
        """How many keys a joined blob holds.

        Raises:
            ConfigError: not a whole number of keys, or more than a message may name.
        """
        count, rest = divmod(len(keys), self.key_bytes)
        if rest:
            raise ConfigError(
                f"keys of this namespace have {self.key_bytes} bytes, got {len(keys)} bytes in all"
            )
        if count > pages_max:
            raise ConfigError(f"{count} pages in one message, at most {pages_max}")
        return count


class Namespaces:
    """Known namespaces by id."""

    def __init__(
        self, *, index: RadixIndex, table: NamespaceTable, chunk_bytes: int, namespaces_max: int
    ) -> None:
        """Those on record in `table` are known from the start."""
        self._index = index
        self._table = table
        self._chunk_bytes = chunk_bytes
        self._namespaces_max = namespaces_max
        self.by_id: dict[bytes, Namespace] = {}
        self.epoch_before: Callable[[bytes], int] = lambda _key: 0
        """The epoch that a namespace had when it was forgotten, as the ssd knows it."""
        for key, (encoded, epoch) in list(table.rows.items()):
            self._restore(key, encoded, epoch)

    def open(self, encoded: bytes, *, tenant: str) -> Namespace:
        """The namespace of an encoded record; the same object for the same record.

        Raises:
            ConfigError: a bad record, another tenant's, or pages that fit no chunk.
            OutOfSpace: namespaces_max are known and none is idle and empty.
        """
        record = NamespaceRecord.decode(encoded)
        if record.tenant != tenant:
            raise ConfigError(
                f"a session of tenant {tenant!r} cannot open a namespace of {record.tenant!r}"
            )
        key = namespace_id(record.encode())
        known = self.by_id.get(key)
        if known is not None:
            return known
        slot_bytes_of(record.page_bytes, chunk_bytes=self._chunk_bytes)
        self._make_room()
        # It may have been known before, and forgotten while it held no pages.
        epoch = self.epoch_before(key)
        self._table.save(key, record.encode(), epoch)
        namespace = self._add(key, record)
        namespace.tree.epoch = epoch
        return namespace

    def save_epoch(self, namespace: Namespace, epoch: int) -> None:
        """Put an epoch of a namespace on record: durable when this returns, not yet in force.

        Raises:
            OutOfSpace: the filesystem is full; nothing is changed.
        """
        self._table.save(namespace.id, namespace.record.encode(), epoch)

    def found(self, key: bytes, encoded: bytes, epoch: int) -> None:
        """The ssd's catalogue knows this namespace: so do we, and no earlier epoch of it.

        One that cannot be known, or has no place here any more, is none: its pages are misses.
        """
        namespace = self.by_id.get(key)
        if namespace is None:
            if len(self.by_id) >= self._namespaces_max:
                _LOG.warning("namespace %s of the ssd is one too many (namespaces_max)", key.hex())
                return
            self._restore(key, encoded, epoch)
            namespace = self.by_id.get(key)
        if namespace is None:
            return
        namespace.tree.epoch = max(namespace.tree.epoch, epoch)
        try:
            self.save_epoch(namespace, namespace.tree.epoch)
        except NexusError as exc:
            _LOG.warning("namespace %s is not on record in memory: %s", key.hex(), exc)

    def _restore(self, key: bytes, encoded: bytes, epoch: int) -> None:
        """Know a namespace that is on record, if it still can be."""
        try:
            record = NamespaceRecord.decode(encoded)
            if namespace_id(record.encode()) != key:
                raise ConfigError("its record has another id")
            namespace = self._add(key, record)
        except ConfigError as exc:
            _LOG.warning("namespace %s is given up with its pages: %s", key.hex(), exc)
            self._table.forget(key)
            return
        namespace.tree.epoch = epoch

    def _add(self, key: bytes, record: NamespaceRecord) -> Namespace:
        slot_bytes = slot_bytes_of(record.page_bytes, chunk_bytes=self._chunk_bytes)
        tree = self._index.open(
            key,
            kind=record.kind,
            key_bytes=record.key_bytes,
            group=slot_bytes,
        )
        namespace = Namespace(key, record, tree, slot_bytes, record.page_bytes, record.key_bytes)
        self.by_id[key] = namespace
        return namespace

    def _make_room(self) -> None:
        if len(self.by_id) < self._namespaces_max:
            return
        for key, namespace in self.by_id.items():
            busy = namespace.opened_by or namespace.tree.page_count or namespace.dropping_count
            if not busy:
                del self.by_id[key]
                self._index.close(key)
                self._table.forget(key)
                return
        raise OutOfSpace(f"{self._namespaces_max} namespaces are in use (namespaces_max)")
