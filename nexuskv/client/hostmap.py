"""The daemon's segments as this process maps them: one `HostMap` for each run of the daemon.

A map lives while a link, a view or the process state uses it (`retain`/`release`), so a daemon that
comes back with other segments gets a new map while views of the old one stay readable. Thread-safe.
"""

import threading
from collections.abc import Sequence

from nexuskv.client.session import Session
from nexuskv.dataplane.batch import Pages, Regions, Stored
from nexuskv.dataplane.shm import SegmentMap
from nexuskv.errors import ConfigError, ProtocolError
from nexuskv.types import DESCRIPTOR_BYTES, DESCRIPTOR_FORMAT, PageStatus


class HostMap:
    """Mapped segments by number. Starts with one user: whoever opened it."""

    def __init__(
        self, incarnation: bytes, segments: dict[int, SegmentMap], *, writable: bool
    ) -> None:
        self.incarnation = incarnation
        self.writable = writable
        self._segments = segments
        self._sole = next(iter(segments.values())) if len(segments) == 1 else None
        self._users = 1
        self._lock = threading.Lock()

    @classmethod
    def open(cls, session: Session) -> "HostMap":
        """Map every segment that `hello` named.

        Raises:
            Unavailable: a file is not there or is another one: this process is on another host.
        """
        opened: dict[int, SegmentMap] = {}
        try:
            for spec in session.segments:
                opened[spec.segment_id] = SegmentMap.open(spec, writable=session.writable)
        finally:
            if len(opened) < len(session.segments):
                for segment in opened.values():
                    segment.close()
        return cls(session.incarnation, opened, writable=session.writable)

    def retain(self) -> "HostMap":
        """Count one more user."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        """Count one user less; the last one unmaps."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            for segment in self._segments.values():
                segment.close()

    def load(
        self, pages: Pages, into: Sequence[Regions], *, threads: int, deadline_s: float
    ) -> bytes:
        """Copy and check pages; one status byte each. See `native.load`."""
        if self._sole is not None:
            return self._sole.load(pages, into, threads=threads, deadline_s=deadline_s)
        statuses = bytearray([PageStatus.MISS]) * len(into)
        for segment, indexes in self._by_segment(pages):
            part = _pick(pages, indexes)
            found = segment.load(
                part, [into[i] for i in indexes], threads=threads, deadline_s=deadline_s
            )
            for index, status in zip(indexes, found, strict=True):
                statuses[index] = status
        return bytes(statuses)

    def store(
        self, pages: Pages, from_: Sequence[Regions], *, threads: int, deadline_s: float
    ) -> Stored:
        """Hash pages and copy them into their slots. See `native.store`."""
        if self._sole is not None:
            return self._sole.store(pages, from_, threads=threads, deadline_s=deadline_s)
        statuses = bytearray([PageStatus.MISS]) * len(from_)
        checksums = bytearray(8 * len(from_))
        for segment, indexes in self._by_segment(pages):
            part = _pick(pages, indexes)
            done = segment.store(
                part, [from_[i] for i in indexes], threads=threads, deadline_s=deadline_s
            )
            for at, index in enumerate(indexes):
                statuses[index] = done.statuses[at]
                checksums[8 * index : 8 * index + 8] = done.checksums[8 * at : 8 * at + 8]
        return Stored(bytes(statuses), bytes(checksums))

    def check(self, pages: Pages, *, threads: int, deadline_s: float) -> bytes:
        """Hash pages where they lie; one status byte each. See `native.check`."""
        if self._sole is not None:
            return self._sole.check(pages, threads=threads, deadline_s=deadline_s)
        statuses = bytearray([PageStatus.MISS]) * (len(_raw(pages)) // DESCRIPTOR_BYTES)
        for segment, indexes in self._by_segment(pages):
            found = segment.check(_pick(pages, indexes), threads=threads, deadline_s=deadline_s)
            for index, status in zip(indexes, found, strict=True):
                statuses[index] = status
        return bytes(statuses)

    def page_views(self, descriptors: bytes) -> list[memoryview | None]:
        """Read-only views of pages in place; None where a descriptor names none."""
        if self._sole is not None:
            return self._sole.page_views(descriptors)
        views: list[memoryview | None] = []
        for row in _rows(descriptors):
            number, size_bytes = DESCRIPTOR_FORMAT.unpack(row)[:2]
            views += self._segment(number).page_views(row) if size_bytes else [None]
        return views

    def unchanged(self, descriptors: bytes) -> bool:
        """Whether the slots named still hold what they held when the descriptors were made."""
        if self._sole is not None:
            return self._sole.unchanged(descriptors)
        for row in _rows(descriptors):
            number, size_bytes = DESCRIPTOR_FORMAT.unpack(row)[:2]
            if size_bytes and not self._segment(number).unchanged(row):
                return False
        return True

    def _segment(self, number: int) -> SegmentMap:
        if number not in self._segments:
            raise ProtocolError(f"a descriptor names segment {number}, which hello did not")
        return self._segments[number]

    def _by_segment(self, pages: Pages) -> list[tuple[SegmentMap, list[int]]]:
        found: dict[int, list[int]] = {}
        for index, row in enumerate(DESCRIPTOR_FORMAT.iter_unpack(_raw(pages))):
            if row[1]:
                found.setdefault(row[0], []).append(index)
        return [(self._segment(number), indexes) for number, indexes in found.items()]


class HostMaps:
    """The map of the daemon's present run, replaced when a link meets another run."""

    def __init__(self) -> None:
        self._current: HostMap | None = None
        self._lock = threading.Lock()

    def attach(self, session: Session) -> HostMap:
        """The map for `session`, retained for the caller.

        Raises:
            Unavailable: as `HostMap.open`.
        """
        with self._lock:
            current = self._current
            # One mapped for a session that may only read does not serve a writer.
            if (
                current is not None
                and current.incarnation == session.incarnation
                and current.writable >= session.writable
            ):
                return current.retain()
            fresh = HostMap.open(session)
            old, self._current = self._current, fresh.retain()
        if old is not None:
            old.release()
        return fresh

    def close(self) -> None:
        """Let go of the present map. Idempotent."""
        with self._lock:
            old, self._current = self._current, None
        if old is not None:
            old.release()


def _raw(pages: Pages) -> bytes:
    if not isinstance(pages.descriptors, bytes):
        raise ConfigError("descriptors of several segments are given as bytes")
    return pages.descriptors


def _rows(descriptors: bytes) -> list[bytes]:
    starts = range(0, len(descriptors), DESCRIPTOR_BYTES)
    return [descriptors[start : start + DESCRIPTOR_BYTES] for start in starts]


def _pick(pages: Pages, indexes: Sequence[int]) -> Pages:
    keys = memoryview(pages.keys)
    raw, size = _raw(pages), pages.key_bytes
    return Pages(
        b"".join(raw[i * DESCRIPTOR_BYTES : (i + 1) * DESCRIPTOR_BYTES] for i in indexes),
        b"".join(keys[i * size : (i + 1) * size] for i in indexes),
        size,
        pages.namespace_id,
    )
