"""Which pages in host memory are copied to the ssd, and when: a choice, no work.

Owns what a policy remembers of pages, in a bounded number of bytes. A policy knows neither what is
copied already nor what waits: it names slots, and whoever copies leaves out those that need no copy
now. Naming a page again is therefore free, and a page whose copy was dropped under pressure gets
another chance with its next use.

No I/O and no clock. Control thread.
"""

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from nexuskv.errors import ConfigError
from nexuskv.tiers.arrays import lazy_zeros
from nexuskv.tiers.chunks import SlotArray

Tags = npt.NDArray[np.uint64]

_NONE: Final = np.zeros(0, dtype=np.uint32)
_MIX: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_HALF: Final = np.uint64(32)
_WORD_BYTES: Final = 8


class Policy(Protocol):
    """Says which pages to copy to the ssd now. Slots are host slots, in chain order."""

    def committed(
        self, namespace_id: bytes, keys: bytes, slots: SlotArray, *, pressed: bool = False
    ) -> SlotArray:
        """Pages were published: which of them to copy now.

        Args:
            namespace_id: its 16 bytes.
            keys: their joined keys, of 8 bytes at least each.
            slots: one a key.
            pressed: whether so much waits to be copied that some of it will be dropped.
        """
        ...

    def used(self, slots: SlotArray) -> SlotArray:
        """Held pages were asked for by a reader: which of them to copy now."""
        ...

    def leaving(self, committed_count: int, *, free_count: int) -> int:
        """How many of the coldest pages to copy now, before their slots are wanted.

        Ask after pages of one slot size were published, and look for the coldest of that size that
        need a copy.

        Args:
            committed_count: how many were published.
            free_count: slots of that size which pages can still take without another going.
        """
        ...


class Published:
    """Remembers pages that were published.

    Args:
        pages_max: pages remembered, 8 bytes each. Each takes a place chosen by its tag from
            whatever page had it: half of all pages are forgotten once 0.7 x `pages_max` newer ones
            have come, but any page of a chain stands for those before it.
    """

    def __init__(self, *, pages_max: int) -> None:
        self._tags: Tags = lazy_zeros(pages_max, "<u8")

    def again(self, namespace_id: bytes, keys: bytes, slots: SlotArray) -> SlotArray:
        """The slots of those that were published before. All are remembered.

        A key commits to its prefix, so all pages before one that is remembered were published then
        too. Without them a copy could not outlive them.
        """
        if not len(slots):
            return slots
        tags = page_tags(namespace_id, keys, len(slots))
        places = tags % np.uint64(len(self._tags))
        seen = np.flatnonzero(self._tags[places] == tags)
        self._tags[places] = tags
        return slots[: seen[-1] + 1] if len(seen) else _NONE


class WriteThrough:
    """Every page as soon as it is published; while the ssd does not keep up, as `OnSecondUse`."""

    def __init__(self, published: Published) -> None:
        self._published = published

    def committed(
        self, namespace_id: bytes, keys: bytes, slots: SlotArray, *, pressed: bool = False
    ) -> SlotArray:
        """All of them. What cannot all be copied is better chosen than cut off where it is full."""
        again = self._published.again(namespace_id, keys, slots)
        return again if pressed else slots

    def used(self, slots: SlotArray) -> SlotArray:
        """All of them: one that still has no copy was left out when it was published."""
        return slots

    def leaving(self, committed_count: int, *, free_count: int) -> int:
        """None: what leaves host memory was named before."""
        return 0


class OnSecondUse:
    """A page that was used after it was published, or is published again after it was lost."""

    def __init__(self, published: Published) -> None:
        self._published = published

    def committed(
        self, namespace_id: bytes, keys: bytes, slots: SlotArray, *, pressed: bool = False
    ) -> SlotArray:
        """Those that were published before."""
        return self._published.again(namespace_id, keys, slots)

    def used(self, slots: SlotArray) -> SlotArray:
        """All of them: to be published was their first use."""
        return slots

    def leaving(self, committed_count: int, *, free_count: int) -> int:
        """None: what was used once may be lost."""
        return 0


class OnEvict:
    """A page that is about to leave host memory.

    Args:
        ahead_pages_max: pages named at a time, and free slots from which on none are.
    """

    def __init__(self, *, ahead_pages_max: int) -> None:
        self._ahead_pages_max = ahead_pages_max

    def committed(
        self, namespace_id: bytes, keys: bytes, slots: SlotArray, *, pressed: bool = False
    ) -> SlotArray:
        """None: they are the hottest."""
        return _NONE

    def used(self, slots: SlotArray) -> SlotArray:
        """None: they are the hottest."""
        return _NONE

    def leaving(self, committed_count: int, *, free_count: int) -> int:
        """Twice as many as came, so that the copied stretch at the cold end grows until it lasts.

        None while there are free slots enough for what may come.
        """
        if free_count >= self._ahead_pages_max:
            return 0
        return min(2 * committed_count, self._ahead_pages_max)


def make_policy(name: str, *, second_use_pages_max: int, ahead_pages_max: int) -> Policy:
    """The policy that the setting `ssd_policy` names.

    Raises:
        ConfigError: there is none of that name.
    """
    if name == "write_through":
        return WriteThrough(Published(pages_max=second_use_pages_max))
    if name == "on_second_use":
        return OnSecondUse(Published(pages_max=second_use_pages_max))
    if name == "on_evict":
        return OnEvict(ahead_pages_max=ahead_pages_max)
    raise ConfigError(f"no placement policy {name!r}")


def page_tags(namespace_id: bytes, keys: bytes, count: int) -> Tags:
    """A number a page, never 0. Two pages that share one are only copied when they need not be.

    Args:
        namespace_id: its 16 bytes.
        keys: `count` joined keys, of 8 bytes at least each.
        count: at least 1.
    """
    rows = np.frombuffer(keys, dtype=np.uint8).reshape(count, -1)
    key_bytes = rows.shape[1]
    seed = int.from_bytes(namespace_id[:_WORD_BYTES], "little")
    tags: Tags = np.full(count, seed, dtype=np.uint64)
    # The last word of a key may share bytes with the one before it.
    for at in (*range(0, key_bytes - _WORD_BYTES, _WORD_BYTES), key_bytes - _WORD_BYTES):
        words = np.ascontiguousarray(rows[:, at : at + _WORD_BYTES]).view("<u8")[:, 0]
        tags = (tags ^ words) * _MIX
        tags ^= tags >> _HALF
    tags[tags == 0] = 1  # 0 is an empty place
    return tags
