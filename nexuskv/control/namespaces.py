"""The namespaces that the daemon knows: records, trees, usage. Bounded by namespaces_max."""

from dataclasses import dataclass

from nexuskv.errors import ConfigError, OutOfSpace
from nexuskv.index.radix import RadixIndex
from nexuskv.index.tree import Tree
from nexuskv.namespace import NamespaceRecord, namespace_id
from nexuskv.tiers.host import slot_bytes_of


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

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots its pages fill."""
        return self.tree.page_count * self.slot_bytes

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

    def __init__(self, *, index: RadixIndex, chunk_bytes: int, namespaces_max: int) -> None:
        self._index = index
        self._chunk_bytes = chunk_bytes
        self._namespaces_max = namespaces_max
        self.by_id: dict[bytes, Namespace] = {}

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
        slot_bytes = slot_bytes_of(record.page_bytes, chunk_bytes=self._chunk_bytes)
        self._make_room()
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
            if not namespace.opened_by and not namespace.tree.page_count:
                del self.by_id[key]
                self._index.close(key)
                return
        raise OutOfSpace(f"{self._namespaces_max} namespaces are in use (namespaces_max)")
