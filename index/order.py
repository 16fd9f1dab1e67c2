"""Eviction order: which run of a tree goes first.

Owns the order of runs, coldest first. Every run of a tree stands in exactly one order, and a run
stands before its ancestors, because chains are touched tail to head: so the first run that was not
passed over is a leaf, or an ancestor of a run that was. Threading: one thread, the control loop.
"""

from collections.abc import Iterator
from typing import Protocol

from nexuskv.index.near import NearFrontier
from nexuskv.index.run import Link, Run, enter_after, leave


class Frontier(Protocol):
    """Where a walk from the coldest run on has come, over several calls."""

    def coldest(self) -> Run | None:
        """The coldest run not passed over."""
        ...

    def pass_over(self, run: Run) -> None:
        """Leave `run`, the answer of `coldest`, where it is and do not offer it again."""
        ...

    def passed_over(self, limit: int) -> list[Run]:
        """The next `limit` runs that were passed over, going round; each at most once."""
        ...


class EvictionPolicy(Frontier, Protocol):
    """An order of runs. Implementations keep a run before its ancestors if touched so.

    It is the frontier of evicting pages from all tiers; `near` is that of near pages.
    """

    @property
    def near(self) -> NearFrontier:
        """The frontier of the runs that have near pages."""
        ...

    def add(self, run: Run) -> None:
        """Enter a run that stands in no order, as just used."""
        ...

    def touch(self, run: Run) -> None:
        """Note that a run was just used."""
        ...

    def remove(self, run: Run) -> None:
        """Take a run out."""
        ...

    def place_colder(self, run: Run, than: Run) -> None:
        """Enter a run directly before another: it was split off its tail."""
        ...

    def place_hotter(self, run: Run, than: Run) -> None:
        """Enter a run directly after another: it was split off its head."""
        ...

    def close(self) -> None:
        """Drop what an empty order holds of itself: the process runs without the collector."""
        ...

    def __iter__(self) -> Iterator[Run]:
        """All runs, coldest first."""
        ...


class LruOrder:
    """Least recently used first: one ring of links, three of them markers.

    Runs colder than `_mark` were found busy. They keep their places, so order is never lost, and
    are looked at again from `_again` on, a few a call, so that many of them cost little.
    """

    __slots__ = ("_again", "_end", "_mark", "near")

    def __init__(self) -> None:
        self._end = Link()
        self._mark = Link()
        self._again = Link()
        self._end.hotter = self._end.colder = self._end
        enter_after(self._mark, self._end)
        enter_after(self._again, self._end)
        self.near = NearFrontier(self._end)

    def add(self, run: Run) -> None:
        """Enter a run as the most recently used."""
        end = self._end
        last = end.colder
        run.colder = last
        run.hotter = end
        last.hotter = end.colder = run

    def touch(self, run: Run) -> None:
        """Make a run the most recently used."""
        colder, hotter = run.colder, run.hotter
        end = self._end
        if hotter is end:
            return
        colder.hotter = hotter
        hotter.colder = colder
        last = end.colder
        run.colder = last
        run.hotter = end
        last.hotter = end.colder = run

    def remove(self, run: Run) -> None:
        """Take a run out."""
        leave(run)
        self.near.removed(run)

    def place_colder(self, run: Run, than: Run) -> None:
        """Enter a run directly before another."""
        enter_after(run, than.colder)
        self.near.split(run, than)

    def place_hotter(self, run: Run, than: Run) -> None:
        """Enter a run directly after another."""
        enter_after(run, than)
        self.near.split(run, than)

    def coldest(self) -> Run | None:
        """The least recently used run not passed over."""
        link = self._mark.hotter
        while link is not self._end:
            if isinstance(link, Run):
                return link
            link = link.hotter
        return None

    def pass_over(self, run: Run) -> None:
        """Leave `run`, the answer of `coldest`, where it is and do not offer it again."""
        leave(self._mark)
        enter_after(self._mark, run)

    def passed_over(self, limit: int) -> list[Run]:
        """The next `limit` runs that were passed over, going round; each at most once."""
        found: list[Run] = []
        link = self._again.hotter
        wrapped = False
        while len(found) < limit:
            if link is self._mark:
                if wrapped:
                    break
                wrapped = True
                link = self._end.hotter
                continue
            if link is self._again:
                break
            if isinstance(link, Run):
                found.append(link)
            link = link.hotter
        if found:
            leave(self._again)
            enter_after(self._again, found[-1])
        return found

    def close(self) -> None:
        """Take the markers of an empty ring apart."""
        self.near.close()
        for marker in (self._mark, self._again):
            leave(marker)
        del self._end.colder, self._end.hotter

    def __iter__(self) -> Iterator[Run]:
        """All runs, least recently used first; do not change the order meanwhile."""
        link = self._end.hotter
        while link is not self._end:
            if isinstance(link, Run):
                yield link
            link = link.hotter
