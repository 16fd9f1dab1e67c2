"""A lease that outlives one call: read, renewed and released by any process of the tenant.

A `Lease` is a handle; the pages are held by the daemon until release or the end of the term. Nobody
renews it unasked, save while a `get` under it runs. Thread-safe.
"""

import struct
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from nexuskv.client.acquiring import Claim
from nexuskv.client.answers import as_statuses, state_of
from nexuskv.client.batches import check_duration, check_memory
from nexuskv.client.matching import (
    Chain,
    check_chains,
    in_host_memory,
    nothing,
    number_chains,
    read_matches,
)
from nexuskv.client.reading import Reader
from nexuskv.client.terms import Term, as_ms, granted_ttl_s
from nexuskv.dataplane.batch import Regions
from nexuskv.errors import ConfigError, ProtocolError, Refused, Unavailable, translating
from nexuskv.key import PageKey
from nexuskv.protocol import INCARNATION_BYTES, REQUEST_ID_BYTES_MAX, AcquireState, Type
from nexuskv.types import Match, MatchAll, PageStatus

if TYPE_CHECKING:
    from nexuskv.client.space import Space
    from nexuskv.client.store import Store

TOKEN_VERSION: Final = 1
_NO_RUN: Final = bytes(INCARNATION_BYTES)  # of a lease that no daemon was asked for
_TOKEN: Final = struct.Struct(f"<BB{INCARNATION_BYTES}sQddd")
_MAY_LOAD: Final = 1  # its gets bring pages into host memory
_HAS_FAR: Final = 2  # some of the chain was not there when it was taken


class Lease:
    """Pages held for a while. Falsy when there is nothing to read, or no daemon.

    Only pages in host memory can be leased at once. Those that are elsewhere are brought there, and
    leased, by `get`; until then they may go, which is a miss.

    Attributes:
        request_id: the caller's name for this lease.
        token_count: tokens that all chains given can serve together, when it was taken.
        matches: one `Match` a chain given; empty for a lease made from a token.
        state: how the last wait for pages ended; None before the first `get`.
    """

    def __init__(
        self,
        store: "Store",
        request_id: bytes,
        term: Term,
        matched: MatchAll,
        *,
        wait_until_s: float,
        load: bool,
        far: bool,
    ) -> None:
        self._store = store
        self._term = term
        self._wait_until_s = wait_until_s
        self._load = load
        self._far = far and load
        self.request_id = request_id
        self.token_count: int = matched.token_count
        self.matches: tuple[Match, ...] = matched.matches
        self.state: AcquireState | None = None

    def __bool__(self) -> bool:
        return self._taken or self._far

    @property
    def _taken(self) -> bool:
        """Whether the daemon holds pages under this lease."""
        return self._term.lease_id != 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def held(self) -> bool:
        """Whether the lease certainly holds now."""
        return self._taken and self._term.held_at(self._store.process.clock.now())

    @property
    def token(self) -> bytes:
        """The lease as bytes, for `Store.lease` in any process of the tenant.

        Times in it are of this machine's monotonic clock; elsewhere only their bounds count.
        """
        left_s = max(0.0, self._wait_until_s - self._store.process.clock.now())
        term = self._term
        head = _TOKEN.pack(
            TOKEN_VERSION,
            _MAY_LOAD * self._load + _HAS_FAR * self._far,
            term.incarnation,
            term.lease_id,
            term.ttl_s,
            self._wait_until_s,
            left_s,
        )
        return head + self.request_id

    def get(
        self, space: "Space", keys: Sequence[PageKey], *, into: Sequence[Regions]
    ) -> list[PageStatus]:
        """Copy pages of a chain under this lease, group by group as they arrive.

        Pages that are not in host memory are loaded, unless the acquire said not to, for at most
        `transfer_timeout_s`; missing ones are waited for as long as `wait_s` of the acquire is not
        over. The lease is kept, and its time begins anew; of pages that came later than at once it
        keeps those of the last group. Once it has ended, all pages are STALE.

        Raises:
            ConfigError: a key of a wrong length, or memory that does not fit the pages.
        """
        process, identity = self._store.process, space.identity
        blob = identity.join(keys)
        check_memory(into, page_count=len(keys), page_bytes=identity.page_bytes, writable=True)
        if not keys:
            return []
        wait_s = max(0.0, self._wait_until_s - process.clock.now())
        reader = Reader(process, identity, blob, into, wait_s=wait_s, load=self._load)
        if self._term.lost:
            return [PageStatus.STALE] * len(keys)
        if not self and not wait_s:
            if self._term.incarnation != _NO_RUN:
                reader.statuses[:] = bytes([PageStatus.MISS]) * len(keys)
            process.counters.got(reader.statuses, identity.page_bytes)
            return as_statuses(reader.statuses)
        return as_statuses(self._read(reader, waits=wait_s > 0))

    def _read(self, reader: Reader, *, waits: bool) -> bytearray:
        if not self._taken and not waits:
            # Nothing is leased, and nobody would end a lease that this call took under the name.
            statuses = reader.read()
            self.state = reader.state
            return statuses
        # Nothing was held when it was taken: the wait takes the lease, under the same request id.
        claim = Claim(self.request_id, self._term.ttl_s, self._term if self._taken else None)
        statuses = reader.read(claim)
        if claim.term is not None:
            self._term = claim.term
        self.state = claim.state
        return statuses

    def renew(self, *, ttl_s: float | None = None) -> bool:
        """Let the lease last `ttl_s` from now (None: as long as before); whether it does.

        Raises:
            ConfigError: `ttl_s` is negative or not finite.
        """
        process = self._store.process
        if ttl_s is not None:
            check_duration("ttl_s", ttl_s)
        if not self._taken or self._term.lost:
            return False
        sent_s = process.clock.now()
        deadline_s = sent_s + process.config.request_timeout_s
        try:
            with process.pool.lend(deadline_s) as link, translating({ConfigError: Refused}):
                if link.incarnation != self._term.incarnation:
                    raise Refused("the lease is of another run of the daemon")
                asked_s = granted_ttl_s(link, self._term.ttl_s if ttl_s is None else ttl_s)
                (granted_ms,) = link.call(
                    Type.RENEW,
                    (self._term.lease_id, as_ms(asked_s)),
                    deadline_s=deadline_s,
                    riders=process.releases.frames_for(link),
                )
        except Refused:
            self._term.lost = True
            return False
        except (Unavailable, ProtocolError):
            return False
        assert isinstance(granted_ms, int)
        self._term.renewed(ttl_s=granted_ms / 1000, sent_s=sent_s)
        return True

    def release(self) -> None:
        """Give the pages back; carried by the next exchange. Idempotent, never raises."""
        if self._term.lost:
            return
        if self._taken:
            self._store.process.releases.release(self._term.incarnation, self._term.lease_id)
        self._far = False
        self._term.lost = self._taken


def acquire(
    store: "Store",
    chains: Sequence[Chain],
    *,
    request_id: bytes,
    ttl_s: float,
    wait_s: float,
    load: bool,
) -> Lease:
    """Take a lease on what is in host memory of the chains; an empty one when there is no daemon.

    Raises:
        ConfigError: a request id of a wrong length, or more pages than one message may name.
    """
    process = store.process
    if not 1 <= len(request_id) <= REQUEST_ID_BYTES_MAX:
        raise ConfigError(f"a request id has 1-{REQUEST_ID_BYTES_MAX} bytes, got {len(request_id)}")
    check_chains(process, chains)
    check_duration("ttl_s", ttl_s)
    check_duration("wait_s", wait_s)
    sent_s = process.clock.now()
    deadline_s = sent_s + process.config.request_timeout_s
    term, matched, far = Term(0, _NO_RUN, ttl_s=ttl_s, sent_s=sent_s), nothing(chains), False
    try:
        with process.pool.lend(deadline_s) as link, translating({ConfigError: Refused}):
            ttl_s = granted_ttl_s(link, ttl_s)
            numbered = number_chains(link, chains, deadline_s=deadline_s)
            sent_s = process.clock.now()
            lease_id, state, tokens, rows, runs = link.call(
                Type.ACQUIRE,
                (numbered, request_id, 0, as_ms(ttl_s), 0, 0),
                deadline_s=deadline_s,
                riders=process.releases.frames_for(link),
                riders_first=True,
            )
            assert isinstance(lease_id, int)
            if state_of(state) is AcquireState.MORE:
                link.broken = True
                raise ProtocolError("an acquire without a wait is to be continued")
            matched = read_matches(process, chains, tokens, rows)
            far = any(match.page_count > match.tier_counts["host"] for match in matched.matches)
            if far and not load:
                matched = in_host_memory(process, chains, matched, runs)
            term = Term(lease_id, link.incarnation, ttl_s=ttl_s, sent_s=sent_s)
    except (Unavailable, Refused, ProtocolError) as exc:
        process.counters.log_once(f"acquire {type(exc).__name__}", f"nothing is leased: {exc}")
    until_s = sent_s + wait_s
    return Lease(store, request_id, term, matched, wait_until_s=until_s, load=load, far=far)


def lease_of(store: "Store", token: bytes) -> Lease:
    """The lease that a token names; whether it still holds shows when it is used.

    Raises:
        ConfigError: the bytes are no token of this version.
    """
    request_id = token[_TOKEN.size :]
    if (
        len(token) <= _TOKEN.size
        or token[0] != TOKEN_VERSION
        or len(request_id) > REQUEST_ID_BYTES_MAX
    ):
        raise ConfigError(f"{len(token)} bytes that are no lease token of version {TOKEN_VERSION}")
    _, flags, incarnation, lease_id, ttl_s, wait_until_s, wait_left_s = _TOKEN.unpack_from(token)
    check_duration("ttl_s", ttl_s)
    check_duration("wait_s", wait_left_s)
    now_s = store.process.clock.now()
    # Uncertain until the first use begins the term anew, so it counts as over.
    term = Term(lease_id, incarnation, ttl_s=ttl_s, sent_s=now_s - ttl_s)
    left_s = max(0.0, min(wait_left_s, wait_until_s - now_s))
    return Lease(
        store,
        request_id,
        term,
        MatchAll(0, ()),
        wait_until_s=now_s + left_s,
        load=bool(flags & _MAY_LOAD),
        far=bool(flags & _HAS_FAR),
    )
