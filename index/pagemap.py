"""The flat map of one tree: page key → the run that holds the page.

Owns the map's shards. One large dict stops the process for ~100 ms when it grows, so past
`WHOLE_PAGES_MAX` pages the map is split into 256 dicts by one byte of the key. Which byte is chosen
then, as the one whose values are spread most evenly: keys may well share their first bytes.
Threading: one thread, the control loop.
"""

from collections import Counter
from itertools import islice
from typing import Final

from nexuskv.index.run import Run
from nexuskv.key import split_keys

WHOLE_PAGES_MAX: Final = 8192
SAMPLE_KEYS: Final = 1024


class PageMap:
    """Key → run. Read and written by `shards[key[byte]]`, inline where it must be fast.

    Callers that add pages call `make_room` first and look at `shards` and `byte` after it.
    """

    __slots__ = ("_whole", "byte", "shards")

    shards: list[dict[bytes, Run]]
    byte: int

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every page."""
        whole: dict[bytes, Run] = {}
        self.shards = [whole] * 256
        self.byte = 0
        self._whole = True

    def get(self, key: bytes) -> Run | None:
        """The run that holds a page; None when it is not held."""
        return self.shards[key[self.byte]].get(key)

    def repoint(self, run: Run, key_bytes: int) -> None:
        """Name `run` as the holder of each of its pages."""
        shards, byte, blob = self.shards, self.byte, run.blob
        for at in range(0, len(blob), key_bytes):
            key = blob[at : at + key_bytes]
            shards[key[byte]][key] = run

    def make_room(self, blob: bytes, key_bytes: int) -> None:
        """Split the map before these keys make it hold over `WHOLE_PAGES_MAX` in one dict."""
        whole = self.shards[0]
        if not self._whole or len(whole) + len(blob) // key_bytes <= WHOLE_PAGES_MAX:
            return
        sample = [
            *islice(whole, SAMPLE_KEYS),
            *split_keys(blob[: SAMPLE_KEYS * key_bytes], key_bytes),
        ]
        self._whole = False
        self.byte = byte = _most_even_byte(sample)
        shards: list[dict[bytes, Run]] = [{} for _ in range(256)]
        self.shards = shards
        for key, run in whole.items():
            shards[key[byte]][key] = run

    def keys_after(self, cursor: bytes | None, limit: int) -> tuple[list[bytes], bytes | None]:
        """Up to `limit` keys that follow `cursor` in an order that adding and removing keep.

        Returns:
            The keys and the cursor of the next call, None at the end. A key held throughout is
            seen; it is seen twice only if the map was split in between.
        """
        byte = self.byte
        lead, last = (0, b"") if cursor is None or cursor[0] != byte else (cursor[1], cursor[2:])
        if self._whole:
            every = sorted(k for k in self.shards[0] if (k[byte], k) > (lead, last))
            every.sort(key=lambda key: key[byte])
            found = every[: limit + 1]
        else:
            found = sorted(k for k in self.shards[lead] if k > last)[: limit + 1]
            for shard in self.shards[lead + 1 :]:
                if len(found) > limit:
                    break
                found += sorted(shard)[: limit + 1 - len(found)]
        if len(found) <= limit:
            return found, None
        last = found[limit - 1]
        return found[:limit], bytes((byte, last[byte])) + last


def _most_even_byte(sample: list[bytes]) -> int:
    """The byte position whose most frequent value is rarest."""

    def worst(position: int) -> int:
        return max(Counter(key[position] for key in sample).values())

    return min(range(len(sample[0])), key=worst)
