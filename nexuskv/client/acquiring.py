"""One acquire and its groups: what a get, a view and a prefetch have in common.

The first reply names what is in host memory. While the daemon says MORE the link stays with this
acquire: each further reply is asked for in one exchange that carries the pages given back, and
replies that have come by then are taken along, so that a slow reader copies more at a time instead
of falling behind. One `Acquire` is used by one thread.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from nexuskv.client.answers import read_runs, state_of
from nexuskv.client.link import Link
from nexuskv.client.process import ClientProcess
from nexuskv.client.terms import Term, as_ms, granted_ttl_s
from nexuskv.errors import ConfigError, ProtocolError, Refused, translating
from nexuskv.protocol import AcquireState, Type, encode
from nexuskv.types import DESCRIPTOR_FORMAT

LOAD_SHARE: Final = 0.9
"""Of the time a transfer has left: until when the daemon may load. The rest is for its last word
and the last copy, so that a slow disk is not taken for a daemon that is away."""

Run = tuple[int, bytes]
"""First page in the chain, and descriptors from there on."""


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

    @classmethod
    def own(cls, process: ClientProcess) -> "Claim":
        """A lease for one call alone."""
        return cls(process.new_request_id(), process.config.lease_ttl_s, named=False)


class Times(NamedTuple):
    """Until when, on the process's clock."""

    deadline_s: float  # the whole call
    wait_until_s: float = 0.0  # for pages that nobody holds
    load: bool = True  # whether pages that are not in host memory are brought there


class Acquire:
    """An acquire of one chain on one link."""

    def __init__(
        self,
        process: ClientProcess,
        link: Link,
        chain: tuple[int, bytes],
        *,
        key_bytes: int,
        claim: Claim,
        times: Times,
    ) -> None:
        self._process = process
        self._link = link
        self._number, self._keys = chain
        self._key_bytes = key_bytes
        self._claim = claim
        self._times = times
        self._more_until_s = 0.0

    @property
    def term(self) -> Term:
        """The lease's certain time; after `first`."""
        assert self._claim.term is not None
        return self._claim.term

    @property
    def goes_on(self) -> bool:
        """Whether there is more to come."""
        return self._claim.state is AcquireState.MORE

    def first(self) -> list[Run]:
        """Ask; what is in host memory."""
        process, link, claim = self._process, self._link, self._claim
        ttl_s = granted_ttl_s(link, claim.ttl_s)
        sent_s = process.clock.now()
        wait_s, load_s = self._waits(sent_s)
        self._more_until_s = sent_s + max(wait_s, load_s)
        held = claim.term.lease_id if claim.term else 0
        with translating({ConfigError: Refused}):
            body = link.call(
                Type.ACQUIRE,
                (
                    ((self._number, self._keys),),
                    claim.request_id,
                    held,
                    as_ms(ttl_s),
                    int(wait_s * 1000),
                    int(load_s * 1000),
                ),
                deadline_s=self._times.deadline_s,
                riders=process.releases.frames_for(link),
                riders_first=claim.named,
            )
        lease_id = body[0]
        assert isinstance(lease_id, int)
        if claim.term is None:
            claim.term = Term(lease_id, link.incarnation, ttl_s=ttl_s, sent_s=sent_s)
        else:
            claim.term.renewed(ttl_s=ttl_s, sent_s=sent_s)
        return self._taken(body)

    def next(self, back: Sequence[Run]) -> list[Run]:
        """Give the pages of `back` back and receive what comes next, all that has come by then."""
        parts = b"".join([self._present(*run) for run in back])
        riders = []
        if parts:
            page = (self.term.lease_id, self._number, parts)
            riders = [encode(Type.RELEASE, 0, ((), (page,), ()))]
        body = self._link.more(
            Type.ACQUIRE,
            deadline_s=self._times.deadline_s,
            wait_s=max(0.0, self._more_until_s - self._process.clock.now()),
            riders=riders,
        )
        runs = self._taken(body)
        if self.goes_on:
            for later in self._link.arrived(Type.ACQUIRE):
                if not self.goes_on:
                    raise ProtocolError("an acquire goes on after its last reply")
                runs += self._taken(later)
        return runs

    def end(self) -> None:
        """Leave; a link on which further groups would arrive is of no use to anybody else."""
        if self.goes_on:
            self._link.broken = True

    def _waits(self, now_s: float) -> tuple[float, float]:
        """Seconds to wait for pages that nobody holds, and for pages to be loaded."""
        config, limits = self._process.config, self._link.session.limits
        wait_s = min(max(0.0, self._times.wait_until_s - now_s), limits.acquire_wait_max_s)
        if not self._times.load:
            return wait_s, 0.0
        left_s = min(self._times.deadline_s - now_s, config.transfer_timeout_s)
        return wait_s, min(max(0.0, left_s) * LOAD_SHARE, limits.acquire_wait_max_s)

    def _taken(self, body: list[object]) -> list[Run]:
        self._claim.state = state_of(body[1])
        return read_runs(body[4], len(self._keys) // self._key_bytes)

    def _present(self, first: int, descriptors: bytes) -> bytes:
        """The keys of those pages of a run that are there."""
        size, at = self._key_bytes, first * self._key_bytes
        rows = DESCRIPTOR_FORMAT.iter_unpack(descriptors)
        keys = self._keys
        return b"".join(
            [keys[at + i * size : at + (i + 1) * size] for i, row in enumerate(rows) if row[1]]
        )
