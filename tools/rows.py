"""Names for the rows that `inspect` answers, which are bare lists on the wire. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from nexuskv.namespace import NamespaceRecord

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "namespaces": (
        "id",
        "record",
        "pages",
        "bytes",
        "fragment_pages",
        "fragments",
        "epoch",
        "sessions",
        "asked",
        "hits",
        "ssd_bytes",
    ),
    "pages": (
        "key",
        "parent",
        "parent_state",
        "linked",
        "residency",
        "bytes",
        "checksum",
        "leased",
    ),
    "sessions": ("id", "client", "tenant", "pid", "writable", "reservations", "reserved_bytes"),
    "leases": ("id", "tenant", "request", "pages", "expires_s"),
    "chunks": ("chunk", "slot_bytes", "used", "writing", "quarantined", "unlinked"),
}

PARENT_STATES: Final = ("root", "key", "unknown")

Row = Mapping[str, object]


def named(what: str, values: Sequence[object]) -> dict[str, object]:
    """A row of the listing `what` with names, and with what its codes and records mean."""
    row: dict[str, object] = dict(zip(COLUMNS[what], values, strict=False))
    if what == "pages":
        state = row["parent_state"]
        assert isinstance(state, int)
        row["parent_state"] = PARENT_STATES[state]
    if what == "namespaces":
        raw = row.pop("record")
        assert isinstance(raw, bytes)
        record = NamespaceRecord.decode(raw)
        host_bytes, ssd_bytes = row.pop("bytes"), row.pop("ssd_bytes")
        row = {
            "model": record.model,
            "tenant": record.tenant,
            "kind": record.kind.name.lower(),
            "page_bytes": record.page_bytes,
            **row,
            "residency": {"host": host_bytes, "ssd": ssd_bytes},
        }
    return row
