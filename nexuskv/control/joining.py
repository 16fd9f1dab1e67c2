"""From records in any order to chains in prefix order: what one namespace's tree is grown from.

Records that follow one another in their tier's order are one run already. A run waits for its
parent under the parent's key; once that page is in the tree, the run and all that waits for its own
pages follow. What waits for ever has lost its parent: it becomes fragments, topmost first.

Bounds: as many runs as there are records, all gone at the end. Each step is a few ms at most: the
work comes as generators that yield between steps. Control loop only.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import numpy as np

from nexuskv import UNKNOWN
from nexuskv.control.namespaces import Namespace
from nexuskv.index.chains import Parent
from nexuskv.key import split_keys
from nexuskv.tiers.host import SlotArray
from nexuskv.tiers.record import Batch, ParentState
from nexuskv.types import Kind

_STEP_PAGES: Final = 1024  # pages of one chain published in one step
_STEP_RUNS: Final = 256

Run: TypeAlias = "tuple[bytes, array[int]]"  # keys joined, and one place a key
Publish: TypeAlias = "Callable[[Namespace, Parent, bytes, array[int]], None]"


class Joiner:
    """The pages of one namespace that are on record and not in its tree yet."""

    def __init__(self, namespace: Namespace, publish: Publish) -> None:
        """`publish` puts pages, in chain order under a parent, into the tree."""
        self.namespace = namespace
        self.epoch = namespace.tree.epoch
        self._publish = publish
        self._width = namespace.key_bytes
        self._chained = namespace.tree.kind is Kind.ATTENTION
        self._ready: list[tuple[Parent, Run]] = []
        self._unknown: list[Run] = []
        # Parent's key → the run below it, or a list of several. Many dicts: a large one stops the
        # loop while it grows.
        self._shards: list[dict[bytes, Run | list[Run]]] = [{} for _ in range(256)]

    def add(self, records: Batch, places: SlotArray) -> None:
        """Take records of this namespace and epoch, with keys of its length.

        Args:
            records: shape (n,), in the order of their tier.
            places: shape (n,), where each page rests.
        """
        if not len(records):
            return
        width = self._width
        keys = np.ascontiguousarray(records["key"][:, :width])
        every = array("I", places.astype(np.uint32).tobytes())
        if not self._chained:
            self._ready.append((None, (keys.tobytes(), every)))
            return
        parents = np.ascontiguousarray(records["parent"][:, :width])
        states = records["parent_state"]
        follows = np.zeros(len(records), dtype=np.bool_)
        # As fixed texts of one length they are equal exactly when their bytes are.
        text = f"S{width}"
        follows[1:] = parents[1:].view(text)[:, 0] == keys[:-1].view(text)[:, 0]
        follows &= states == ParentState.KEY.value
        starts = np.flatnonzero(~follows)
        blob, above = keys.tobytes(), parents[starts].tobytes()
        heads = starts.tolist()
        for index, (start, end, state) in enumerate(
            zip(heads, [*heads[1:], len(records)], states[starts].tolist(), strict=True)
        ):
            run = blob[start * width : end * width], every[start:end]
            if state == ParentState.KEY:
                self._wait(above[index * width : (index + 1) * width], run)
            elif state == ParentState.ROOT:
                self._ready.append((None, run))
            else:
                self._unknown.append(run)

    def attach(self) -> Iterator[None]:
        """Publish all that hangs below a prefix's first page or below a held page."""
        while self._ready:
            parent, run = self._ready.pop()
            blob, places = self._lengthen(run)
            self._publish(self.namespace, parent, blob, places)
            shards = self._shards
            for key in split_keys(blob, self._width):
                if key in shards[key[-1]]:
                    self._release(key)
            yield

    def scatter(self) -> Iterator[None]:
        """Publish the rest: fragments, the topmost of each first. Nothing waits afterwards."""
        self._ready += [(UNKNOWN, run) for run in self._unknown]
        self._unknown.clear()
        yield from self.attach()
        waiting: list[set[bytes]] = [set() for _ in range(256)]
        for count, (blob, _) in enumerate(self._runs()):
            for key in split_keys(blob, self._width):
                waiting[key[-1]].add(key)
            if count % _STEP_RUNS == 0:
                yield
        for shard in self._shards:
            for parent in [key for key in shard if key not in waiting[key[-1]]]:
                self._release(parent)
            yield from self.attach()
        # What is left now are records that name each other as parents in a ring.
        for shard in self._shards:
            while shard:
                self._release(next(iter(shard)))
                yield from self.attach()

    def drop(self) -> "array[int]":
        """Forget all that waits; returns its places."""
        places: array[int] = array("I")
        for _, (_, each) in self._ready:
            places.extend(each)
        for _, each in [*self._unknown, *self._runs()]:
            places.extend(each)
        self._ready.clear()
        self._unknown.clear()
        for shard in self._shards:
            shard.clear()
        return places

    def _wait(self, parent: bytes, run: Run) -> None:
        tree = self.namespace.tree
        if tree.page_count and tree.slot_of(parent) is not None:
            self._ready.append((parent, run))
            return
        shard = self._shards[parent[-1]]
        before = shard.setdefault(parent, run)
        if before is run:
            return
        if isinstance(before, list):
            before.append(run)
        else:
            shard[parent] = [before, run]

    def _release(self, parent: bytes) -> None:
        found = self._shards[parent[-1]].pop(parent)
        if isinstance(found, list):
            self._ready += [(parent, run) for run in found]
        else:
            self._ready.append((parent, found))

    def _lengthen(self, run: Run) -> Run:
        """Join the runs that follow, one after another, without a branch."""
        shards, width = self._shards, self._width
        last = run[0][-width:]
        following = shards[last[-1]].get(last)
        if not isinstance(following, tuple):
            return run
        blobs, places = [run[0]], run[1][:]
        while isinstance(following, tuple) and len(places) < _STEP_PAGES:
            del shards[last[-1]][last]
            blobs.append(following[0])
            places.extend(following[1])
            last = following[0][-width:]
            following = shards[last[-1]].get(last)
        return b"".join(blobs), places

    def _runs(self) -> Iterator[Run]:
        for shard in self._shards:
            for found in shard.values():
                if isinstance(found, list):
                    yield from found
                else:
                    yield found
