"""What the demo stores: pages for the requests of a trace, whose bytes follow from their keys.

Pure. A page is its key's mark followed by a stretch of one shared noise block, so making one costs
nothing and checking one is a comparison; two pages are equal nowhere but by chance.
"""

import random
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import xxhash

if TYPE_CHECKING:
    from nexuskv.client.space import Space
    from nexuskv.client.store import Store

TRACE: Final = "conversation"
PAGE_BYTES: Final = 64 * 1024
PAGE_TOKENS: Final = 512
KEY_BYTES: Final = 16
MODEL: Final = "demo/conversation"

_MARK_REPEATS: Final = 4
_MARK_BYTES: Final = KEY_BYTES * _MARK_REPEATS
_NOISE_BYTES: Final = 8 * 1024**2


def key_of(hash_id: int) -> bytes:
    """The page key of a trace's hash id, which stands for its tokens and all before them."""
    return xxhash.xxh3_128_digest(f"{TRACE} {hash_id}".encode())


def space_of(store: "Store") -> "Space":
    """The namespace of the pages."""
    return store.namespace(
        model=MODEL,
        dtype="uint8",
        page_tokens=PAGE_TOKENS,
        page_bytes=PAGE_BYTES,
        key_bytes=KEY_BYTES,
    )


class PageBytes:
    """The bytes that belong to each key; the same in every process."""

    def __init__(self) -> None:
        self._noise = memoryview(random.Random(1).randbytes(_NOISE_BYTES))

    def parts(self, key: bytes) -> list[memoryview]:
        """The page of `key` as two buffers, `PAGE_BYTES` in all, to put."""
        return [memoryview(key * _MARK_REPEATS), self._stretch(key)]

    def equal(self, key: bytes, page: bytearray) -> bool:
        """Whether `page` holds every byte of the page of `key`."""
        return (
            len(page) == PAGE_BYTES
            and page.startswith(key * _MARK_REPEATS)
            and page.endswith(self._stretch(key))
        )

    def _stretch(self, key: bytes) -> memoryview:
        length = PAGE_BYTES - _MARK_BYTES
        start = int.from_bytes(key[:8], "little") % (_NOISE_BYTES - length)
        return self._noise[start : start + length]


def infinite_hits(chains: Iterable[Sequence[int]]) -> int:
    """Pages a cache without bounds would have served: each chain's leading run of known ids."""
    known: set[int] = set()
    hits = 0
    for chain in chains:
        hits += sum(1 for _ in takewhile(known.__contains__, chain))
        known.update(chain)
    return hits
