"""What every transport of page bytes does, whatever carries them. Callers see only this.

A transfer always ends by its deadline, with bytes or a status, and when a call has returned nothing
writes into the caller's memory any more. A transport checks what it delivers: a page that is HIT
has the bytes that were committed under that namespace and key.
"""

import math
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, Protocol, Self

from nexuskv.dataplane.batch import Pages, Regions, Stored


class Transport(Protocol):
    """Moves pages between the caller's memory and a segment. Thread-safe.

    `deadline_s` is absolute, on CLOCK_MONOTONIC. Batches that are wrong in themselves raise before
    a byte moves: `ConfigError` for the caller's items, `ProtocolError` for a descriptor that leaves
    its segment. `TransferFailed` is raised once closed.
    """

    name: ClassVar[str]
    """Short name for status lines: `shm`, `tcp`, `mooncake`."""

    def load(
        self,
        pages: Pages,
        into: Sequence[Regions],
        *,
        deadline_s: float = math.inf,
        threads: int = 1,
    ) -> bytes:
        """Bring each page into its item of `into`: HIT, MISS, CORRUPT, STALE or UNAVAILABLE.

        Unless a page is HIT or MISS, what its item holds afterwards is undefined.
        """
        ...

    def store(
        self,
        pages: Pages,
        from_: Sequence[Regions],
        *,
        deadline_s: float = math.inf,
        threads: int = 1,
    ) -> Stored:
        """Take each item of `from_` to its slot: STORED with its checksum, MISS or UNAVAILABLE.

        A slot that was not STORED holds undefined bytes and must not be committed.
        """
        ...

    def check(self, pages: Pages, *, deadline_s: float = math.inf, threads: int = 1) -> bytes:
        """Judge each page where it lies: HIT, CORRUPT, MISS or UNAVAILABLE."""
        ...

    def close(self) -> None:
        """End everything under way and let go of the segment. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
