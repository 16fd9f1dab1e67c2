"""A get: acquire a lease, copy and check each group of pages as it comes, give the lease back.

One exchange and one native copy, whatever the number of pages (I13); with a wait, one of each more
for every further group. Pages whose lease was not certainly held until their copy ended are stale
(I5), pages that do not match their checksum are reported (I2). One `Reader` is one call of one
thread.
"""

from collections.abc import Sequence
from typing import Final

from nexuskv.client.answers import blaming, read_runs, state_of
from nexuskv.client.batches import pages_per_message, spans
from nexuskv.client.identity import Identity
from nexuskv.client.link import Link
from nexuskv.client.process import ClientProcess
from nexuskv.client.releases import Report
from nexuskv.client.terms import Term, as_ms, granted_ttl_s
from nexuskv.dataplane.batch import Pages, Regions
from nexuskv.errors import (
    ConfigError,
    LeaseExpired,
    ProtocolError,
    Refused,
    Unavailable,
    translating,
)
from nexuskv.protocol import AcquireState, Type, encode
from nexuskv.types import DESCRIPTOR_BYTES, DESCRIPTOR_FORMAT, PageStatus

HIT: Final = int(PageStatus.HIT)
MISS: Final = int(PageStatus.MISS)
CORRUPT: Final = int(PageStatus.CORRUPT)
STALE: Final = int(PageStatus.STALE)
UNAVAILABLE: Final = int(PageStatus.UNAVAILABLE)

_ENDED: Final = bytes.maketrans(bytes([HIT, CORRUPT]), bytes([STALE, STALE]))
_REFUSED: Final = bytes.maketrans(bytes([UNAVAILABLE]), bytes([STALE]))


class Claim:
    """The lease a get reads under: its own, or one that somebody holds already (`term` given)."""

    __slots__ = ("named", "request_id", "state", "term", "ttl_s")

    def __init__(
        self, request_id: bytes, ttl_s: float, term: Term | None = None, *, named: bool = True
    ) -> None:
        self.request_id = request_id
        self.named = named  # by the caller, who may have released a lease of that name just now
        self.ttl_s = ttl_s
        self.term = term
        self.state: AcquireState | None = None  # of the last reply


class Reader:
    """One get: what to read, where to, and what became of each page so far."""

    def __init__(
        self,
        process: ClientProcess,
        identity: Identity,
        keys: bytes,
        into: Sequence[Regions],
        *,
        wait_s: float,
    ) -> None:
        self._process = process
        self._identity = identity
        self._keys = keys
        self._into = into
        wait_s = min(wait_s, process.config.acquire_wait_max_s)
        self._wait_until_s = process.clock.now() + wait_s
        self._deadline_s = self._wait_until_s + process.config.transfer_timeout_s
        self.statuses = bytearray([UNAVAILABLE]) * len(into)

    def read(self, claim: Claim | None = None) -> bytearray:
        """Run the get; one status byte a page. A store fault is a status.

        Args:
            claim: a lease that is held already and stays held; None takes one for this call.

        Raises:
            ConfigError: two items of `into` overlap.
        """
        try:
            self._read(claim)
        except LeaseExpired:
            self.statuses[:] = self.statuses.translate(_REFUSED)
        except (Unavailable, Refused, ProtocolError) as exc:
            topic = f"get {type(exc).__name__} {self._identity.id.hex()}"
            self._process.counters.log_once(topic, f"pages could not be read: {exc}")
        self._process.counters.got(self.statuses, self._identity.page_bytes)
        return self.statuses

    def _read(self, claim: Claim | None) -> None:
        process, identity = self._process, self._identity
        with process.pool.lend(self._deadline_s) as link:
            if claim is not None and claim.term and claim.term.incarnation != link.incarnation:
                raise LeaseExpired("the lease is of another run of the daemon")
            # What a caller could have got wrong was checked: a daemon that objects refuses.
            with translating({ConfigError: Refused}):
                number = link.number_of(identity.id, identity.encoded, deadline_s=self._deadline_s)
            most = pages_per_message(
                link.session.limits,
                key_bytes=identity.key_bytes,
                batch_pages=process.config.client_batch_pages,
            )
            for start, stop in spans(len(self._into), most):
                own = claim is None
                part = claim or Claim(
                    process.new_request_id(), process.config.lease_ttl_s, named=False
                )
                self._read_span(link, number, (start, stop), part, own=own)

    def _read_span(
        self, link: Link, number: int, span: tuple[int, int], claim: Claim, *, own: bool
    ) -> None:
        """One acquire, and everything that comes of it."""
        process = self._process
        body = self._acquire(link, number, span, claim)
        term = claim.term
        assert term is not None
        process.terms.watch(term)
        try:
            self._load_runs(link, body[4], span, term)
            while claim.state is AcquireState.MORE:
                body = self._next_group(link, number, span, body[4], claim)
                self._load_runs(link, body[4], span, term, before=self.statuses)
        finally:
            process.terms.forget(term)
            if claim.state is AcquireState.MORE:
                link.broken = True  # further groups would arrive on it
            if own and term.lease_id:
                process.releases.release(term.incarnation, term.lease_id)

    def _acquire(
        self, link: Link, number: int, span: tuple[int, int], claim: Claim
    ) -> list[object]:
        process = self._process
        size = self._identity.key_bytes
        ttl_s = granted_ttl_s(link, claim.ttl_s)
        sent_s = process.clock.now()
        wait_s = min(max(0.0, self._wait_until_s - sent_s), link.session.limits.acquire_wait_max_s)
        chain = (number, self._keys[span[0] * size : span[1] * size])
        held = claim.term.lease_id if claim.term else 0
        with translating({ConfigError: Refused}):
            body = link.call(
                Type.ACQUIRE,
                ((chain,), claim.request_id, held, as_ms(ttl_s), int(wait_s * 1000), 0),
                deadline_s=self._deadline_s,
                riders=process.releases.frames_for(link),
                riders_first=claim.named,
            )
        lease_id = body[0]
        assert isinstance(lease_id, int)
        if claim.term is None:
            claim.term = Term(lease_id, link.incarnation, ttl_s=ttl_s, sent_s=sent_s)
        else:
            claim.term.renewed(ttl_s=ttl_s, sent_s=sent_s)
        claim.state = state_of(body[1])
        return body

    def _next_group(
        self, link: Link, number: int, span: tuple[int, int], runs: object, claim: Claim
    ) -> list[object]:
        """Receive one more group, having given back the pages of the one before."""
        assert claim.term is not None
        pages = [
            (claim.term.lease_id, number, self._present_keys(span, first, descriptors))
            for first, descriptors in read_runs(runs, span[1] - span[0])
        ]
        body = link.more(
            Type.ACQUIRE,
            deadline_s=self._deadline_s,
            wait_s=max(0.0, self._wait_until_s - self._process.clock.now()),
            riders=[encode(Type.RELEASE, 0, ((), [page for page in pages if page[2]], ()))],
        )
        claim.state = state_of(body[1])
        return body

    def _present_keys(self, span: tuple[int, int], first: int, descriptors: bytes) -> bytes:
        size = self._identity.key_bytes
        at = (span[0] + first) * size
        rows = DESCRIPTOR_FORMAT.iter_unpack(descriptors)
        return b"".join(
            [
                self._keys[at + i * size : at + (i + 1) * size]
                for i, row in enumerate(rows)
                if row[1]
            ]
        )

    def _load_runs(
        self,
        link: Link,
        runs: object,
        span: tuple[int, int],
        term: Term,
        *,
        before: bytearray | None = None,
    ) -> None:
        """Copy what the runs name; a page that one does not name keeps its status in `before`."""
        for first, descriptors in read_runs(runs, span[1] - span[0]):
            start = span[0] + first
            stop = start + len(descriptors) // DESCRIPTOR_BYTES
            # Nothing held is no reason to give the GIL up.
            empty = descriptors.count(0) == len(descriptors)
            missing = bytes([MISS]) * (stop - start)
            found = missing if empty else self._load(link, descriptors, start, stop, term)
            if before is not None and MISS in found:
                pairs = zip(before[start:stop], found, strict=True)
                found = bytes([old if new == MISS else new for old, new in pairs])
            self.statuses[start:stop] = found

    def _load(self, link: Link, descriptors: bytes, start: int, stop: int, term: Term) -> bytes:
        """Copy and check some pages; HIT only while the lease certainly held."""
        process, identity = self._process, self._identity
        if link.host is None:
            raise Unavailable("the pages cannot be reached from here")
        size = identity.key_bytes
        pages = Pages(descriptors, self._keys[start * size : stop * size], size, identity.id)
        whole = start == 0 and stop == len(self._into)
        into = self._into if whole else self._into[start:stop]
        begun_s = process.clock.now()
        with blaming(descriptors, identity.page_bytes):
            found = link.host.load(
                pages, into, threads=process.config.copy_threads, deadline_s=self._deadline_s
            )
        ended_s = process.clock.now()
        if not term.held_at(ended_s):
            return found.translate(_ENDED)
        process.counters.copied(found.count(HIT) * identity.page_bytes, ended_s - begun_s)
        if CORRUPT in found:
            self._report(link.incarnation, pages, found)
        return found

    def _report(self, incarnation: bytes, pages: Pages, found: bytes) -> None:
        report_corrupt(self._process, self._identity, incarnation, pages, found)


def report_corrupt(
    process: ClientProcess, identity: Identity, incarnation: bytes, pages: Pages, found: bytes
) -> None:
    """Have pages that did not match re-checked and dropped; log the namespace's first one."""
    keys = memoryview(pages.keys)
    size = identity.key_bytes
    for index, row in enumerate(DESCRIPTOR_FORMAT.iter_unpack(memoryview(pages.descriptors))):
        if found[index] == CORRUPT:
            key = bytes(keys[index * size : (index + 1) * size])
            report = Report(identity.id, identity.encoded, key, row[3], row[4])
            process.releases.report(incarnation, report)
            process.counters.log_once(
                f"corrupt {identity.id.hex()}",
                f"page {key.hex()} of {identity.record.model!r} does not match its checksum; "
                "it counts as a miss and was reported, further ones only count",
            )
