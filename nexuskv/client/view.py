"""Pages in place: read-only views of the daemon's memory under a lease that is renewed while open.

A view shows memory that the daemon gives to somebody else once the lease is lost, so what was read
counts only if `held` is true at the end. Unhashed unless asked. One view is used by one thread at a
time.
"""

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from nexuskv.client.acquiring import Acquire, Claim, Run, Times
from nexuskv.client.batches import pages_per_message, spans
from nexuskv.client.hostmap import HostMap
from nexuskv.client.identity import Identity
from nexuskv.client.link import Link
from nexuskv.client.process import ClientProcess
from nexuskv.client.reading import CORRUPT, HIT, report_corrupt
from nexuskv.client.terms import Term
from nexuskv.dataplane.batch import Pages
from nexuskv.errors import (
    ConfigError,
    NexusError,
    ProtocolError,
    Refused,
    Unavailable,
    translating,
)
from nexuskv.types import DESCRIPTOR_BYTES, DESCRIPTOR_FORMAT


class View:
    """Read-only memory of some pages; None for those that are not in host memory.

    A context manager: entering takes the lease, leaving gives it back, after which the views raise
    ValueError when touched, unless something else still uses their buffer. `held` says whether
    every page stayed as it was the whole time, while open and after the end.
    """

    def __init__(
        self,
        process: ClientProcess,
        identity: Identity,
        keys: bytes,
        *,
        check: bool,
        load: bool,
    ) -> None:
        self._process = process
        self._identity = identity
        self._keys = keys
        self._check = check
        self._load = load
        self._terms: list[Term] = []  # one a message
        self._host: HostMap | None = None
        self._descriptors: list[bytes] = []
        self._held = False
        self._open = False
        self.pages: list[memoryview | None] = [None] * (len(keys) // identity.key_bytes)

    def __enter__(self) -> Self:
        process = self._process
        if process.open_views >= process.config.views_max:
            process.counters.log_once("views", f"{process.open_views} views are open (views_max)")
            return self
        process.open_views += 1
        self._open = True
        opened = False
        try:
            self._fill()
            opened = True
        except (Unavailable, Refused, ProtocolError) as exc:
            process.counters.log_once(f"view {type(exc).__name__}", f"nothing to view: {exc}")
        finally:
            if not opened:
                self.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def held(self) -> bool:
        """Whether all pages have been held since the view was opened (until it was closed)."""
        return self._still_held() if self._open else self._held

    def close(self) -> None:
        """Judge `held`, take the views back, release the lease. Idempotent."""
        if not self._open:
            return
        self._held = self._still_held()
        self._open = False
        self._process.open_views -= 1
        for page in self.pages:
            if page is not None:
                # Memory that somebody still exports stays readable; it counts for nothing any more.
                with suppress(BufferError):
                    page.release()
        for term in self._terms:
            self._process.terms.forget(term)
            self._process.releases.release(term.incarnation, term.lease_id)
        host, self._host = self._host, None
        if host is not None:
            host.release()

    def _still_held(self) -> bool:
        host = self._host
        if host is None:
            return False
        try:
            # Generations before the deadline: what they prove must lie within the lease.
            same = all(map(host.unchanged, self._descriptors))
        except NexusError:
            return False
        now_s = self._process.clock.now()
        return same and all(term.held_at(now_s) for term in self._terms)

    def _fill(self) -> None:
        process, identity = self._process, self._identity
        times = Times(process.clock.now() + process.config.transfer_timeout_s, load=self._load)
        with process.pool.lend(times.deadline_s) as link, translating({ConfigError: Refused}):
            if link.host is None:
                raise Unavailable("the pages cannot be reached from here")
            self._host = link.host.retain()
            number = link.number_of(identity.id, identity.encoded, deadline_s=times.deadline_s)
            most = pages_per_message(
                link.session.limits,
                key_bytes=identity.key_bytes,
                batch_pages=process.config.client_batch_pages,
            )
            for span in spans(len(self.pages), most):
                self._fill_span(link, number, span, times)

    def _fill_span(self, link: Link, number: int, span: tuple[int, int], times: Times) -> None:
        process, size = self._process, self._identity.key_bytes
        acquire = Acquire(
            process,
            link,
            (number, self._keys[span[0] * size : span[1] * size]),
            key_bytes=size,
            claim=Claim.own(process),
            times=times,
        )
        runs = acquire.first()
        if not acquire.term.lease_id:
            acquire.end()
            return  # nothing of it is held
        self._terms.append(acquire.term)
        process.terms.watch(acquire.term)
        # Nothing is given back, so the daemon stops when its window is full: do not wait for that.
        config = process.config
        room_bytes = config.acquire_window_bytes - config.acquire_group_bytes
        try:
            self._show_runs(span[0], runs, acquire.term, times.deadline_s)
            while acquire.goes_on and room_bytes > 0:
                runs = acquire.next(())
                shown = self._show_runs(span[0], runs, acquire.term, times.deadline_s)
                room_bytes -= shown * self._identity.page_bytes
        finally:
            acquire.end()

    def _show_runs(self, base: int, runs: Sequence[Run], term: Term, deadline_s: float) -> int:
        """Show what is there of some runs; the number of pages."""
        before = self.pages.count(None)
        for first, descriptors in runs:
            self._show(base + first, descriptors, term, deadline_s)
        return before - self.pages.count(None)

    def _show(self, start: int, descriptors: bytes, term: Term, deadline_s: float) -> None:
        assert self._host is not None
        for row in DESCRIPTOR_FORMAT.iter_unpack(descriptors):
            if row[1] not in (0, self._identity.page_bytes):
                raise ProtocolError(
                    f"a page of {row[1]} bytes where pages have {self._identity.page_bytes}"
                )
        views = self._host.page_views(descriptors)
        if self._check:
            found = self._hashed(start, descriptors, term, deadline_s)
            views = [v if f == HIT else None for v, f in zip(views, found, strict=True)]
        self._descriptors.append(descriptors)
        for at, view in enumerate(views, start):
            if view is not None:
                self.pages[at] = view

    def _hashed(self, start: int, descriptors: bytes, term: Term, deadline_s: float) -> bytes:
        assert self._host is not None
        size = self._identity.key_bytes
        count = len(descriptors) // DESCRIPTOR_BYTES
        keys = self._keys[start * size : (start + count) * size]
        pages = Pages(descriptors, keys, size, self._identity.id)
        found = self._host.check(
            pages, threads=self._process.config.copy_threads, deadline_s=deadline_s
        )
        if CORRUPT in found and term.held_at(self._process.clock.now()):
            report_corrupt(self._process, self._identity, term.incarnation, pages, found)
        return found


def check_page_count(keys: Sequence[bytes], *, pages_max: int) -> None:
    """Check the number of pages of one view.

    Raises:
        ConfigError: more than `pages_max`.
    """
    if len(keys) > pages_max:
        raise ConfigError(f"a view of {len(keys)} pages, at most {pages_max}")
