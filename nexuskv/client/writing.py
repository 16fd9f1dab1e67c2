"""A put: reserve slots for the missing pages, hash and copy them in, commit them in order.

Two exchanges and one native copy for as many pages as a session may reserve at a time (I13). A page
that cannot be stored cuts its chain: what follows it is dropped, since nobody could match it. One
`Writer` is one call of one thread.
"""

from collections.abc import Sequence
from typing import Final

from nexuskv import UNKNOWN
from nexuskv.client.answers import blaming
from nexuskv.client.batches import pages_per_message, spans
from nexuskv.client.identity import Identity
from nexuskv.client.link import Link
from nexuskv.client.process import ClientProcess
from nexuskv.dataplane.batch import Pages, Regions
from nexuskv.errors import (
    ConfigError,
    EpochChanged,
    NexusError,
    OutOfSpace,
    ProtocolError,
    Refused,
    Unavailable,
)
from nexuskv.protocol import ALL_RESERVATIONS, ParentState, Type
from nexuskv.types import DESCRIPTOR_BYTES, PAGE_ALIGN_BYTES, PageStatus

STORED: Final = int(PageStatus.STORED)
EXISTS: Final = int(PageStatus.EXISTS)
MISS: Final = int(PageStatus.MISS)
NO_SPACE: Final = int(PageStatus.NO_SPACE)
UNAVAILABLE: Final = int(PageStatus.UNAVAILABLE)
DROPPED: Final = int(PageStatus.DROPPED)
STATUS_COUNT: Final = len(PageStatus)

_EVERY: Final = bytes(range(256))
_KNOWN: Final = bytes(range(STATUS_COUNT))


def _table(*, keep: Sequence[int], other: int) -> bytes:
    return bytes([value if value in keep else other for value in _EVERY])


_IS_DONE: Final = bytes([int(value == STORED) for value in _EVERY])
_IS_FAILED: Final = bytes([int(value not in (STORED, EXISTS, MISS)) for value in _EVERY])
_AFTER_FAILURE: Final = _table(keep=(EXISTS,), other=DROPPED)
_NOT_LENT: Final = bytes([NO_SPACE if value == MISS else value for value in _EVERY])
_UNSURE: Final = bytes([UNAVAILABLE if value == STORED else value for value in _EVERY])
_CLEARED: Final = bytes([DROPPED if value == STORED else value for value in _EVERY])


def check_parent(parent: object, identity: Identity) -> tuple[ParentState, bytes]:
    """What a put's first page hangs under, as the wire says it.

    Raises:
        ConfigError: neither None, `nexuskv.UNKNOWN` nor a key of the namespace's length.
    """
    if parent is None:
        return ParentState.ROOT, b""
    if parent is UNKNOWN:
        return ParentState.UNKNOWN, b""
    if not isinstance(parent, bytes):
        raise ConfigError(f"parent is a key, None or nexuskv.UNKNOWN, not {parent!r:.80}")
    return ParentState.KEY, identity.join([parent])


class Writer:
    """One put: what to store, and what became of each page so far."""

    def __init__(
        self,
        process: ClientProcess,
        identity: Identity,
        keys: bytes,
        from_: Sequence[Regions],
        *,
        parent: tuple[ParentState, bytes],
    ) -> None:
        self._process = process
        self._identity = identity
        self._keys = keys
        self._from = from_
        self._parent = parent
        self._deadline_s = process.clock.now() + process.config.transfer_timeout_s
        self.statuses = bytearray([UNAVAILABLE]) * len(from_)

    def write(self) -> bytearray:
        """Run the put; one status byte a page. A store fault is a status.

        Raises:
            ConfigError: the daemon cannot hold such pages at all: its message names the limit.
        """
        try:
            self._write()
        except (Unavailable, Refused, ProtocolError) as exc:
            topic = f"put {type(exc).__name__} {self._identity.id.hex()}"
            self._process.counters.log_once(topic, f"pages could not be stored: {exc}")
        self._process.counters.put(self.statuses, self._identity.page_bytes)
        return self.statuses

    def _write(self) -> None:
        process, identity = self._process, self._identity
        with process.pool.lend(self._deadline_s) as link:
            number = link.number_of(identity.id, identity.encoded, deadline_s=self._deadline_s)
            for start, stop in spans(len(self._from), self._pages_at_once(link)):
                part = self._write_span(link, number, start, stop)
                self.statuses[start:stop] = part
                if identity.chained and any(part.translate(_IS_FAILED)):
                    self.statuses[stop:] = bytes([DROPPED]) * (len(self.statuses) - stop)
                    return

    def _pages_at_once(self, link: Link) -> int:
        identity, limits = self._identity, link.session.limits
        slot_bytes = -(-identity.page_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
        by_message = pages_per_message(
            limits,
            key_bytes=identity.key_bytes,
            batch_pages=self._process.config.client_batch_pages,
        )
        return max(1, min(by_message, limits.reserved_bytes_max // slot_bytes))

    def _write_span(self, link: Link, number: int, start: int, stop: int) -> bytes:
        """Reserve, copy, commit; the statuses. What is known before a failure is noted."""
        size = self._identity.key_bytes
        keys = self._keys[start * size : stop * size]
        try:
            reservation, statuses, descriptors = self._reserve(link, number, keys)
        except OutOfSpace as exc:
            self._process.counters.log_once("no space", f"pages are not stored: {exc}")
            statuses, reservation, descriptors = bytes([MISS]) * (stop - start), 0, b""
        if not reservation:
            return self._cut(statuses.translate(_NOT_LENT))
        statuses, descriptors = self._cut_lent(statuses, descriptors)
        told = False
        try:
            if MISS not in statuses:
                return statuses
            statuses, checksums = self._store(link, keys, start, stop, statuses, descriptors)
            self.statuses[start:stop] = statuses.translate(_UNSURE)
            told = True
            return self._commit(link, start, reservation, statuses, checksums)
        finally:
            if not told:
                self._abort(link, reservation)

    def _reserve(self, link: Link, number: int, keys: bytes) -> tuple[int, bytes, bytes]:
        try:
            reservation, statuses, descriptors = link.call(
                Type.RESERVE,
                (number, keys),
                deadline_s=self._deadline_s,
                riders=self._process.releases.frames_for(link),
            )
        finally:
            if link.broken:
                # The daemon may lend slots yet. Nothing of ours will write there, and untold it
                # would keep them for as long as this process lives.
                link.tell(Type.ABORT, (ALL_RESERVATIONS,))
        assert isinstance(reservation, int)
        assert isinstance(statuses, bytes)
        assert isinstance(descriptors, bytes)
        count = len(keys) // self._identity.key_bytes
        if len(statuses) != count or statuses.translate(None, _KNOWN):
            raise ProtocolError(f"reserve answers {statuses!r:.80} for {count} keys")
        if reservation and len(descriptors) != count * DESCRIPTOR_BYTES:
            raise ProtocolError(f"reserve answers {len(descriptors)} bytes for {count} descriptors")
        return reservation, statuses, descriptors

    def _cut(self, statuses: bytes) -> bytes:
        """Drop what follows a failed page of a chain."""
        failed_at = statuses.translate(_IS_FAILED).find(1) if self._identity.chained else -1
        if failed_at < 0:
            return statuses
        return statuses[: failed_at + 1] + statuses[failed_at + 1 :].translate(_AFTER_FAILURE)

    def _cut_lent(self, statuses: bytes, descriptors: bytes) -> tuple[bytes, bytes]:
        """The same, keeping the copy away from slots that were lent for pages now dropped."""
        cut = self._cut(statuses)
        if cut == statuses:
            return statuses, descriptors
        kept = cut.translate(_IS_FAILED).find(1) * DESCRIPTOR_BYTES
        return cut, descriptors[:kept] + bytes(len(descriptors) - kept)

    def _store(
        self,
        link: Link,
        keys: bytes,
        start: int,
        stop: int,
        statuses: bytes,
        descriptors: bytes,
    ) -> tuple[bytes, bytes]:
        """Copy the missing pages into their slots; all statuses, and checksums."""
        identity, process = self._identity, self._process
        if link.host is None:
            raise Unavailable("the pages' memory cannot be reached from here")
        pages = Pages(descriptors, keys, identity.key_bytes, identity.id)
        with blaming(descriptors, identity.page_bytes):
            stored = link.host.store(
                pages,
                self._from[start:stop],
                threads=process.config.copy_threads,
                deadline_s=self._deadline_s,
            )
        after = stored.statuses
        if MISS in after:
            # Places without a slot: held pages, failed ones, and ones the daemon forgot to lend.
            rest = statuses.translate(_NOT_LENT)
            after = bytes([r if a == MISS else a for a, r in zip(after, rest, strict=True)])
        # A copy that ended at the deadline leaves a hole too: what follows is not committed.
        return self._cut(after), stored.checksums

    def _commit(
        self, link: Link, start: int, reservation: int, statuses: bytes, checksums: bytes
    ) -> bytes:
        state, parent = self._parent_at(start)
        done = statuses.translate(_IS_DONE)
        try:
            (answer,) = link.call(
                Type.COMMIT,
                (reservation, int(state), parent, done, checksums),
                deadline_s=self._deadline_s,
            )
        except EpochChanged:
            return statuses.translate(_CLEARED)
        except Unavailable:
            # The daemon may or may not have published; only the session's end settles the slots.
            link.broken = True
            raise
        assert isinstance(answer, bytes)
        if len(answer) != len(statuses) or answer.translate(None, _KNOWN):
            raise ProtocolError(f"commit answers {answer!r:.80} for {len(statuses)} keys")
        if 0 not in done:
            return answer
        return bytes([a if d else s for a, d, s in zip(answer, done, statuses, strict=True)])

    def _parent_at(self, start: int) -> tuple[ParentState, bytes]:
        if start == 0:
            return self._parent
        size = self._identity.key_bytes
        return ParentState.KEY, self._keys[(start - 1) * size : start * size]

    def _abort(self, link: Link, reservation: int) -> None:
        """Say that nothing writes any more; unsaid, the slots wait for this process's end."""
        if link.broken:
            return
        try:
            link.call(Type.ABORT, (reservation,), deadline_s=self._deadline_s)
        except NexusError as exc:
            self._process.counters.log_once("abort", f"a reservation could not be aborted: {exc}")
