"""Which far pages are loaded next: the acquires that wait for them take turns.

Each acquire loads its pages in the order of its chains, as far ahead as its window reaches: what it
was sent and has not released, what is ready, and what is on its way. Pages that it has released are
room for the next ones, so a chain larger than host memory passes through. An acquire that can get
no further sends what it has; it ends by its deadline, or at once while no worker serves the ssd.
Control thread only.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Final, Protocol

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.loads import Loads
from nexuskv.control.pages import Pages
from nexuskv.control.waiter import Page, Waiter
from nexuskv.index.tree import ABSENT
from nexuskv.types import FAR_PLACES

_LOOK_MAX: Final = 256  # pages of one acquire looked at in a turn


class Groups(Protocol):
    """Who owns the acquires and answers them."""

    def arrived(self, waiter: Waiter, page: Page, slot: int) -> None:
        """A page of `far` is in host memory."""
        ...

    def asked_for(self, waiter: Waiter, page: Page) -> None:
        """A page of `far` is on its way."""
        ...

    def vanished(self, waiter: Waiter, page: Page) -> None:
        """A page of `far` is held by nobody any more."""
        ...

    def unloadable(self, waiter: Waiter) -> None:
        """What is left of `far` cannot be loaded."""
        ...

    def flush(self, waiter: Waiter) -> None:
        """Send what is ready: waiting for more would be waiting for ever."""
        ...


class Loading:
    """Shares loads among the acquires that want far pages."""

    def __init__(
        self, *, config: Config, clock: Clock, pages: Pages, loads: Loads, groups: Groups
    ) -> None:
        self._config = config
        self._clock = clock
        self._pages = pages
        self._loads = loads
        self._groups = groups
        self._wanting: dict[Waiter, None] = {}  # whose turn is next comes first
        self._seen = 0  # `Pages.releases` when there was no room
        self._retry_s: float | None = None

    def __len__(self) -> int:
        return len(self._wanting)

    def add(self, waiter: Waiter) -> None:
        """An acquire wants pages to be loaded."""
        self._wanting[waiter] = None
        self._retry_s = None

    def remove(self, waiter: Waiter) -> None:
        """It has ended, or its far pages are given up."""
        self._wanting.pop(waiter, None)

    def changed(self) -> None:
        """Loads or copies were answered, or a window has room: look again."""
        self._retry_s = None

    def pump(self) -> None:
        """Begin the loads that can be begun. Call it once a turn."""
        if not self._wanting:
            return
        if self._retry_s is not None and self._seen == self._pages.releases:
            return
        self._retry_s = None
        while self._turns():
            pass
        self._wanting = {waiter: None for waiter in self._wanting if waiter.far}
        if self._wanting:
            # Other things make room too: look again in a while, or when a page is released.
            self._seen = self._pages.releases
            self._retry_s = self._clock.now() + self._config.load_retry_s

    def next_due(self) -> float | None:
        """When to look again although nothing has been released."""
        return self._retry_s if self._wanting else None

    def tick(self, now_s: float) -> None:
        """Look again."""
        if self._retry_s is not None and self._retry_s <= now_s:
            self._retry_s = None
            self.pump()

    def _turns(self) -> bool:
        """One turn for each acquire; whether any of them got on."""
        got_on = False
        for waiter in list(self._wanting):
            if waiter not in self._wanting or not waiter.far:
                continue
            if not self._loads.serves:
                self._groups.unloadable(waiter)
            elif self._has_room(waiter) and self._turn(waiter):
                got_on = True
                if waiter in self._wanting:
                    del self._wanting[waiter]
                    self._wanting[waiter] = None
            elif not waiter.loading:
                self._groups.flush(waiter)
        return got_on

    def _has_room(self, waiter: Waiter) -> bool:
        """Whether its window has room for one page more."""
        size = next(iter(waiter.far))[0].slot_bytes
        held = waiter.outstanding_bytes
        return not held or held + size <= self._config.acquire_window_bytes

    def _turn(self, waiter: Waiter) -> bool:
        """Begin some loads of one acquire; whether any page got on."""
        wanted, got_on = self._next(waiter)
        if not wanted:
            return got_on
        namespace = wanted[0][0][0]
        begun = self._loads.begin(namespace, [(page[1], place) for page, place in wanted])
        for page, _place in wanted[:begun]:
            self._groups.asked_for(waiter, page)
        return got_on or begun > 0

    def _next(self, waiter: Waiter) -> tuple[list[tuple[Page, int]], bool]:
        """The next pages of one namespace to load, within the window; whether others got on."""
        pages = self._stretch(waiter)
        namespace = pages[0][0]
        places = namespace.tree.find(b"".join(key for _, key in pages), touch=False)
        left = self._config.acquire_window_bytes - waiter.outstanding_bytes
        alone = not waiter.outstanding_bytes
        size = namespace.slot_bytes
        wanted: list[tuple[Page, int]] = []
        got_on = False
        for page, place in zip(pages, places, strict=True):
            if page not in waiter.far:
                break  # A send has ended its session.
            if place == ABSENT:
                self._groups.vanished(waiter, page)
                got_on = True
                continue
            if left < size and not alone:
                break
            if len(wanted) * size >= self._config.acquire_group_bytes:
                break
            left -= size
            alone = False
            if place < FAR_PLACES:
                self._groups.arrived(waiter, page, place)
                got_on = True
            elif self._loads.is_under_way(page):
                self._groups.asked_for(waiter, page)
                got_on = True
            else:
                wanted.append((page, place))
        return wanted, got_on

    @staticmethod
    def _stretch(waiter: Waiter) -> Sequence[Page]:
        """The next far pages that are of one namespace."""
        pages = list(islice(waiter.far, _LOOK_MAX))
        other = next((at for at, page in enumerate(pages) if page[0] is not pages[0][0]), None)
        return pages[:other]
