"""match, acquire, renew and release: the way of a get."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.copying import Copying
from nexuskv.control.counters import Counters
from nexuskv.control.joint import Held, joint_tokens, leading, pages_needed
from nexuskv.control.namespaces import Namespace
from nexuskv.control.pages import Pages, as_slots
from nexuskv.control.peer import Peer
from nexuskv.control.recheck import Recheck
from nexuskv.control.sessions import Session
from nexuskv.control.waiter import Waiter
from nexuskv.control.waiting import Waiting
from nexuskv.errors import ConfigError, LeaseExpired
from nexuskv.index.tree import ABSENT
from nexuskv.protocol import REQUEST_ID_BYTES_MAX, AcquireState
from nexuskv.tiers.host import SlotArray
from nexuskv.types import FAR_PLACES, Kind

Chain = tuple[Namespace, bytes]
Reply = tuple[object, ...]


class Reading:
    """Handlers of the messages that find and lease pages."""

    def __init__(
        self,
        *,
        config: Config,
        clock: Clock,
        pages: Pages,
        waiting: Waiting,
        recheck: Recheck,
        counters: Counters,
        copying: Copying | None = None,
        load_us: Callable[[int], int] = lambda _size_bytes: 0,
    ) -> None:
        self._config = config
        self._clock = clock
        self._pages = pages
        self._waiting = waiting
        self._recheck = recheck
        self._counters = counters
        self._copying = copying
        self._load_us = load_us

    def match(self, session: Session, body: list[object]) -> Reply:
        """The joint hit of some chains; no lease."""
        chains = self._chains(session, body[0])
        if len(chains) == 1 and chains[0][0].record.kind is Kind.ATTENTION:
            namespace, keys = chains[0]
            count = namespace.tree.match(keys)
            self._count_match(namespace, len(keys) // namespace.key_bytes, count)
            far = 0
            if namespace.far_count and count:
                found = namespace.tree.find(keys[: count * namespace.key_bytes], touch=False)
                far = int(np.count_nonzero(as_slots(found) >= FAR_PLACES))
            return count * namespace.record.page_tokens, (self._match_row(namespace, count, far),)
        held = [Held(ns, ns.tree.find(keys, touch=False)) for ns, keys in chains]
        tokens = joint_tokens(held)
        rows: list[Reply] = []
        for (namespace, keys), chain in zip(chains, held, strict=True):
            count = pages_needed(namespace, tokens)
            self._touch(namespace, keys, tokens=tokens, count=count)
            self._count_match(namespace, len(chain.slots), count)
            rows.append(self._match_row(namespace, count, far_among(chain, tokens, count)))
        return tokens, rows

    def acquire(self, session: Session, body: list[object], peer: Peer, request_id: int) -> Reply:
        """Lease what is held; arrange for the rest to follow when the caller waits."""
        chains_raw, request, lease_id, ttl_ms, wait_ms, load_ms = body
        assert isinstance(request, bytes)
        assert isinstance(lease_id, int)
        assert isinstance(wait_ms, int)
        assert isinstance(load_ms, int)
        if not 1 <= len(request) <= REQUEST_ID_BYTES_MAX:
            raise ConfigError(
                f"an acquire's request id has 1-{REQUEST_ID_BYTES_MAX} bytes, got {len(request)}"
            )
        ttl_s = self._ttl_s(ttl_ms)
        self._check_waits(wait_ms, load_ms)
        chains = self._chains(session, chains_raw)
        held = [Held(namespace, namespace.tree.find(keys)) for namespace, keys in chains]
        places = [as_slots(chain.slots) for chain in held]
        slots = places[0] if len(places) == 1 else np.concatenate(places)
        present = slots < FAR_PLACES
        asked, hits = len(slots), int(np.count_nonzero(present))
        absent, far = asked - hits, 0
        if hits < asked:
            if self._copying is not None:
                far = absent - int(np.count_nonzero(slots == ABSENT))
                absent -= far
            slots = slots[present]
        self._counters.add("acquire_pages", asked)
        self._counters.add("acquire_hits", hits)
        if not lease_id:
            _count_use(held, places)
        # Request id 0 wants no reply, so there is nothing to wait with.
        waits = request_id != 0 and ((absent and wait_ms) or (far and load_ms)) != 0
        if hits or waits or lease_id:
            lease = self._pages.lease(
                slots,
                tenant=session.tenant,
                request_id=request,
                lease_id=lease_id,
                expires_s=self._clock.now() + ttl_s + self._config.lease_margin_s,
            )
            lease_id = lease.lease_id
        state = AcquireState.COMPLETE if hits == asked else AcquireState.DEADLINE
        if waits:
            now_s = self._clock.now()
            state = self._waiting.add(
                Waiter(
                    peer=peer,
                    session=session,
                    frame_id=request_id,
                    request_id=request,
                    lease_id=lease_id,
                    ttl_s=ttl_s,
                    wait_until_s=now_s + wait_ms / 1000,
                    load_until_s=now_s + load_ms / 1000,
                ),
                held,
                chains,
            )
        if self._copying is not None:
            for (namespace, keys), at in zip(chains, places, strict=True):
                self._copying.used(namespace, keys, at)
        descriptors = self._pages.tier.descriptors
        tokens, rows = self._joint_rows(held, places, absent=absent, far=far)
        # Places outside host memory have descriptors of size 0, as those that are nowhere.
        runs = [
            (index, 0, descriptors(at, chain.namespace.page_bytes), b"")
            for index, (chain, at) in enumerate(zip(held, places, strict=True))
        ]
        return lease_id, int(state), tokens, rows, runs

    def renew(self, session: Session, body: list[object]) -> Reply:
        """Let a lease end later."""
        lease_id, ttl_ms = body
        assert isinstance(lease_id, int)
        ttl_s = self._ttl_s(ttl_ms)
        expires_s = self._clock.now() + ttl_s + self._config.lease_margin_s
        self._pages.leases.renew(lease_id, session.tenant, expires_s)
        return (ttl_ms,)

    def release(self, session: Session, body: list[object]) -> Reply:
        """End leases, or parts of them; take note of pages found corrupt."""
        leases, parts, corrupt = body
        assert isinstance(leases, list)
        assert isinstance(parts, list)
        assert isinstance(corrupt, list)
        for row in corrupt:
            self._recheck.reported(session, row)
        count = 0
        table = self._pages.leases
        for lease_id in leases:
            if type(lease_id) is not int:
                raise ConfigError("a release names leases by number")
            self._waiting.lease_released(lease_id, session.tenant)
            # A lease that has ended by itself needs no release.
            with suppress(LeaseExpired):
                self._pages.unleased(table.release(lease_id, session.tenant))
                count += 1
        for part in parts:
            count += self._release_part(session, part)
        return (count,)

    def _release_part(self, session: Session, part: object) -> int:
        match part:
            case [int(lease_id), number, bytes(keys)]:
                namespace = session.namespace(number)
            case _:
                raise ConfigError("a released part is [lease, namespace, keys]")
        namespace.key_count(keys, pages_max=self._config.batch_pages_max)
        found = namespace.tree.find(keys, touch=False)
        slots = [slot for slot in found if slot < FAR_PLACES]
        slots += self._pages.unlinked_slots(namespace.id, keys, key_bytes=namespace.key_bytes)
        try:
            unleased = self._pages.leases.release(lease_id, session.tenant, slots)
        except LeaseExpired:
            return 0
        self._pages.unleased(unleased)
        self._waiting.window_freed(lease_id, slots)
        return len(slots)

    def _chains(self, session: Session, raw: object) -> list[Chain]:
        """The `[namespace, keys]` pairs of a message, checked."""
        assert isinstance(raw, list)
        pages_left = self._config.batch_pages_max
        chains: list[Chain] = []
        for item in raw:
            if type(item) is not list or len(item) != 2 or type(item[1]) is not bytes:
                raise ConfigError("a chain is [namespace, keys]")
            namespace = session.namespace(item[0])
            pages_left -= namespace.key_count(item[1], pages_max=pages_left)
            chains.append((namespace, item[1]))
        if not chains:
            raise ConfigError("a message of no chains")
        return chains

    def _check_waits(self, *waits_ms: int) -> None:
        longest = max(waits_ms)
        if longest > self._config.acquire_wait_max_s * 1000:
            raise ConfigError(
                f"a wait of {longest} ms, at most {self._config.acquire_wait_max_s} s "
                "(acquire_wait_max_s)"
            )

    def _ttl_s(self, ttl_ms: object) -> float:
        assert isinstance(ttl_ms, int)
        if not 1 <= ttl_ms <= self._config.lease_ttl_max_s * 1000:
            raise ConfigError(
                f"a lease of {ttl_ms} ms, at least 1 ms and at most "
                f"{self._config.lease_ttl_max_s} s (lease_ttl_max_s)"
            )
        return ttl_ms / 1000

    def _joint_rows(
        self, held: Sequence[Held], places: Sequence[SlotArray], *, absent: int, far: int
    ) -> tuple[int, list[Reply]]:
        """The joint hit; `absent` pages are not held, `far` ones not in host memory."""
        if len(held) == 1 and held[0].namespace.record.kind is Kind.ATTENTION:
            namespace = held[0].namespace
            count = leading(held[0].slots) if absent else len(places[0])
            if far:
                far = int(np.count_nonzero(places[0][:count] >= FAR_PLACES))
            row = self._match_row(namespace, count, far)
            return count * held[0].page_tokens, [row]
        tokens = joint_tokens(held)
        rows: list[Reply] = []
        for chain in held:
            count = pages_needed(chain.namespace, tokens)
            many = far_among(chain, tokens, count) if far else 0
            rows.append(self._match_row(chain.namespace, count, many))
        return tokens, rows

    def _match_row(self, namespace: Namespace, count: int, far: int) -> Reply:
        """`[page_count, [host_pages, ssd_pages], load_us]`."""
        if not far:
            return count, (count, 0), 0
        return count, (count - far, far), self._load_us(far * namespace.page_bytes)

    def _touch(self, namespace: Namespace, keys: bytes, *, tokens: int, count: int) -> None:
        """A match counts as a use of the pages it would load."""
        end = tokens // namespace.record.page_tokens * namespace.key_bytes
        if count:
            namespace.tree.find(keys[end - count * namespace.key_bytes : end])

    def _count_match(self, namespace: Namespace, asked: int, found: int) -> None:
        namespace.asked_pages += asked
        namespace.hit_pages += found
        self._counters.add("match_pages", asked)
        self._counters.add("match_hits", found)


def _count_use(held: Sequence[Held], places: Sequence[SlotArray]) -> None:
    """Add what an acquire asked for and found to the namespaces' numbers."""
    for chain, at in zip(held, places, strict=True):
        chain.namespace.asked_pages += len(at)
        chain.namespace.hit_pages += int(np.count_nonzero(at != ABSENT))


def far_among(chain: Held, tokens: int, count: int) -> int:
    """How many of the `count` pages before `tokens` are held, but not in host memory."""
    end = tokens // chain.page_tokens
    return int(np.count_nonzero(as_slots(chain.slots[end - count : end]) >= FAR_PLACES))
