"""Listings for `inspect`: rows and an opaque cursor. Stable paging under change; bounded work."""

import struct
from collections.abc import Callable
from typing import Final

from nexuskv.control.namespaces import Namespace, Namespaces
from nexuskv.control.pages import Pages
from nexuskv.control.sessions import Sessions
from nexuskv.errors import ConfigError
from nexuskv.types import FAR_PLACES

_AT: Final = struct.Struct("<Q")

Row = tuple[object, ...]
Listing = tuple[list[Row], bytes]


class Inspection:
    """Looks at everything, changes nothing."""

    def __init__(self, *, namespaces: Namespaces, sessions: Sessions, pages: Pages) -> None:
        self._namespaces = namespaces
        self._sessions = sessions
        self._pages = pages
        self._listings: dict[str, Callable[[bytes, bytes, int], Listing]] = {
            "namespaces": self._list_namespaces,
            "pages": self._list_pages,
            "sessions": self._list_sessions,
            "leases": self._list_leases,
            "chunks": self._list_chunks,
        }

    def page(self, what: str, *, namespace_id: bytes, cursor: bytes, limit: int) -> Listing:
        """One page of a listing and the cursor of the next, empty at the end.

        Raises:
            ConfigError: an unknown listing, namespace or cursor.
        """
        listing = self._listings.get(what)
        if listing is None:
            raise ConfigError(f"cannot list {what!r:.40}, only {', '.join(self._listings)}")
        return listing(namespace_id, cursor, limit)

    def _list_namespaces(self, _namespace_id: bytes, cursor: bytes, limit: int) -> Listing:
        ids = sorted(key for key in self._namespaces.by_id if key > cursor)
        copies = self._pages.copies
        rows: list[Row] = []
        for namespace in (self._namespaces.by_id[key] for key in ids[:limit]):
            size = copies.slot_bytes_of(namespace) if copies is not None else 0
            rows.append((*_namespace_row(namespace), namespace.copy_count * size))
        return rows, ids[limit - 1] if len(ids) > limit else b""

    def _list_pages(self, namespace_id: bytes, cursor: bytes, limit: int) -> Listing:
        namespace = self._namespaces.by_id.get(namespace_id)
        if namespace is None:
            raise ConfigError(f"no namespace {namespace_id.hex()!r:.40} is known here")
        # The index's cursor: a byte of the key, its value, the key.
        if cursor and (len(cursor) != 2 + namespace.key_bytes or cursor[0] >= namespace.key_bytes):
            raise _no_cursor(cursor)
        rows, following = namespace.tree.inspect(cursor or None, limit)
        return [
            (
                row.key,
                row.parent if isinstance(row.parent, bytes) else b"",
                0 if row.parent is None else 1 if isinstance(row.parent, bytes) else 2,
                row.linked,
                *self._state_of(namespace, row.slot),
            )
            for row in rows
        ], following or b""

    def _state_of(self, namespace: Namespace, place: int) -> tuple[tuple[str, ...], int, int, bool]:
        """Residency, bytes, checksum, and whether it is leased."""
        pages, copies = self._pages, self._pages.copies
        if place >= FAR_PLACES and copies is not None:
            checksum = copies.tier.checksum_of(place - FAR_PLACES)
            return ("ssd",), namespace.page_bytes, checksum, False
        tiers = ("host", "ssd") if copies is not None and copies.has(place) else ("host",)
        checksum = pages.tier.checksum_of(place)
        return tiers, namespace.page_bytes, checksum, pages.leases.is_leased(place)

    def _list_sessions(self, _namespace_id: bytes, cursor: bytes, limit: int) -> Listing:
        after = _number(cursor)
        numbers = sorted(n for n in self._sessions.by_number if n > after)
        rows: list[Row] = []
        for number in numbers[:limit]:
            session = self._sessions.by_number[number]
            pid = session.process.pid if session.process else 0
            rows.append(
                (
                    number,
                    session.client,
                    session.tenant,
                    pid,
                    session.writable,
                    len(session.reservations),
                    session.reserved_bytes,
                )
            )
        return rows, _AT.pack(numbers[limit - 1]) if len(numbers) > limit else b""

    def _list_leases(self, _namespace_id: bytes, cursor: bytes, limit: int) -> Listing:
        after = _number(cursor)
        leases = [
            x for x in self._pages.leases.all() if x.lease_id > after
        ]  # oldest, so lowest first
        rows: list[Row] = [
            (x.lease_id, x.tenant, x.request_id, len(x.slots), x.expires_s) for x in leases[:limit]
        ]
        return rows, _AT.pack(leases[limit - 1].lease_id) if len(leases) > limit else b""

    def _list_chunks(self, _namespace_id: bytes, cursor: bytes, limit: int) -> Listing:
        rows: list[Row] = []
        after = _number(cursor)
        for chunk in self._pages.tier.chunks():
            if chunk.chunk_index <= after:
                continue
            if len(rows) == limit:
                last = rows[-1][0]
                assert isinstance(last, int)
                return rows, _AT.pack(last)
            rows.append(tuple(chunk))
        return rows, b""


def _no_cursor(cursor: bytes) -> ConfigError:
    return ConfigError(f"{cursor.hex()!r:.40} is no cursor of this listing")


def _number(cursor: bytes) -> int:
    """The number a cursor holds, -1 for a start."""
    if not cursor:
        return -1
    if len(cursor) != _AT.size:
        raise _no_cursor(cursor)
    number: int = _AT.unpack(cursor)[0]
    return number


def _namespace_row(namespace: Namespace) -> Row:
    """`[id, record, pages, bytes, fragment pages, fragments, epoch, sessions, asked, hits]`.

    The column `ssd_bytes` follows.
    """
    tree = namespace.tree
    return (
        namespace.id,
        namespace.record.encode(),
        tree.page_count,
        namespace.used_bytes,
        tree.fragment_page_count,
        tree.fragment_count,
        tree.epoch,
        namespace.opened_by,
        namespace.asked_pages,
        namespace.hit_pages,
    )
