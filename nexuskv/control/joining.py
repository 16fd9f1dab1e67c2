"""From records in any order to chains in prefix order: what one namespace's tree is grown from.

Each record names its page's parent. Pages are mostly recorded as they were put, each behind its
parent: such stretches are published at once when what they hang under is in the index. What is left
is linked with the records of its parents, by hashes of the keys, in numpy and a few thousand at a
time; then chains are walked from pages whose parent is none or is in the index by then. What cannot
be reached so has lost its parent and becomes fragments, the topmost page of each first.

Bounds: some 200 bytes a record, all gone at the end. Work comes as generators that yield between
steps of a few ms; those that look at all links at once take some 30 ms a million records.
Control loop only.
"""

import secrets
from array import array
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from nexuskv import UNKNOWN
from nexuskv.control.namespaces import Namespace
from nexuskv.index.chains import Parent
from nexuskv.tiers.host import SlotArray
from nexuskv.tiers.record import Batch, ParentState
from nexuskv.types import Kind

_STEP_PAGES: Final = 1024  # pages of one chain published in one step
_STEP_RECORDS: Final = 4096
_WORD_BYTES: Final = 8

Words: TypeAlias = npt.NDArray[np.uint64]
Publish: TypeAlias = "Callable[[Namespace, Parent, bytes, array[int]], None]"


class _Rows(NamedTuple):
    """Records of one namespace by column; keys as words, padded with zeros."""

    keys: Words  # shape (n, words)
    parents: Words  # shape (n, words)
    tags: Words  # hashes of the keys
    parent_tags: Words
    states: npt.NDArray[np.uint8]  # `ParentState`
    places: SlotArray

    def pick(self, which: npt.NDArray[np.bool_]) -> "_Rows":
        """Some of them."""
        return _Rows(
            self.keys[which],
            self.parents[which],
            self.tags[which],
            self.parent_tags[which],
            self.states[which],
            self.places[which],
        )

    @classmethod
    def join(cls, parts: "list[_Rows]") -> "_Rows":
        """Those of all parts, of which there is at least one."""
        return cls(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.parents for part in parts]),
            np.concatenate([part.tags for part in parts]),
            np.concatenate([part.parent_tags for part in parts]),
            np.concatenate([part.states for part in parts]),
            np.concatenate([part.places for part in parts]),
        )


class _Links(NamedTuple):
    """How the rows hang together; -1 is no row."""

    parent: npt.NDArray[np.int64]
    following: list[int]  # the one row below a row; -1 also where several are
    branches: dict[int, list[int]]  # rows with several below, and those


class Joiner:
    """The pages of one namespace that are on record and not in its tree yet."""

    def __init__(self, namespace: Namespace, publish: Publish) -> None:
        """`publish` puts pages, in chain order under a parent, into the tree."""
        self.namespace = namespace
        self.epoch = namespace.tree.epoch
        self._publish = publish
        self._width = namespace.key_bytes
        self._words = -(-self._width // _WORD_BYTES)
        # Random, so that nobody can choose keys that are hard to tell apart.
        odd = [secrets.randbits(64) | 1 for _ in range(self._words)]
        self._factors = np.array(odd, dtype=np.uint64)
        self._batches: list[_Rows] = []  # not linked yet
        self._rows = self._empty()
        self._links = _Links(np.zeros(0, dtype=np.int64), [], {})
        self._done = bytearray()  # by row: whether it was published
        self._ready: list[tuple[Parent, int]] = []

    def add(self, records: Batch, places: SlotArray) -> None:
        """Take records of this namespace and epoch, with keys of its length; publish what can be.

        Args:
            records: shape (n,).
            places: shape (n,), where each page rests.
        """
        if not len(records):
            return
        keys, parents = self._words_of(records["key"]), self._words_of(records["parent"])
        states = records["parent_state"]
        if self.namespace.tree.kind is Kind.ATTENTION:
            left = self._publish_stretches(keys, parents, states, places)
        else:
            self._publish(self.namespace, None, self._blob(keys), array("I", places.tobytes()))
            return
        if left.any():
            keys, parents = keys[left], parents[left]
            self._batches.append(
                _Rows(
                    keys,
                    parents,
                    (keys * self._factors).sum(axis=1, dtype=np.uint64),
                    (parents * self._factors).sum(axis=1, dtype=np.uint64),
                    states[left],
                    places[left],
                )
            )

    def _publish_stretches(
        self, keys: Words, parents: Words, states: npt.NDArray[np.uint8], places: SlotArray
    ) -> npt.NDArray[np.bool_]:
        """Publish the stretches that hang under something; which rows are left."""
        count, width, slot_of = len(keys), self._width, self.namespace.tree.slot_of
        left = np.zeros(count, dtype=np.bool_)
        follows = np.zeros(count, dtype=np.bool_)
        follows[1:] = (states[1:] == ParentState.KEY) & (parents[1:] == keys[:-1]).all(axis=1)
        starts = np.flatnonzero(~follows)
        above, where = self._blob(parents[starts]), array("I", places.tobytes())
        blob = self._blob(keys)
        ends = [*starts[1:].tolist(), count]
        for at, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
            parent: Parent = None
            if states[start] != ParentState.ROOT:
                parent = above[at * width : (at + 1) * width]
                if states[start] != ParentState.KEY or slot_of(parent) is None:
                    left[start:end] = True
                    continue
            chain = blob[start * width : end * width]
            self._publish(self.namespace, parent, chain, where[start:end])
        return left

    def _blob(self, words: Words) -> bytes:
        raw = (
            np.ascontiguousarray(words)
            .view(np.uint8)
            .reshape(len(words), _WORD_BYTES * self._words)
        )
        joined: bytes = raw[:, : self._width].tobytes()
        return joined

    def attach(self) -> Iterator[None]:
        """Publish all that hangs below a prefix's first page or below a held page."""
        yield from self._link()
        tree = self.namespace.tree
        heads = np.flatnonzero(self._links.parent < 0)
        states = self._rows.states[heads]
        self._ready += [(None, row) for row in heads[states == ParentState.ROOT].tolist()]
        yield from self._walk()
        if tree.page_count:
            for row in heads[states == ParentState.KEY].tolist():
                parent = self._parent_of(row)
                if tree.slot_of(parent) is not None:
                    self._ready.append((parent, row))
                    yield from self._walk()

    def scatter(self) -> Iterator[None]:
        """Publish the rest: fragments, the topmost of each first. Nothing waits afterwards."""
        for row in np.flatnonzero(self._links.parent < 0).tolist():
            if not self._done[row]:
                known = self._rows.states[row] == ParentState.KEY
                self._ready.append((self._parent_of(row) if known else UNKNOWN, row))
                yield from self._walk()
        # What is left now are records that name each other as parents in a ring.
        for row in np.flatnonzero(self._pending()).tolist():
            if not self._done[row]:
                self._ready.append((self._parent_of(row), row))
                yield from self._walk()

    def drop(self) -> "array[int]":
        """Forget all that waits; returns its places."""
        waiting = [self._rows.pick(self._pending()), *self._batches]
        places = array("I", np.concatenate([rows.places for rows in waiting]).tobytes())
        self._batches.clear()
        self._ready.clear()
        self._done = bytearray(b"\1") * len(self._done)
        return places

    # --- linking

    def _link(self) -> Iterator[None]:
        """Link what came with what was left from before, each row with its parent's row."""
        rows = _Rows.join(self._left())
        self._rows, self._done = rows, bytearray(len(rows.tags))
        yield
        parent = np.full(len(rows.tags), -1, dtype=np.int64)
        below = np.flatnonzero(rows.states == ParentState.KEY)
        held, wanted = _by_tag(rows.tags), below[_by_tag(rows.parent_tags[below])]
        yield
        for some_held, some_wanted in _in_parts(rows, held, wanted):
            some_held = some_held[np.argsort(rows.tags[some_held], kind="stable")]
            at = np.searchsorted(rows.tags[some_held], rows.parent_tags[some_wanted])
            found = some_held[np.minimum(at, len(some_held) - 1)]
            same = (rows.keys[found] == rows.parents[some_wanted]).all(axis=1)
            parent[some_wanted[same]] = found[same]
            yield
        count = np.bincount(parent[parent >= 0], minlength=len(parent))
        yield
        following = np.full(len(parent), -1, dtype=np.int64)
        linked = np.flatnonzero(parent >= 0)
        alone = count[parent[linked]] == 1
        following[parent[linked[alone]]] = linked[alone]
        self._links = _Links(parent, following.tolist(), {})
        yield
        yield from self._note_branches(linked[~alone])

    def _note_branches(self, below: npt.NDArray[np.intp]) -> Iterator[None]:
        branches = self._links.branches
        for start in range(0, len(below), _STEP_RECORDS):
            some = below[start : start + _STEP_RECORDS]
            for above, row in zip(self._links.parent[some].tolist(), some.tolist(), strict=True):
                branches.setdefault(above, []).append(row)
            yield

    def _left(self) -> list[_Rows]:
        left = [self._empty(), self._rows.pick(self._pending()), *self._batches]
        self._batches.clear()
        return left

    def _pending(self) -> npt.NDArray[np.bool_]:
        pending: npt.NDArray[np.bool_] = np.frombuffer(bytes(self._done), dtype=np.uint8) == 0
        return pending

    # --- publishing

    def _walk(self) -> Iterator[None]:
        """Publish from what is ready downwards, each page after its parent."""
        while self._ready:
            parent, row = self._ready.pop()
            chain = self._follow(row)
            keys = self._keys_of(chain)
            self._publish(self.namespace, parent, keys, self._places_of(chain))
            last, tail = chain[-1], keys[-self._width :]
            below = self._links.branches.get(last)
            if below is None:
                below = [self._links.following[last]]
            self._ready += [(tail, each) for each in below if each >= 0 and not self._done[each]]
            yield

    def _follow(self, row: int) -> list[int]:
        """The rows from one on until they end, branch or are many."""
        following, done = self._links.following, self._done
        chain: list[int] = []
        while row >= 0 and not done[row] and len(chain) < _STEP_PAGES:
            done[row] = 1
            chain.append(row)
            row = following[row]
        return chain

    def _keys_of(self, rows: list[int]) -> bytes:
        return self._blob(self._rows.keys[rows])

    def _places_of(self, rows: list[int]) -> "array[int]":
        return array("I", self._rows.places[rows].tobytes())

    def _parent_of(self, row: int) -> bytes:
        parent: bytes = self._rows.parents[row].tobytes()
        return parent[: self._width]

    def _words_of(self, field: npt.NDArray[np.uint8]) -> Words:
        padded = np.ascontiguousarray(field[:, : self._words * _WORD_BYTES])
        return padded.view(np.uint64).reshape(len(field), self._words)

    def _empty(self) -> _Rows:
        words, tags = np.zeros((0, self._words), np.uint64), np.zeros(0, np.uint64)
        return _Rows(words, words, tags, tags, np.zeros(0, np.uint8), np.zeros(0, np.uint32))


def _by_tag(tags: Words) -> npt.NDArray[np.intp]:
    """Rows in the order of the first 16 bits of their tags: a sort in linear time."""
    return np.argsort((tags >> np.uint64(48)).astype(np.uint16), kind="stable")


def _in_parts(
    rows: _Rows, held: npt.NDArray[np.intp], wanted: npt.NDArray[np.intp]
) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    """Cut rows by tag and rows by parent's tag at the same tags, a few thousand of both a part."""
    if not len(wanted):
        return
    # In order of their first bits, both can be cut where those differ.
    edges = np.linspace(0, 1 << 16, 2 + len(held) // _STEP_RECORDS).astype(np.int64)
    shift = np.uint64(48)
    cuts_held = np.searchsorted((rows.tags[held] >> shift).astype(np.int64), edges)
    cuts_wanted = np.searchsorted((rows.parent_tags[wanted] >> shift).astype(np.int64), edges)
    for index in range(len(edges) - 1):
        some_held = held[cuts_held[index] : cuts_held[index + 1]]
        some_wanted = wanted[cuts_wanted[index] : cuts_wanted[index + 1]]
        if len(some_held) and len(some_wanted):
            yield some_held, some_wanted
