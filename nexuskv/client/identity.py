"""What a namespace is on the client's side: its id, its encoding, and the sizes that calls need."""

from collections.abc import Sequence
from dataclasses import dataclass

from nexuskv.key import PageKey, join_keys
from nexuskv.namespace import NamespaceRecord, namespace_id
from nexuskv.types import Kind


@dataclass(frozen=True, slots=True)
class Identity:
    """One namespace; computed from its record alone, so no daemon is needed for it."""

    record: NamespaceRecord
    encoded: bytes
    id: bytes
    key_bytes: int
    page_bytes: int
    chained: bool  # a page is of use only behind all its predecessors

    @classmethod
    def of(cls, record: NamespaceRecord) -> "Identity":
        """The identity of a record."""
        encoded = record.encode()
        return cls(
            record,
            encoded,
            namespace_id(encoded),
            record.key_bytes,
            record.page_bytes,
            record.kind is Kind.ATTENTION,
        )

    def join(self, keys: Sequence[PageKey]) -> bytes:
        """One blob of all keys.

        Raises:
            ConfigError: a key has another length than the namespace's keys.
        """
        return join_keys(keys, self.key_bytes)
