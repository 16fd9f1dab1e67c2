"""A store as a process sees it: `connect`, namespaces, joint matches, leases, questions.

Calls that engines make never raise for a store fault; questions that people ask (`ping`, `stats`,
`inspect`, and pin, remove, clear of a `Space`) do, because they must be told. Thread-safe; after a
fork the child connects anew.
"""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

from nexuskv.client.answers import as_statuses
from nexuskv.client.batches import pages_per_message, spans
from nexuskv.client.carriers import check_url
from nexuskv.client.identity import Identity
from nexuskv.client.lease import Lease, acquire, lease_of
from nexuskv.client.matching import match_all
from nexuskv.client.process import ClientProcess
from nexuskv.client.space import Space
from nexuskv.clock import Clock, MonotonicClock
from nexuskv.config import Config, default_url, load_config
from nexuskv.errors import ProtocolError
from nexuskv.key import PageKey
from nexuskv.namespace import NamespaceRecord
from nexuskv.protocol import Type
from nexuskv.types import Kind, MatchAll, PageStatus

if TYPE_CHECKING:
    from nexuskv.client.follower import Follower


class RecordFields(TypedDict, total=False):
    """The optional fields of a namespace record, as keywords. See `NamespaceRecord`."""

    tenant: str
    weights_revision: str
    quantization: str
    scales: str
    layer_first: int
    layer_count: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    layout: str
    interface: str
    key_scheme: str
    key_seed: str
    key_bytes: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dcp_rank: int
    dcp_size: int
    group_index: int
    kind: Kind
    window_pages: int
    lora: str
    extra: tuple[tuple[str, str], ...]


def connect(url: str | None = None, config: Config | None = None) -> "Store":
    """Open a store. Tries to reach the daemon once and returns in any case.

    Args:
        url: `unix:///path` or `tcp://host:port`; None takes `config.url`, or the local instance
            `config.name`.
        config: None reads `NEXUSKV_*` variables.

    Returns:
        A context manager. While no daemon answers all pages miss, and it reconnects by itself.

    Raises:
        ConfigError: a malformed address or configuration.
    """
    config = load_config().config if config is None else config
    store = Store(check_url(url or config.url or default_url(config)), config)
    store.process.try_connect()
    return store


class Store:
    """One daemon, from any number of threads of one process and its forks."""

    def __init__(self, url: str, config: Config, *, clock: Clock | None = None) -> None:
        """Prepare; nothing is opened before the first call. Use `connect`."""
        self.url = url
        self.config = config
        self._clock = clock or MonotonicClock()
        self._closed = False
        self._pid = os.getpid()
        self._processes = {self._pid: ClientProcess(url, config, self._clock)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A child that never used the store has nothing to close.
        if not getattr(self, "_closed", True) and self._pid == os.getpid():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=1)

    def __repr__(self) -> str:
        return f"<nexuskv store {self.url}>"

    @property
    def process(self) -> ClientProcess:
        """This process's part; made anew in a forked child."""
        pid = os.getpid()
        if pid == self._pid:
            return self._processes[pid]
        return self._after_fork(pid)

    @property
    def connected(self) -> bool:
        """Whether the daemon answered when it was last asked."""
        return self.process.health.up and not self._closed

    @property
    def counters(self) -> Mapping[str, int]:
        """Totals of this process: pages by outcome, bytes, reconnects; a copy."""
        return self.process.counters.snapshot()

    def close(self) -> None:
        """Give everything back. Idempotent; later calls miss. Bounded by two timeouts."""
        if not self._closed:
            self._closed = True
            self.process.close()

    def namespace(
        self,
        *,
        model: str,
        dtype: str,
        page_tokens: int,
        page_bytes: int,
        **other_record_fields: Unpack[RecordFields],
    ) -> Space:
        """A namespace, from everything that its pages depend on. Needs no daemon.

        Raises:
            ConfigError: a field is out of bounds. What only the daemon knows, such as the largest
            page,
                is found at the first put.
        """
        fields: RecordFields = {"tenant": self.config.tenant, **other_record_fields}
        record = NamespaceRecord(
            model=model, dtype=dtype, page_tokens=page_tokens, page_bytes=page_bytes, **fields
        )
        return Space(self, record)

    def open(self, record: NamespaceRecord) -> Space:
        """The namespace of a whole record."""
        return Space(self, record)

    def match_all(self, chains: Sequence[tuple[Space, Sequence[PageKey]]]) -> MatchAll:
        """The joint hit of several chains, in tokens that every one of them can serve.

        Raises:
            ConfigError: a key of a wrong length, or more pages than one message may name.
        """
        return match_all(self.process, _joined(chains))

    def acquire(
        self,
        chains: Sequence[tuple[Space, Sequence[PageKey]]],
        *,
        request_id: bytes,
        ttl_s: float,
        wait_s: float = 0.0,
        load: bool = True,
    ) -> Lease:
        """Lease every page of the chains that is in host memory. Asks once, and loads nothing yet.

        A store fault is an empty lease.

        Args:
            chains: namespaces and their keys in prefix order.
            request_id: 1-64 bytes; the same id of the same tenant is the same lease.
            ttl_s: how long from now; the daemon's `lease_ttl_max_s` bounds it.
            wait_s: until when `Lease.get`, here or elsewhere, waits for pages that are missing.
            load: whether `Lease.get` has pages brought into host memory that are held elsewhere;
                they count in `Lease.matches`. False counts, and reads, those in host memory alone.

        Raises:
            ConfigError: a key or request id of a wrong length, or too many pages for one message.
        """
        joined = _joined(chains)
        return acquire(self, joined, request_id=request_id, ttl_s=ttl_s, wait_s=wait_s, load=load)

    def lease(self, token: bytes) -> Lease:
        """The lease that another process's `Lease.token` names.

        Raises:
            ConfigError: no token of this version.
        """
        return lease_of(self, token)

    def ping(self, payload: bytes = b"") -> float:
        """Seconds that an echo of `payload` takes.

        Raises:
            Unavailable: the daemon is away.
        """
        process = self.process
        deadline_s = process.clock.now() + self.config.request_timeout_s
        with process.pool.lend(deadline_s) as link:
            begun_s = process.clock.now()
            (echo,) = link.call(Type.PING, (payload,), deadline_s=deadline_s)
            if echo != payload:
                raise ProtocolError("the daemon echoes other bytes")
            return process.clock.now() - begun_s

    def stats(self) -> dict[str, object]:
        """The daemon's figures. Raises Unavailable when it is away."""
        (stats,) = self._ask(Type.STATS, ())
        assert isinstance(stats, dict)
        return stats

    def inspect(self, what: str, namespace_id: bytes = b"") -> Iterator[list[object]]:
        """Rows of `namespaces`, `pages` (of one namespace), `sessions`, `leases` or `chunks`.

        Raises:
            Unavailable: the daemon is away; also between pages of rows.
            ConfigError: no such table.
        """
        cursor = b""
        while True:
            rows, cursor, _, _ = self.inspect_page(what, namespace_id, cursor)
            yield from rows
            if not cursor:
                return

    def inspect_page(
        self, what: str, namespace_id: bytes, cursor: bytes
    ) -> tuple[list[list[object]], bytes, bytes, int]:
        """Rows from `cursor` on, the next cursor, and the daemon's run and event sequence then."""
        body = (what, namespace_id, cursor, self.config.inspect_rows_max)
        rows, after, incarnation, sequence = self._ask(Type.INSPECT, body)
        assert isinstance(rows, list)
        assert isinstance(after, bytes)
        assert isinstance(incarnation, bytes)
        assert isinstance(sequence, int)
        return rows, after, incarnation, sequence

    def verify(self, namespace_id: bytes, keys: bytes, *, tier: str) -> list[PageStatus]:
        """Have pages read and checked where they lie; bad ones have left that tier then.

        Args:
            namespace_id: whose pages.
            keys: joined, at most `verify_pages_max` of them.
            tier: `host` or `ssd`.

        Returns:
            HIT (good), CORRUPT, MISS (not in that tier) or UNAVAILABLE (cannot be read), one a key.

        Raises:
            Unavailable: the daemon is away, or did not answer within `transfer_timeout_s`.
            NexusError: the daemon refuses, such as more verifies at a time than it bears.
        """
        timeout_s = self.config.transfer_timeout_s
        (statuses,) = self._ask(Type.VERIFY, (namespace_id, keys, tier), timeout_s=timeout_s)
        assert isinstance(statuses, bytes)
        if statuses.translate(None, bytes(PageStatus)):
            raise ProtocolError(f"verify answers {statuses!r:.80}")
        return as_statuses(statuses)

    def subscribe(self) -> tuple[str, bytes, int]:
        """Address of the events (empty: there are none), the daemon's run, the last sequence."""
        address, incarnation, sequence = self._ask(Type.SUBSCRIBE, ())
        assert isinstance(address, str)
        assert isinstance(incarnation, bytes)
        assert isinstance(sequence, int)
        return address, incarnation, sequence

    def follow(self) -> "Follower":
        """A follower of the daemon's events; see `Follower`."""
        from nexuskv.client.follower import Follower

        return Follower(self)

    def ask_about(self, identity: Identity, kind: Type, rest: Sequence[object]) -> list[object]:
        """One request about a namespace. Raises what the daemon answers."""
        process = self.process
        deadline_s = process.clock.now() + self.config.request_timeout_s
        with process.pool.lend(deadline_s) as link:
            number = link.number_of(identity.id, identity.encoded, deadline_s=deadline_s)
            riders = process.releases.frames_for(link)
            return link.call(kind, (number, *rest), deadline_s=deadline_s, riders=riders)

    def count_pages(self, identity: Identity, kind: Type, keys: bytes, rest: Sequence[int]) -> int:
        """The sum of a request's counts over all parts of a long list of keys."""
        total = 0
        for start, stop in self._spans(identity, keys):
            (count,) = self.ask_about(identity, kind, (keys[start:stop], *rest))
            assert isinstance(count, int)
            total += count
        return total

    def _ask(
        self, kind: Type, body: Sequence[object], *, timeout_s: float | None = None
    ) -> list[object]:
        process = self.process
        timeout_s = self.config.request_timeout_s if timeout_s is None else timeout_s
        deadline_s = process.clock.now() + timeout_s
        with process.pool.lend(deadline_s) as link:
            return link.call(kind, body, deadline_s=deadline_s, timeout_s=timeout_s)

    def _spans(self, identity: Identity, keys: bytes) -> Iterator[tuple[int, int]]:
        """Byte ranges of `keys` that a message each can name."""
        limits, size = self.process.limits, identity.key_bytes
        most = pages_per_message(limits, key_bytes=size, batch_pages=self.config.client_batch_pages)
        return spans(len(keys), most * size)

    def _after_fork(self, pid: int) -> ClientProcess:
        # One dict operation decides between threads; a lock could be held by a thread that the fork
        # left behind. A part that loses this race has opened nothing.
        process = self._processes.setdefault(pid, ClientProcess(self.url, self.config, self._clock))
        if self._pid != pid:
            inherited, self._pid = self._processes[self._pid], pid
            inherited.drop()
        return process


def _joined(
    chains: Sequence[tuple[Space, Sequence[PageKey]]],
) -> list[tuple[Identity, bytes]]:
    return [(space.identity, space.identity.join(keys)) for space, keys in chains]
