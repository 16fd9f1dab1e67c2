"""Which runs of an order still have near pages: pages whose only listed place is in host memory.

Owns a second frontier in an eviction order's ring: everything colder than its marker has no near
page, or is listed as set aside, so that far-only runs are passed once a use and not once a call.
Threading: one thread, the control loop.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final

from nexuskv.index.run import Link, Run, enter_after, leave
from nexuskv.types import FAR_PLACES

NEAR_ASIDE_MAX: Final = 16384
"""Runs with near pages that one order sets aside before it looks at hotter ones no more."""


class NearFrontier:
    """The boundary of one order between runs that were looked at for near pages and the rest.

    Lazy: a run set aside and used since stands beyond the marker again; its entry is dropped when
    it is met. `_passed_touch` is at least the touch of every run colder than the marker.
    """

    __slots__ = ("_aside", "_end", "_mark", "_passed_touch")

    def __init__(self, end: Link) -> None:
        """Enter a ring, of which `end` is both ends."""
        self._end = end
        self._mark = Link()
        self._aside: OrderedDict[Run, None] = OrderedDict()
        self._rewind()

    # --- what an eviction walks

    def coldest(self) -> Run | None:
        """The coldest run not passed over, with near pages or without."""
        if len(self._aside) >= NEAR_ASIDE_MAX:
            return None
        link = self._mark.hotter
        while link is not self._end:
            if isinstance(link, Run):
                return link
            link = link.hotter
        return None

    def pass_over(self, run: Run) -> None:
        """Leave `run`, the answer of `coldest`, behind; set it aside if it has near pages."""
        leave(self._mark)
        enter_after(self._mark, run)
        self._passed_touch = run.touch
        if has_near(run):
            self._aside[run] = None

    def passed_over(self, limit: int) -> list[Run]:
        """The next `limit` runs that were set aside, going round; each at most once."""
        found: list[Run] = []
        for _ in range(min(limit, len(self._aside))):
            run, _ = self._aside.popitem(last=False)
            if run.touch <= self._passed_touch and has_near(run):
                self._aside[run] = None
                found.append(run)
        return found

    # --- what the order and the tree tell it

    def removed(self, run: Run) -> None:
        """A run left the order."""
        if self._aside:
            self._aside.pop(run, None)

    def split(self, part: Run, than: Run) -> None:
        """A part was split off a run and stands beside it."""
        if than in self._aside:
            self._aside[part] = None

    def noticed(self, run: Run) -> None:
        """A run of the order got near pages without being used."""
        if run.touch <= self._passed_touch:
            if len(self._aside) < NEAR_ASIDE_MAX:
                self._aside[run] = None
            else:
                leave(self._mark)
                self._rewind()

    def _rewind(self) -> None:
        enter_after(self._mark, self._end)
        self._passed_touch = -1
        self._aside.clear()

    def close(self) -> None:
        """Take the marker out of the ring."""
        leave(self._mark)

    # --- looking without changing

    def skip(self, limit: int) -> None:
        """Move the marker over the coldest runs if they have no near pages, at most `limit`."""
        for _ in range(limit):
            run = self.coldest()
            if run is None or has_near(run):
                return
            self.pass_over(run)

    def aside(self, limit: int) -> list[Run]:
        """Up to `limit` runs that were set aside, coldest first."""
        found = islice(self._aside, limit)
        return sorted((run for run in found if run.touch <= self._passed_touch), key=_touch)

    def __iter__(self) -> Iterator[Run]:
        """The runs not passed over, coldest first; do not change the order meanwhile."""
        link = self._mark.hotter
        while link is not self._end:
            if isinstance(link, Run):
                yield link
            link = link.hotter


def is_near(place: int) -> bool:
    """Whether a place is one in host memory."""
    return place < FAR_PLACES


def has_near(run: Run) -> bool:
    """Whether any page of a run is near."""
    return min(run.slots) < FAR_PLACES


def _touch(run: Run) -> int:
    return run.touch
