"""Checking what a caller hands in, and cutting it to what a message may hold. Pure functions.

Everything a caller can get wrong is found here, before a byte is sent.
"""

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final, Protocol

from nexuskv.dataplane.batch import Buffer, Regions
from nexuskv.errors import ConfigError
from nexuskv.types import DESCRIPTOR_BYTES

_TRAITS: Final = attrgetter("nbytes", "c_contiguous", "readonly")
_BOTH: Final = (False, True)

FRAME_BYTES: Final = 1024
"""Room in a message for everything but keys and per-page results."""


def check_memory(
    items: Sequence[Regions], *, page_count: int, page_bytes: int, writable: bool
) -> None:
    """Check the memory of a batch: one item a page, each of `page_bytes` bytes in all.

    Raises:
        ConfigError: another number of items, another size, no buffer, not contiguous, or read-only
            where bytes are to be written; names the item.
    """
    if len(items) != page_count:
        raise ConfigError(f"{page_count} keys, but memory for {len(items)} pages")
    if _all_plain(items, page_bytes=page_bytes, writable=writable):
        return
    for index, item in enumerate(items):
        if isinstance(item, list | tuple):
            size_bytes = sum([_region_bytes(part, index, writable) for part in item])
        else:
            size_bytes = _region_bytes(item, index, writable)  # type: ignore[arg-type]  # checked there
        if size_bytes != page_bytes:
            raise ConfigError(f"item {index} has {size_bytes} bytes, pages have {page_bytes}")


def _all_plain(items: Sequence[Regions], *, page_bytes: int, writable: bool) -> bool:
    """Whether every item is one good buffer: the usual batch, looked at without a Python loop."""
    try:
        found = set(map(_TRAITS, map(memoryview, items)))  # type: ignore[arg-type]  # else an error
    except (TypeError, ValueError, BufferError):
        return False
    good = {(page_bytes, True, False)} if writable else {(page_bytes, True, x) for x in _BOTH}
    return found <= good


def _region_bytes(region: Buffer, index: int, writable: bool) -> int:
    try:
        view = memoryview(region)
    except (TypeError, ValueError, BufferError) as exc:
        raise ConfigError(f"item {index} is no memory: {exc}") from exc
    if not view.c_contiguous:
        raise ConfigError(f"item {index} is not contiguous")
    if writable and view.readonly:
        raise ConfigError(f"item {index} is read-only")
    return view.nbytes


def check_duration(name: str, duration_s: float) -> None:
    """Check a time that a caller gives, in seconds.

    Raises:
        ConfigError: negative, infinite or no number.
    """
    if not 0 <= duration_s < math.inf:
        raise ConfigError(f"{name} is {duration_s}, must be 0 or more seconds")


def first_places(keys: Sequence[bytes], from_: Sequence[Regions]) -> list[int] | None:
    """Where each key of a put stands first, as indexes in order; None when no key comes twice.

    Raises:
        ConfigError: a key comes twice with unequal bytes.
    """
    if len(set(keys)) == len(keys):
        return None
    places: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        first = places.setdefault(key, index)
        if first != index and bytes_of(from_[first]) != bytes_of(from_[index]):
            raise ConfigError(f"key {index} is key {first} again, with other bytes")
    return list(places.values())


def bytes_of(item: Regions) -> bytes:
    """One page's bytes as one object; a copy."""
    if isinstance(item, list | tuple):
        return b"".join([memoryview(part).tobytes() for part in item])
    return memoryview(item).tobytes()  # type: ignore[arg-type]  # a buffer: checked before


class MessageLimits(Protocol):
    """What bounds one message: the daemon's limits, or before it was asked the configuration."""

    @property
    def message_bytes_max(self) -> int:
        """Bytes of one message."""
        ...

    @property
    def batch_pages_max(self) -> int:
        """Pages that one message may name."""
        ...


def pages_per_message(limits: MessageLimits, *, key_bytes: int, batch_pages: int) -> int:
    """How many pages one request of chains may name, so that request and reply both fit."""
    by_size = (limits.message_bytes_max - FRAME_BYTES) // max(key_bytes, DESCRIPTOR_BYTES + 1)
    return max(1, min(batch_pages, limits.batch_pages_max, by_size))


def spans(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut `[0, count)` into ranges of at most `most`."""
    for start in range(0, count, most):
        yield start, min(start + most, count)
