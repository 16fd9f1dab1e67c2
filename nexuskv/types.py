"""The nouns that every part shares: kinds, page statuses, descriptors, matches."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from nexuskv.errors import ConfigError

PAGE_ALIGN_BYTES: Final = 4096
"""Slots start at multiples of this in their segment: what O_DIRECT and page tables want."""

FAR_PLACES: Final = 1 << 31
"""Where a page rests is one u32, its place: below this a slot of host memory, a *near* place; from
here on this plus a slot of the ssd tier, a *far* one. 0xFFFF_FFFF is no place."""

DESCRIPTOR_BYTES: Final = 32
DESCRIPTOR_FORMAT: Final = struct.Struct("<IIQQQ")


class Kind(IntEnum):
    """What a namespace's pages hold, and so which of them a hit of length L needs."""

    ATTENTION = 0  # every page of [0, L)
    WINDOW = 1  # the last `window_pages` pages before L
    STATE = 2  # the one page that ends at L


class PageStatus(IntEnum):
    """What became of one page of a batch. Truthy when the caller has what it asked for."""

    HIT = 0  # get: the bytes are in the caller's buffer, checked
    STORED = 1  # put: this call's bytes are readable now
    EXISTS = 2  # put: the page was there already, or another writer won
    MISS = 3  # get: not held
    CORRUPT = 4  # get: bytes did not match the checksum; reported to the daemon
    STALE = 5  # get: the lease ended or the slot changed owner during the copy
    NO_SPACE = 6  # put: no slot could be had
    UNAVAILABLE = 7  # no daemon, or not within the deadline
    DROPPED = 8  # put: cleared, cancelled or cut off after an earlier page failed

    def __bool__(self) -> bool:
        return self <= PageStatus.EXISTS


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where one page's bytes lie. Cheap to copy; owns nothing.

    On the wire 32 bytes, little-endian: segment u32, size u32, offset u64, checksum u64,
    generation u64.
    """

    segment_id: int
    offset_bytes: int
    size_bytes: int
    checksum: int  # XXH3-64 of the payload xor XXH3-64 of namespace id and key
    generation: int  # of the slot: changes whenever the slot changes owner

    def __post_init__(self) -> None:
        if self.offset_bytes % PAGE_ALIGN_BYTES:
            raise ConfigError(f"offset {self.offset_bytes} is not {PAGE_ALIGN_BYTES}-byte aligned")

    def encode(self) -> bytes:
        """The 32 bytes of the wire form."""
        return DESCRIPTOR_FORMAT.pack(
            self.segment_id, self.size_bytes, self.offset_bytes, self.checksum, self.generation
        )

    @classmethod
    def decode(cls, raw: bytes) -> "Descriptor":
        """Read the wire form; `struct.error` when it is not 32 bytes."""
        segment_id, size_bytes, offset_bytes, checksum, generation = DESCRIPTOR_FORMAT.unpack(raw)
        return cls(segment_id, offset_bytes, size_bytes, checksum, generation)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest held prefix of one chain.

    `page_count` counts pages from the chain's start; `tier_counts` splits them by the fastest tier
    that holds each; `load_s` estimates how long loading them would take, in seconds.
    """

    page_count: int
    tier_counts: Mapping[str, int] = field(default_factory=dict)
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MatchAll:
    """The joint hit of several namespaces: `token_count` tokens that every one of them can serve.

    `matches` has one `Match` per (space, keys) given, in that order, each counting only pages that
    the joint hit needs: all of them for attention, the last window, the one state page.
    """

    token_count: int
    matches: tuple[Match, ...]
