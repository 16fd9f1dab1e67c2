"""A transport that misbehaves on demand, around one that does not.

Ships with the protocol, so that clients of transports can be tested against every fault a network
or a memory has. Time is the fake's clock: a delayed page is late when the clock says so, and
nothing sleeps. Keeps the contract of `Transport` under every fault: wrong bytes are never HIT.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar, Final, Self

from nexuskv.clock import ManualClock
from nexuskv.dataplane.batch import Buffer, Pages, Regions, Stored
from nexuskv.dataplane.checksum import page_checksum
from nexuskv.dataplane.transport import Transport
from nexuskv.types import DESCRIPTOR_BYTES, Descriptor, PageStatus

_CHECKSUM_BYTES: Final = 8


@dataclass(slots=True)
class Faults:
    """What goes wrong, by page index in each batch. Change it between calls.

    `delay_s` passes before each page that moves. `cut_after` pages of a batch the connection
    breaks: the rest is unavailable, the first of them with half its bytes moved.
    """

    drop: set[int] = field(default_factory=set[int])
    flip: set[int] = field(default_factory=set[int])
    delay_s: float = 0.0
    cut_after: int | None = None


class FakeTransport:
    """`inner` with faults. Not thread-safe: a test drives it."""

    name: ClassVar[str] = "fake"

    def __init__(self, inner: Transport, *, clock: ManualClock, faults: Faults | None = None):
        """Deadlines of this transport are read on `clock`; `inner` gets none."""
        self._inner = inner
        self._clock = clock
        self.faults = faults or Faults()

    def load(
        self,
        pages: Pages,
        into: Sequence[Regions],
        *,
        deadline_s: float = math.inf,
        threads: int = 1,
    ) -> bytes:
        """As `Transport.load`, with the faults: a flipped page arrives damaged, so CORRUPT."""
        fates = self._fates(pages, deadline_s)
        statuses = bytearray(self._inner.load(_without(pages, fates), into, threads=threads))
        for at, fate in enumerate(fates):
            if fate is None and at in self.faults.flip and statuses[at] == PageStatus.HIT:
                statuses[at] = self._damage(pages, at, into[at])
            elif fate is not None:
                statuses[at] = fate
                self._move_half(at, into[at])
        return bytes(statuses)

    def store(
        self,
        pages: Pages,
        from_: Sequence[Regions],
        *,
        deadline_s: float = math.inf,
        threads: int = 1,
    ) -> Stored:
        """As `Transport.store`; a flipped page is STORED under a checksum its bytes fail."""
        fates = self._fates(pages, deadline_s)
        stored = self._inner.store(_without(pages, fates), from_, threads=threads)
        statuses, checksums = bytearray(stored.statuses), bytearray(stored.checksums)
        for at, fate in enumerate(fates):
            if fate is not None:
                statuses[at] = fate
            elif at in self.faults.flip and statuses[at] == PageStatus.STORED:
                checksums[at * _CHECKSUM_BYTES] ^= 1
        return Stored(bytes(statuses), bytes(checksums))

    def check(self, pages: Pages, *, deadline_s: float = math.inf, threads: int = 1) -> bytes:
        """As `Transport.check`; a flipped page is CORRUPT."""
        fates = self._fates(pages, deadline_s)
        statuses = bytearray(self._inner.check(_without(pages, fates), threads=threads))
        for at, fate in enumerate(fates):
            if fate is not None:
                statuses[at] = fate
            elif at in self.faults.flip and statuses[at] == PageStatus.HIT:
                statuses[at] = PageStatus.CORRUPT
        return bytes(statuses)

    def close(self) -> None:
        """Close the inner transport too."""
        self._inner.close()

    def _fates(self, pages: Pages, deadline_s: float) -> list[PageStatus | None]:
        """The status that a fault gives each page; None where it may move."""
        fates: list[PageStatus | None] = []
        for at, descriptor in enumerate(_descriptors(pages)):
            if descriptor.size_bytes == 0:
                fates.append(None)
                continue
            self._clock.advance(self.faults.delay_s)
            cut = self.faults.cut_after is not None and at >= self.faults.cut_after
            late = self._clock.now() >= deadline_s
            lost = at in self.faults.drop or cut or late
            fates.append(PageStatus.UNAVAILABLE if lost else None)
        return fates

    def _move_half(self, at: int, item: Regions) -> None:
        """A broken transfer has written into the destination; no caller may rely on its bytes."""
        if at == self.faults.cut_after:
            first = memoryview(_parts(item)[0]).cast("B")
            first[: len(first) // 2] = bytes(len(first) // 2)

    def _damage(self, pages: Pages, at: int, item: Regions) -> PageStatus:
        """Flip a bit of what arrived, then judge it like any page."""
        parts = _parts(item)
        view = next(memoryview(part).cast("B") for part in parts if len(memoryview(part)))
        view[0] ^= 1
        key = bytes(memoryview(pages.keys)[at * pages.key_bytes :][: pages.key_bytes])
        arrived = page_checksum(b"".join(parts), pages.namespace_id, key)
        good = arrived == _descriptors(pages)[at].checksum
        return PageStatus.HIT if good else PageStatus.CORRUPT

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _descriptors(pages: Pages) -> list[Descriptor]:
    raw = bytes(memoryview(pages.descriptors))
    starts = range(0, len(raw), DESCRIPTOR_BYTES)
    return [Descriptor.decode(raw[at : at + DESCRIPTOR_BYTES]) for at in starts]


def _without(pages: Pages, fates: list[PageStatus | None]) -> Pages:
    """The batch with the pages that do not move named no more."""
    rows = zip(_descriptors(pages), fates, strict=True)
    kept = (row.encode() if fate is None else bytes(DESCRIPTOR_BYTES) for row, fate in rows)
    return pages._replace(descriptors=b"".join(kept))


def _parts(item: Regions) -> Sequence[Buffer]:
    return item if isinstance(item, list | tuple) else [item]  # type: ignore[list-item,unused-ignore]  # what is no list or tuple is a buffer
