"""A get: acquire a lease, copy and check each group of pages as it comes, give the lease back.

One exchange and one native copy, whatever the number of pages (I13), while they are in host memory;
where some are waited for or loaded, one of each more for all groups that have come meanwhile. Pages
whose lease was not certainly held until their copy ended are stale (I5), pages that do not match
their checksum are reported (I2). One `Reader` is one call of one thread.
"""

from collections.abc import Sequence
from typing import Final

from nexuskv.client.acquiring import Acquire, Claim, Run, Times
from nexuskv.client.answers import blaming
from nexuskv.client.batches import pages_per_message, spans
from nexuskv.client.identity import Identity
from nexuskv.client.link import Link
from nexuskv.client.process import ClientProcess
from nexuskv.client.releases import Report
from nexuskv.client.terms import Term
from nexuskv.dataplane.batch import Pages, Regions
from nexuskv.errors import (
    ConfigError,
    LeaseExpired,
    ProtocolError,
    Refused,
    Unavailable,
    translating,
)
from nexuskv.protocol import AcquireState
from nexuskv.types import DESCRIPTOR_BYTES, DESCRIPTOR_FORMAT, PageStatus

HIT: Final = int(PageStatus.HIT)
MISS: Final = int(PageStatus.MISS)
CORRUPT: Final = int(PageStatus.CORRUPT)
STALE: Final = int(PageStatus.STALE)
UNAVAILABLE: Final = int(PageStatus.UNAVAILABLE)

_ENDED: Final = bytes.maketrans(bytes([HIT, CORRUPT]), bytes([STALE, STALE]))
_REFUSED: Final = bytes.maketrans(bytes([UNAVAILABLE]), bytes([STALE]))


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
        load: bool,
    ) -> None:
        self._process = process
        self._identity = identity
        self._keys = keys
        self._into = into
        wait_until_s = process.clock.now() + min(wait_s, process.config.acquire_wait_max_s)
        self._deadline_s = wait_until_s + process.config.transfer_timeout_s
        self._times = Times(self._deadline_s, wait_until_s, load)
        self.statuses = bytearray([UNAVAILABLE]) * len(into)
        self.state: AcquireState | None = None  # how the last acquire ended

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
                part = claim or Claim.own(process)
                self._read_span(link, number, (start, stop), part, own=claim is None)
                self.state = part.state

    def _read_span(
        self, link: Link, number: int, span: tuple[int, int], claim: Claim, *, own: bool
    ) -> None:
        """One acquire, and everything that comes of it.

        Pages that came later are given back once they are copied, and if the lease is this call's
        own those that were there at once are too: what is loaded needs their room.
        """
        process, size = self._process, self._identity.key_bytes
        acquire = Acquire(
            process,
            link,
            (number, self._keys[span[0] * size : span[1] * size]),
            key_bytes=size,
            claim=claim,
            times=self._times,
        )
        runs = acquire.first()
        process.terms.watch(acquire.term)
        try:
            for run in runs:
                self._load_run(link, run, span[0], acquire.term)
            back = runs if own else []
            while acquire.goes_on:
                back = acquire.next(back)
                self._load_later(link, back, span[0], acquire.term)
        finally:
            process.terms.forget(acquire.term)
            acquire.end()
            if own and acquire.term.lease_id:
                process.releases.release(acquire.term.incarnation, acquire.term.lease_id)

    def _load_run(self, link: Link, run: Run, base: int, term: Term) -> None:
        """Copy what one run of a first reply names."""
        first, descriptors = run
        start = base + first
        stop = start + len(descriptors) // DESCRIPTOR_BYTES
        # Nothing there is no reason to give the GIL up.
        if descriptors.count(0) == len(descriptors):
            self.statuses[start:stop] = bytes([MISS]) * (stop - start)
            return
        size = self._identity.key_bytes
        whole = start == 0 and stop == len(self._into)
        into = self._into if whole else self._into[start:stop]
        keys = self._keys[start * size : stop * size]
        self.statuses[start:stop] = self._load(link, descriptors, keys, into, term)

    def _load_later(self, link: Link, runs: Sequence[Run], base: int, term: Term) -> None:
        """Copy what further replies name, all in one call."""
        size = self._identity.key_bytes
        rows = [
            (base + first + at, descriptors[at * DESCRIPTOR_BYTES : (at + 1) * DESCRIPTOR_BYTES])
            for first, descriptors in runs
            for at in range(len(descriptors) // DESCRIPTOR_BYTES)
        ]
        # A page that is not there keeps the status it has.
        rows = [row for row in rows if row[1].count(0) != DESCRIPTOR_BYTES]
        if not rows:
            return
        found = self._load(
            link,
            b"".join([row for _, row in rows]),
            b"".join([self._keys[at * size : (at + 1) * size] for at, _ in rows]),
            [self._into[at] for at, _ in rows],
            term,
        )
        for (at, _), status in zip(rows, found, strict=True):
            self.statuses[at] = status

    def _load(
        self, link: Link, descriptors: bytes, keys: bytes, into: Sequence[Regions], term: Term
    ) -> bytes:
        """Copy and check some pages; HIT only while the lease certainly held."""
        process, identity = self._process, self._identity
        if link.host is None:
            raise Unavailable("the pages cannot be reached from here")
        pages = Pages(descriptors, keys, identity.key_bytes, identity.id)
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
            report_corrupt(process, identity, link.incarnation, pages, found)
        return found


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
