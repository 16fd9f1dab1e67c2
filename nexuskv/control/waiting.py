"""Acquires that wait for pages that other sessions are still to commit.

Owns the table of waiting acquires, bounded by acquires_waiting_max. Each gets its pages in groups,
leased as they are sent, within a window of bytes that releases make room in.
"""

import heapq
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.counters import Counters
from nexuskv.control.joint import Held
from nexuskv.control.namespaces import Namespace
from nexuskv.control.pages import Pages, as_slots
from nexuskv.control.peer import Peer
from nexuskv.control.sessions import Session
from nexuskv.errors import LeaseExpired, OutOfSpace
from nexuskv.index.tree import ABSENT
from nexuskv.key import split_keys
from nexuskv.protocol import REPLY, AcquireState, Type, encode

Place = tuple[int, int]  # (chain index, page index) in the acquire
Page = tuple[Namespace, bytes]


@dataclass(slots=True, eq=False)
class Waiter:
    """One acquire that has been answered in part."""

    peer: Peer
    session: Session
    frame_id: int
    request_id: bytes
    lease_id: int
    ttl_s: float
    deadline_s: float
    chains: list[Namespace] = field(default_factory=list)
    missing: dict[Page, list[Place]] = field(default_factory=dict)
    ready: dict[Page, list[Place]] = field(default_factory=dict)
    ready_bytes: int = 0  # of the pages that have come and not been sent
    sent: dict[int, int] = field(default_factory=dict)  # slot → bytes, sent and not yet released
    window_bytes: int = 0  # all of `sent`


class Waiting:
    """All acquires that wait."""

    def __init__(self, *, config: Config, clock: Clock, pages: Pages, counters: Counters) -> None:
        self._config = config
        self._clock = clock
        self._pages = pages
        self._counters = counters
        self._waiters: set[Waiter] = set()
        self._dues: list[tuple[float, int, Waiter]] = []  # a heap; may hold forgotten waiters
        self._added = 0
        self._by_page: defaultdict[Namespace, dict[bytes, set[Waiter]]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._waiters)

    def add(
        self,
        waiter: Waiter,
        held: Sequence[Held],
        chains: Sequence[tuple[Namespace, bytes]],
    ) -> AcquireState:
        """Let an acquire wait for the pages it lacks; ABORTED when too many wait already."""
        if len(self._waiters) >= self._config.acquires_waiting_max:
            self._counters.add("acquires_waiting_refused")
            return AcquireState.ABORTED
        waiter.chains = [namespace for namespace, _keys in chains]
        for chain_index, (chain, (namespace, keys)) in enumerate(zip(held, chains, strict=True)):
            names = split_keys(keys, namespace.key_bytes)
            for page_index, slot in enumerate(chain.slots):
                if slot == ABSENT:
                    key = (namespace, names[page_index])
                    waiter.missing.setdefault(key, []).append((chain_index, page_index))
        self._waiters.add(waiter)
        self._added += 1
        heapq.heappush(self._dues, (waiter.deadline_s, self._added, waiter))
        for namespace, name in waiter.missing:
            self._by_page[namespace].setdefault(name, set()).add(waiter)
        return AcquireState.MORE

    def wants(self, namespace: Namespace) -> bool:
        """Whether any acquire waits for pages of this namespace."""
        return namespace in self._by_page

    def committed(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Pages became readable: pass them to whoever waits for them."""
        table = self._by_page.get(namespace)
        if not table:
            return
        touched: set[Waiter] = set()
        for name in keys:
            for waiter in table.pop(name, ()):
                page = (namespace, name)
                waiter.ready[page] = waiter.missing.pop(page)
                waiter.ready_bytes += namespace.slot_bytes
                touched.add(waiter)
        if not table:
            del self._by_page[namespace]
        for waiter in touched:
            self._advance(waiter)

    def cleared(self, namespace: Namespace) -> None:
        """A namespace was cleared: acquires that wait for it are aborted."""
        for waiter in [w for w in self._waiters if namespace in w.chains]:
            self._finish(waiter, AcquireState.ABORTED)

    def session_ended(self, session: Session) -> None:
        """Nobody is there to answer any more."""
        for waiter in [w for w in self._waiters if w.session is session]:
            self._forget(waiter)

    def lease_released(self, lease_id: int, tenant: str) -> None:
        """The whole lease ended: what waits under it is aborted."""
        for waiter in self._of_lease(lease_id):
            if waiter.session.tenant == tenant:
                self._finish(waiter, AcquireState.ABORTED)

    def window_freed(self, lease_id: int, slots: Iterable[int]) -> None:
        """Pages of a lease were released: there is room for the next group."""
        waiters = self._of_lease(lease_id)
        for waiter in waiters:
            waiter.window_bytes -= sum(waiter.sent.pop(slot, 0) for slot in slots)
            self._advance(waiter)

    def abort_all(self) -> None:
        """The daemon stops."""
        for waiter in list(self._waiters):
            self._finish(waiter, AcquireState.ABORTED)

    def next_due(self) -> float | None:
        """The earliest deadline."""
        while self._dues and self._dues[0][2] not in self._waiters:
            heapq.heappop(self._dues)
        return self._dues[0][0] if self._dues else None

    def tick(self, now_s: float) -> None:
        """End the acquires whose wait is over."""
        while (due_s := self.next_due()) is not None and due_s <= now_s:
            self._finish(self._dues[0][2], AcquireState.DEADLINE)

    def _of_lease(self, lease_id: int) -> list[Waiter]:
        if not self._waiters:
            return []
        return [waiter for waiter in self._waiters if waiter.lease_id == lease_id]

    def _advance(self, waiter: Waiter) -> None:
        """Send groups as long as they are worth sending and the window has room.

        A group is worth sending when it has acquire_group_bytes, or all that is still to come.
        """
        group_bytes = self._config.acquire_group_bytes
        while waiter in self._waiters:
            last = not waiter.missing
            if waiter.ready_bytes < group_bytes and not last:
                return
            taken, size_bytes = self._fitting(waiter, group_bytes)
            whole = len(taken) == len(waiter.ready)
            if last and whole:
                self._send(waiter, AcquireState.COMPLETE, taken)
            elif size_bytes >= group_bytes or (taken and not waiter.sent):
                self._send(waiter, AcquireState.MORE, taken)
            else:
                return  # The window is full: a release brings us here again, or the deadline ends.

    def _finish(self, waiter: Waiter, state: AcquireState) -> None:
        """End a wait; what is ready and fits the window still goes out, unless it is aborted."""
        taken: list[Page] = []
        if state is not AcquireState.ABORTED:
            taken, _ = self._fitting(waiter, self._config.acquire_window_bytes)
        self._send(waiter, state, taken)

    def _fitting(self, waiter: Waiter, group_bytes: int) -> tuple[list[Page], int]:
        """Ready pages for one group and their bytes: at least one while nothing is unreleased."""
        room_bytes = self._config.acquire_window_bytes - waiter.window_bytes
        taken: list[Page] = []
        size_bytes = 0
        for page in waiter.ready:
            if size_bytes >= group_bytes:
                break
            if size_bytes + page[0].slot_bytes > room_bytes and (taken or waiter.sent):
                break
            taken.append(page)
            size_bytes += page[0].slot_bytes
        return taken, size_bytes

    def _send(self, waiter: Waiter, state: AcquireState, pages: list[Page]) -> None:
        """Lease and send some ready pages."""
        if waiter not in self._waiters:
            return  # The send to another waiter of this session has ended the session.
        found: list[tuple[Place, int]] = []
        for page in pages:
            namespace, name = page
            places = waiter.ready.pop(page)
            waiter.ready_bytes -= namespace.slot_bytes
            slot = namespace.tree.find(name)[0]
            if slot == ABSENT:
                self._miss_again(waiter, page, places)
                continue
            found += [(place, slot) for place in places]
            if slot not in waiter.sent:
                waiter.sent[slot] = namespace.slot_bytes
                waiter.window_bytes += namespace.slot_bytes
        if state is AcquireState.COMPLETE and waiter.missing:
            state = AcquireState.MORE
        if state is not AcquireState.ABORTED and not self._lease(waiter, found):
            state, found = AcquireState.ABORTED, []
        self._counters.add("acquire_hits", len(found))
        runs = list(self._runs(waiter, sorted(found)))
        if state is not AcquireState.MORE:
            self._forget(waiter)
        if runs or state is not AcquireState.MORE:
            body = (waiter.lease_id, int(state), 0, (), runs)
            waiter.peer.send(encode(Type.ACQUIRE + REPLY, waiter.frame_id, body))

    def _miss_again(self, waiter: Waiter, page: Page, places: list[Place]) -> None:
        """A page was evicted between its commit and its lease: wait for it again."""
        waiter.missing[page] = places
        self._by_page[page[0]].setdefault(page[1], set()).add(waiter)

    def _lease(self, waiter: Waiter, found: list[tuple[Place, int]]) -> bool:
        try:
            self._pages.lease(
                array("I", [slot for _place, slot in found]),
                tenant=waiter.session.tenant,
                request_id=waiter.request_id,
                lease_id=waiter.lease_id,
                expires_s=self._clock.now() + waiter.ttl_s + self._config.lease_margin_s,
            )
        except (LeaseExpired, OutOfSpace):
            return False
        return True

    def _runs(
        self, waiter: Waiter, found: list[tuple[Place, int]]
    ) -> Iterator[tuple[int, int, bytes, bytes]]:
        """Pages that follow one another in a chain travel as one run."""
        start = 0
        for at in range(1, len(found) + 1):
            (chain, page), _slot = found[at - 1]
            if at < len(found) and found[at][0] == (chain, page + 1):
                continue
            slots = as_slots([slot for _place, slot in found[start:at]])
            blob = self._pages.tier.descriptors(slots, waiter.chains[chain].page_bytes)
            yield chain, found[start][0][1], blob, b""
            start = at

    def _forget(self, waiter: Waiter) -> None:
        if waiter not in self._waiters:
            return
        self._waiters.remove(waiter)
        for namespace, name in waiter.missing:
            table = self._by_page[namespace]
            table[name].discard(waiter)
            if not table[name]:
                del table[name]
            if not table:
                del self._by_page[namespace]
