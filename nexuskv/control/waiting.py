"""Acquires that wait: for pages that others are still to commit, and for pages that are loaded.

Owns the table of waiting acquires, bounded by acquires_waiting_max. Each gets its pages in groups,
leased as they are sent, within a window of bytes that releases make room in. The two waits of an
acquire have a deadline each; what has not come by then it does without.
"""

import heapq
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.counters import Counters
from nexuskv.control.joint import Held
from nexuskv.control.loading import Loading
from nexuskv.control.namespaces import Namespace
from nexuskv.control.pages import Pages, as_slots
from nexuskv.control.sessions import Session
from nexuskv.control.waiter import Page, Place, Waiter
from nexuskv.errors import LeaseExpired, OutOfSpace
from nexuskv.index.tree import ABSENT
from nexuskv.key import split_keys
from nexuskv.protocol import REPLY, AcquireState, Type, encode
from nexuskv.types import FAR_PLACES


class Waiting:
    """All acquires that wait."""

    def __init__(self, *, config: Config, clock: Clock, pages: Pages, counters: Counters) -> None:
        self._config = config
        self._clock = clock
        self._pages = pages
        self._counters = counters
        self.loading: Loading | None = None  # with an ssd tier
        self._waiters: set[Waiter] = set()
        self._dues: list[tuple[float, int, Waiter]] = []  # a heap; may hold forgotten waiters
        self._added = 0
        self._by_page: defaultdict[Namespace, dict[bytes, set[Waiter]]] = defaultdict(dict)
        self._by_load: dict[Page, set[Waiter]] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def add(
        self,
        waiter: Waiter,
        held: Sequence[Held],
        chains: Sequence[tuple[Namespace, bytes]],
    ) -> AcquireState:
        """Let an acquire wait for the pages it lacks; ABORTED when too many wait already.

        A wait that is over already is none: the acquire does without those pages.
        """
        if len(self._waiters) >= self._config.acquires_waiting_max:
            self._counters.add("acquires_waiting_refused")
            return AcquireState.ABORTED
        waiter.chains = [namespace for namespace, _keys in chains]
        now_s = self._clock.now()
        self._sort_out(waiter, held, chains, now_s)
        self._waiters.add(waiter)
        for due_s in {waiter.wait_until_s, waiter.load_until_s}:
            if due_s > now_s:
                self._added += 1
                heapq.heappush(self._dues, (due_s, self._added, waiter))
        for namespace, name in waiter.missing:
            self._by_page[namespace].setdefault(name, set()).add(waiter)
        if waiter.far and self.loading is not None:
            self.loading.add(waiter)
        return AcquireState.MORE

    @staticmethod
    def _sort_out(
        waiter: Waiter,
        held: Sequence[Held],
        chains: Sequence[tuple[Namespace, bytes]],
        now_s: float,
    ) -> None:
        """Note which pages are waited for, and how."""
        for chain_index, (chain, (namespace, keys)) in enumerate(zip(held, chains, strict=True)):
            names = split_keys(keys, namespace.key_bytes)
            for page_index, slot in enumerate(chain.slots):
                if slot < FAR_PLACES:
                    continue
                page, place = (namespace, names[page_index]), (chain_index, page_index)
                if slot == ABSENT and waiter.wait_until_s > now_s:
                    waiter.missing.setdefault(page, []).append(place)
                elif slot != ABSENT and waiter.load_until_s > now_s:
                    waiter.far.setdefault(page, []).append(place)
                else:
                    waiter.is_short = True

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

    # --- loads

    def loaded(self, page: Page, slot: int) -> None:
        """A page that some acquires wait for is in this host slot."""
        for waiter in self._by_load.pop(page, ()):
            if page not in waiter.loading:
                continue  # The send to another waiter of its session has ended the session.
            places = self._stop_loading(waiter, page)
            self._keep_ready(waiter, page, places, slot)
            self._advance(waiter)

    def not_loaded(self, page: Page) -> None:
        """A load has ended without the page: it may be held, or stored anew, or be gone."""
        for waiter in self._by_load.pop(page, ()):
            if page not in waiter.loading:
                continue
            places = self._stop_loading(waiter, page)
            (place,) = page[0].tree.find(page[1], touch=False)
            if place < FAR_PLACES:
                self._keep_ready(waiter, page, places, place)
            elif place == ABSENT:
                self._wait_for(waiter, page, places)
            else:
                waiter.is_short = True
            self._advance(waiter)

    def arrived(self, waiter: Waiter, page: Page, slot: int) -> None:
        """A page of `far` is in host memory, loaded by somebody else."""
        self._keep_ready(waiter, page, waiter.far.pop(page), slot)
        self._advance(waiter)

    def asked_for(self, waiter: Waiter, page: Page) -> None:
        """A page of `far` is on its way."""
        if waiter in self._waiters:
            waiter.loading[page] = waiter.far.pop(page)
            waiter.loading_bytes += page[0].slot_bytes
            self._by_load.setdefault(page, set()).add(waiter)

    def vanished(self, waiter: Waiter, page: Page) -> None:
        """A page of `far` is held by nobody any more."""
        self._wait_for(waiter, page, waiter.far.pop(page))
        self._advance(waiter)

    def unloadable(self, waiter: Waiter) -> None:
        """What is left of `far` cannot be loaded."""
        self._give_up_loads(waiter)
        self._advance(waiter)

    def flush(self, waiter: Waiter) -> None:
        """Send what is ready: there may be no room for more until it has been released."""
        self._advance(waiter, flush=True)

    def _stop_loading(self, waiter: Waiter, page: Page) -> list[Place]:
        waiter.loading_bytes -= page[0].slot_bytes
        return waiter.loading.pop(page)

    def _keep_ready(self, waiter: Waiter, page: Page, places: list[Place], slot: int) -> None:
        """A page has come; it stays where it is until it has been sent under the lease."""
        self._pages.keep((slot,))
        waiter.kept[page] = slot
        waiter.ready[page] = places
        waiter.ready_bytes += page[0].slot_bytes

    def _wait_for(self, waiter: Waiter, page: Page, places: list[Place]) -> None:
        """Wait for the next commit of a page, if there is time left for that."""
        if waiter.wait_until_s > self._clock.now():
            waiter.missing[page] = places
            self._by_page[page[0]].setdefault(page[1], set()).add(waiter)
        else:
            waiter.is_short = True

    def _give_up_loads(self, waiter: Waiter) -> None:
        if not waiter.far and not waiter.loading:
            return
        waiter.is_short = True
        for page in waiter.loading:
            waiters = self._by_load.get(page)
            if waiters is not None:
                waiters.discard(waiter)
                if not waiters:
                    del self._by_load[page]
        waiter.loading.clear()
        waiter.loading_bytes = 0
        waiter.far.clear()
        if self.loading is not None:
            self.loading.remove(waiter)

    def _give_up_missing(self, waiter: Waiter) -> None:
        if not waiter.missing:
            return
        waiter.is_short = True
        for namespace, name in waiter.missing:
            table = self._by_page[namespace]
            table[name].discard(waiter)
            if not table[name]:
                del table[name]
            if not table:
                del self._by_page[namespace]
        waiter.missing.clear()

    # --- ends

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
        for waiter in self._of_lease(lease_id):
            waiter.window_bytes -= sum(waiter.sent.pop(slot, 0) for slot in slots)
            self._advance(waiter)
            if self.loading is not None:
                self.loading.changed()

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
        """End the waits that are over, and the acquires of which both are."""
        while (due_s := self.next_due()) is not None and due_s <= now_s:
            waiter = heapq.heappop(self._dues)[2]
            if waiter.ends_s <= now_s:
                self._finish(waiter, AcquireState.DEADLINE)
                continue
            if waiter.wait_until_s <= now_s:
                self._give_up_missing(waiter)
            if waiter.load_until_s <= now_s:
                self._give_up_loads(waiter)
            self._advance(waiter)

    def _of_lease(self, lease_id: int) -> list[Waiter]:
        if not self._waiters:
            return []
        return [waiter for waiter in self._waiters if waiter.lease_id == lease_id]

    def _advance(self, waiter: Waiter, *, flush: bool = False) -> None:
        """Send groups as long as they are worth sending and the window has room.

        A group is worth sending when it has acquire_group_bytes, or all that is still to come, or
        when nothing more can come before it has been released.
        """
        group_bytes = self._config.acquire_group_bytes
        while waiter in self._waiters:
            last = waiter.is_last
            if not last and (not waiter.ready or (waiter.ready_bytes < group_bytes and not flush)):
                return
            taken, size_bytes = self._fitting(waiter, group_bytes)
            whole = len(taken) == len(waiter.ready)
            if last and whole:
                self._send(waiter, AcquireState.COMPLETE, taken)
            elif taken and (flush or size_bytes >= group_bytes or not waiter.sent):
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
        found = self._take_ready(waiter, pages)
        kept = [waiter.kept.pop(page) for page in pages if page in waiter.kept]
        if state is AcquireState.COMPLETE:
            state = self._state_of(waiter)
        if state is not AcquireState.ABORTED and not self._lease(waiter, found):
            state, found = AcquireState.ABORTED, []
        if kept:
            self._pages.let_go(kept)
        self._counters.add("acquire_hits", len(found))
        runs = list(self._runs(waiter, sorted(found)))
        if state is not AcquireState.MORE:
            self._forget(waiter)
        if runs or state is not AcquireState.MORE:
            body = (waiter.lease_id, int(state), 0, (), runs)
            waiter.peer.send(encode(Type.ACQUIRE + REPLY, waiter.frame_id, body))

    def _take_ready(self, waiter: Waiter, pages: list[Page]) -> list[tuple[Place, int]]:
        """The places and slots of ready pages, counted as sent, without those that have gone."""
        found: list[tuple[Place, int]] = []
        places = {page: waiter.ready.pop(page) for page in pages}
        # A chain is looked up, and so touched, as one: page by page it would be cut to pieces.
        ordered = sorted(pages, key=lambda page: places[page][0])
        for namespace in {page[0]: None for page in ordered}:
            names = [name for of, name in ordered if of is namespace]
            slots = namespace.tree.find(b"".join(names))
            waiter.ready_bytes -= namespace.slot_bytes * len(names)
            for name, slot in zip(names, slots, strict=True):
                page = (namespace, name)
                if slot >= FAR_PLACES:
                    self._lost(waiter, page, places[page], slot)
                    continue
                found += [(place, slot) for place in places[page]]
                if slot not in waiter.sent:
                    waiter.sent[slot] = namespace.slot_bytes
                    waiter.window_bytes += namespace.slot_bytes
        return found

    def _state_of(self, waiter: Waiter) -> AcquireState:
        """How an acquire stands when all that was ready is sent."""
        if not waiter.is_last:
            return AcquireState.MORE
        return AcquireState.DEADLINE if waiter.is_short else AcquireState.COMPLETE

    def _lost(self, waiter: Waiter, page: Page, places: list[Place], place: int) -> None:
        """A page has left host memory between its arrival and its lease: wait for it again."""
        if place == ABSENT:
            self._wait_for(waiter, page, places)
        elif waiter.load_until_s > self._clock.now() and self.loading is not None:
            waiter.far[page] = places
            self.loading.add(waiter)
        else:
            waiter.is_short = True

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
        self._give_up_missing(waiter)
        self._give_up_loads(waiter)
        if waiter.kept:
            self._pages.let_go(waiter.kept.values())
            waiter.kept.clear()
