"""What one client of the chaos test does: anything at random, checking all that must hold always.

A page's bytes follow from its namespace, its key and a version that stands in front, so bytes of
another namespace, key, or of two versions at once are told apart from right ones. Runs until its
standard input has a line, then says what it saw. Everything follows from one seed but the timing.
"""

import hashlib
import random
import select
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from nexuskv import UNKNOWN
from nexuskv.client.lease import Lease
from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.errors import NexusError
from nexuskv.types import Kind, PageStatus
from tests.e2e.cache import KIB, MIB, chain, open_space, open_store

CALL_S_MAX = 25.0
"""No call may take longer: its own bounds are below 10 s, and it may be stopped for a while."""
VIOLATIONS_MAX = 20
CHAINS = 5
PAGES_MAX = 40
LEASES_MAX = 8
PUT_BYTES_MAX = 3 * MIB
SHAPES: tuple[tuple[int, Kind, int], ...] = (  # page bytes, kind, key bytes
    (4 * KIB, Kind.ATTENTION, 32),
    (4 * KIB, Kind.STATE, 16),
    (5000, Kind.ATTENTION, 8),
    (12 * KIB + 8, Kind.WINDOW, 32),
    (64 * KIB, Kind.ATTENTION, 64),
    (100_001, Kind.ATTENTION, 32),
    (256 * KIB, Kind.ATTENTION, 20),
    (MIB, Kind.ATTENTION, 32),
)
WAITS = {"transfer_timeout_s": 4.0, "lease_ttl_s": 2.0, "session_idle_s": 6.0}
TENANTS = ("default", "other")
_VERSION = struct.Struct("<Q")


def page_of(space: Space, key: bytes, version: int) -> bytes:
    """The bytes of a page: one stamp, repeated."""
    stamp = hashlib.blake2b(space.id + key + _VERSION.pack(version), digest_size=24).digest()
    unit = _VERSION.pack(version) + stamp
    size_bytes = space.record.page_bytes
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


def is_page_of(space: Space, key: bytes, found: bytes | bytearray) -> bool:
    """Whether these are the bytes that one version of this page has."""
    (version,) = _VERSION.unpack_from(found)
    return found == page_of(space, key, version)


@dataclass
class Held:
    """A lease on pages that nobody removes, and those of them that were seen under it."""

    lease: Lease
    run: bytes  # of the daemon that granted it
    space: Space
    keys: list[bytes]
    seen: set[bytes] = field(default_factory=set)


class Churn:
    """One client: its stores, one a tenant, the leases it holds, and what it saw."""

    def __init__(self, url: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._stores = [open_store(url, tenant=tenant, **WAITS) for tenant in TENANTS]
        self._spaces = [
            open_space(store, page_bytes=size, kind=kind, key_bytes=width, window_pages=window)
            for store in self._stores
            for size, kind, width in SHAPES
            for window in (4 if kind is Kind.WINDOW else 0,)
        ]
        self._quiet = open_space(self._stores[0], page_bytes=16 * KIB, lora=f"quiet {seed}")
        self._held: list[Held] = []
        self._tokens: list[bytes] = []
        self._count = Counter[str]()
        self._violations: list[str] = []

    def run(self) -> dict[str, object]:
        """Act until told to stop; what was seen."""
        acts: list[tuple[Callable[[], None], int]] = [
            (self._put, 30),
            (self._get, 30),
            (self._view, 10),
            (self._match, 10),
            (self._shared_lease, 8),
            (self._quiet_lease, 10),
            (self._quiet_get, 10),
            (self._prefetch, 4),
            (self._drop, 4),
            (self._pin, 3),
            (self._clear, 1),
        ]
        calls, weights = [act for act, _ in acts], [weight for _, weight in acts]
        while not select.select([sys.stdin], [], [], 0)[0]:
            (call,) = self._random.choices(calls, weights)
            begun_s = time.monotonic()
            call()
            took_s = time.monotonic() - begun_s
            if took_s > CALL_S_MAX:
                self._wrong(f"{call.__name__} took {took_s:.1f} s")
        self._end()
        return {"violations": self._violations, "count": dict(self._count)}

    def _end(self) -> None:
        for held in self._held:
            held.lease.release()
        for store in self._stores:
            if store.counters["corrupt"]:
                self._wrong(f"{store.counters['corrupt']} corrupt pages")
            self._count.update({"reconnects": store.counters["reconnects"]})
            store.close()

    def _wrong(self, what: str) -> None:
        if len(self._violations) < VIOLATIONS_MAX:
            self._violations.append(what)

    # --- what to act on

    def _some(self) -> tuple[Space, list[bytes]]:
        """A namespace and a piece of a chain of it, from the start or from within."""
        space, keys, _parent = self._piece()
        return space, keys

    def _piece(self) -> tuple[Space, list[bytes], bytes | None]:
        """The same, and the key before the piece."""
        choice = self._random
        space = choice.choice(self._spaces)
        keys = chain(f"c{choice.randrange(CHAINS)}", PAGES_MAX, key_bytes=space.record.key_bytes)
        most = max(1, min(PAGES_MAX, PUT_BYTES_MAX // space.record.page_bytes))
        start = choice.choice((0, 0, 0, choice.randrange(PAGES_MAX)))
        piece = keys[start : start + choice.randint(1, most)]
        return space, piece, keys[start - 1] if start else None

    def _memory(self, space: Space, keys: list[bytes]) -> list[bytearray | list[memoryview]]:
        """Room for some pages; now and then in several parts."""
        size = space.record.page_bytes
        cut = self._random.randrange(size)
        whole = [bytearray(size) for _ in keys]
        if self._random.random() < 0.8:
            return list(whole)
        return [[memoryview(page)[:cut], memoryview(page)[cut:]] for page in whole]

    def _check(
        self,
        space: Space,
        keys: list[bytes],
        into: list[bytearray | list[memoryview]],
        statuses: list[PageStatus],
    ) -> None:
        for key, item, status in zip(keys, into, statuses, strict=True):
            self._count[f"get {status.name}"] += 1
            if status is PageStatus.HIT:
                found = item if isinstance(item, bytearray) else b"".join(item)
                if not is_page_of(space, key, found):
                    self._wrong(f"wrong bytes for {key.hex()} of {space.record}")
            elif status is PageStatus.CORRUPT:
                self._wrong(f"{key.hex()} of {space.record.page_bytes} bytes is corrupt")

    # --- acts

    def _put(self) -> None:
        space, keys, parent = self._piece()
        version = self._random.randrange(2**32)
        lie = self._random.choice((None, UNKNOWN, keys[-1]))
        above = parent if self._random.random() < 0.7 else lie
        data = [page_of(space, key, version) for key in keys]
        for status in space.put(keys, from_=data, parent=above):
            self._count[f"put {status.name}"] += 1

    def _get(self) -> None:
        space, keys = self._some()
        into = self._memory(space, keys)
        wait_s = self._random.choice((0.0, 0.0, 0.0, self._random.random()))
        self._check(space, keys, into, space.get(keys, into=into, wait_s=wait_s))

    def _view(self) -> None:
        space, keys = self._some()
        with space.view(keys, check=self._random.random() < 0.3) as view:
            copies = [None if page is None else bytes(page) for page in view.pages]
        self._count[f"view {'held' if view.held else 'lost'}"] += 1
        if view.held:
            for key, copy in zip(keys, copies, strict=True):
                if copy is not None and not is_page_of(space, key, copy):
                    self._wrong(f"a held view shows wrong bytes for {key.hex()}")

    def _match(self) -> None:
        space, keys = self._some()
        if space.match(keys).page_count > len(keys):
            self._wrong("more pages match than were asked for")
        mine = [s for s in self._spaces if s.record.tenant == space.record.tenant]
        some = self._random.sample(mine, 3)
        chains = [(s, chain("c0", 8, key_bytes=s.record.key_bytes)) for s in some]
        if self._store_of(space).match_all(chains).token_count > 8 * 16:
            self._wrong("more tokens match than were asked for")

    def _store_of(self, space: Space) -> Store:
        return self._stores[TENANTS.index(space.record.tenant)]

    def _shared_lease(self) -> None:
        """Take, read, pass on by token, renew or release a lease on pages that others drop."""
        space, keys = self._some()
        store, choice = self._store_of(space), self._random
        if self._tokens and choice.random() < 0.5:
            lease = store.lease(choice.choice(self._tokens))
        else:
            lease = store.acquire(
                [(space, keys)],
                request_id=b"shared %d" % choice.randrange(8),
                ttl_s=choice.choice((0.001, 0.2, 2.0, 1e6)),
                wait_s=choice.choice((0.0, 0.3)),
            )
        self._tokens = [*self._tokens[-LEASES_MAX:], lease.token]
        into = self._memory(space, keys)
        self._check(space, keys, into, lease.get(space, keys, into=into))
        if choice.random() < 0.5:
            lease.renew(ttl_s=choice.choice((0.001, 1.0)))
        if choice.random() < 0.7:
            lease.release()

    def _quiet_lease(self) -> None:
        """Store pages that only this client knows, and hold them by a lease."""
        space, choice = self._quiet, self._random
        keys = chain(f"quiet {choice.randrange(1000)}", choice.randint(1, 12))
        space.put(keys, from_=[page_of(space, key, 1) for key in keys])
        with suppress(NexusError):
            run = self._stores[0].subscribe()[1]
            request_id = choice.randbytes(8)
            lease = self._stores[0].acquire([(space, keys)], request_id=request_id, ttl_s=4.0)
            self._held.append(Held(lease, run, space, keys))
            if len(self._held) > LEASES_MAX:
                self._held.pop(0).lease.release()

    def _quiet_get(self) -> None:
        """What was read once under a lease is there as long as the lease is."""
        if not self._held:
            return
        held = self._random.choice(self._held)
        into = [bytearray(held.space.record.page_bytes) for _ in held.keys]
        statuses = held.lease.get(held.space, held.keys, into=into)
        self._check(held.space, held.keys, list(into), statuses)
        for key, status in zip(held.keys, statuses, strict=True):
            if status is PageStatus.HIT:
                held.seen.add(key)
            elif status is PageStatus.MISS and key in held.seen and held.lease.held:
                self._wrong(f"{key.hex()} vanished under a lease")

    def _prefetch(self) -> None:
        space, keys = self._some()
        space.prefetch(keys)

    def _drop(self) -> None:
        space, keys = self._some()
        with suppress(NexusError):
            space.remove(keys[: self._random.randint(1, 4)])

    def _pin(self) -> None:
        space, keys = self._some()
        with suppress(NexusError):
            space.pin(keys, ttl_s=self._random.choice((0.01, 1.0, 3600.0)))
            if self._random.random() < 0.5:
                space.unpin(keys)

    def _clear(self) -> None:
        with suppress(NexusError):
            self._random.choice(self._spaces).clear()


def churn(url: str, options: dict[str, object]) -> object:
    """The action of tests/e2e/child.py."""
    client = Churn(url, int(str(options["seed"])))
    print("ready", flush=True)
    return client.run()
