"""Copying pages from host memory to the ssd, in the background.

Owns the queue of pages to copy and the copies under way, together at most `copy_queue_bytes`: a
slow disk makes it drop work, never grow, and never delays a put. A host slot that is being copied
is kept where it is until the answer; a copy counts only if its page is still the same then.

Pages are queued by the size of their ssd slots and sent in groups of `copy_group_bytes`. Room on
the ssd is made ahead, because a row must be deleted durably before its slot is used again.
Control thread only.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nexuskv.config import Config
from nexuskv.control.asked import Asked, TokenAnswer
from nexuskv.control.copies import Copies
from nexuskv.control.counters import Counters
from nexuskv.control.epochs import Epochs
from nexuskv.control.namespaces import Namespace
from nexuskv.control.pages import Pages, as_slots, on_record
from nexuskv.control.placement import Policy
from nexuskv.control.ssdroom import SsdRoom
from nexuskv.index.radix import RadixIndex
from nexuskv.index.tree import ABSENT
from nexuskv.tiers.host import HostTier, SlotArray
from nexuskv.tiers.record import RECORD_BYTES, SlotState, new_batch, seal
from nexuskv.types import FAR_PLACES, PageStatus
from nexuskv.worker.commands import CopiedOut, CopyOut, CopyOutRow

_LOG = logging.getLogger("nexuskv.control")
Numbers: TypeAlias = npt.NDArray[np.uint64]

_GROUPS_MAX: Final = 4  # under way at a time: one is written while others are prepared


Settled = Callable[[int], None]
"""Told once: the ssd slot of the copy; its row is gone, or on its way out, if its page is."""


@dataclass(slots=True, eq=False)
class Item:
    """A page to copy, as it was when it was chosen."""

    namespace: Namespace
    key: bytes
    slot: int
    generation: int
    epoch: int
    ssd_slot: int = ABSENT

    @property
    def size_bytes(self) -> int:
        """Bytes it counts for."""
        return self.namespace.slot_bytes


class Copying:
    """Host → ssd."""

    def __init__(
        self,
        *,
        config: Config,
        index: RadixIndex,
        pages: Pages,
        copies: Copies,
        epochs: Epochs,
        room: SsdRoom,
        asked: Asked,
        policy: Policy,
        counters: Counters,
        ready: Callable[[], bool],
    ) -> None:
        self._config = config
        self._index = index
        self._pages = pages
        self._copies = copies
        self._epochs = epochs
        self._room = room
        self._asked = asked
        self._policy = policy
        self._counters = counters
        self._ready = ready
        # By ssd slot size: host slot → page, oldest first.
        self._queues: dict[int, dict[int, Item]] = {}
        self._under_way: dict[int, Item] = {}  # by host slot
        self._groups = 0  # commands under way
        self.queued_bytes = 0  # of both
        self._in_service = True
        self._is_stalled = False  # until the worker answers something
        self._watched: dict[int, list[Settled]] = {}  # by host slot
        self._published: dict[int, int] = {}  # host slot size → pages since `make_ahead`

    # --- what the policy is told

    def committed(self, namespace: Namespace, keys: bytes, slots: SlotArray) -> None:
        """Pages were published."""
        pressed = 2 * self.queued_bytes >= self._config.copy_queue_bytes
        chosen = self._policy.committed(namespace.id, keys, slots, pressed=pressed)
        if len(chosen):
            self._offer(namespace, keys, slots, chosen)
        size = namespace.slot_bytes
        self._published[size] = self._published.get(size, 0) + len(slots)

    def used(self, namespace: Namespace, keys: bytes, places: SlotArray) -> None:
        """Pages were asked for; `places` has one a key, whatever it is."""
        near = places[places < FAR_PLACES]
        bare = self._copies.without(near)
        if len(bare) and len(chosen := self._policy.used(bare)):
            self._offer(namespace, keys, places, chosen)

    def make_ahead(self) -> None:
        """Copy pages that will leave host memory soon, if the policy does so; then send."""
        while self._published:
            size, count = self._published.popitem()
            tier = self._pages.tier
            free = tier.free_count(size) + tier.spare_chunks * (tier.chunk_bytes // size)
            count = self._policy.leaving(count, free_count=free)
            if count:
                self._offer_cold(size, count)
        self.pump()

    def _offer(
        self, namespace: Namespace, keys: bytes, slots: SlotArray, chosen: SlotArray
    ) -> None:
        at = np.flatnonzero(np.isin(slots, chosen)).tolist() if len(chosen) < len(slots) else None
        width = namespace.key_bytes
        for index in range(len(slots)) if at is None else at:
            key = keys[index * width : (index + 1) * width]
            self._add(namespace, key, int(slots[index]))

    def _offer_cold(self, slot_bytes: int, count: int) -> None:
        cold = self._index.cold_near(count, wants=self._wants_copy, group=slot_bytes)
        for tree, key, slot in cold:
            self._add(self._pages.namespace_of(tree), key, slot)

    def _wants_copy(self, slot: int) -> bool:
        return not self._copies.has(slot) and slot not in self._under_way

    def _add(self, namespace: Namespace, key: bytes, slot: int) -> None:
        size = self._copies.slot_bytes_of(namespace)
        if not size or slot in self._under_way or not self._in_service:
            return
        queue = self._queues.setdefault(size, {})
        known = queue.get(slot)
        generation = self._pages.tier.generation_of(slot)
        if known is not None:
            if known.generation == generation:
                return
            self._forget(queue, known)
        if self.queued_bytes + namespace.slot_bytes > self._config.copy_queue_bytes:
            self._counters.add("copies_dropped")
            return
        queue[slot] = Item(namespace, key, slot, generation, namespace.tree.epoch)
        self.queued_bytes += namespace.slot_bytes

    def _forget(self, queue: dict[int, Item], item: Item) -> None:
        del queue[item.slot]
        self.queued_bytes -= item.size_bytes

    # --- sending

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the pages that are not under way yet."""
        return self.queued_bytes - sum(item.size_bytes for item in self._under_way.values())

    @property
    def under_way_count(self) -> int:
        """Pages that are being copied."""
        return len(self._under_way)

    def is_under_way(self, slot: int) -> bool:
        """Whether the page in a host slot is being copied."""
        return slot in self._under_way

    def when_settled(self, slot: int, told: Settled) -> None:
        """Call `told` when the copy that is under way from a host slot has been answered."""
        self._watched.setdefault(slot, []).append(told)

    def resume(self) -> None:
        """The data plane has answered something, or slots came free."""
        self._is_stalled = False
        self.pump()

    def pump(self) -> None:
        """Send what can be sent."""
        if self._is_stalled or not self._ready():
            return
        for size, queue in self._queues.items():
            while queue and self._groups < _GROUPS_MAX:
                if not self._send_group(size, queue):
                    break
        self._is_stalled = any(self._queues.values())

    def end_service(self) -> None:
        """The tier has left service: nothing is copied any more."""
        self._in_service = False
        self.drop_queue()

    def drop_queue(self) -> None:
        """Copy nothing of what waits."""
        for queue in self._queues.values():
            self._counters.add("copies_dropped", len(queue))
            for item in list(queue.values()):
                self._forget(queue, item)

    def _send_group(self, size: int, queue: dict[int, Item]) -> bool:
        """Send the next pages of a queue, or give them up; False when they have to wait."""
        group = self._next_group(size, queue)
        if not group:
            return False
        slots = self._room.take(size, len(group))
        if not len(slots):
            if not self._room.will_come(size):
                # Nothing on the ssd can go for these: later ones would wait behind them for ever.
                self._counters.add("copies_dropped", len(group))
                for item in group:
                    self._forget(queue, item)
                return True
            return False
        sent = group[: len(slots)]
        for item, slot in zip(sent, slots.tolist(), strict=True):
            item.ssd_slot = slot
        files, indexes = self._copies.tier.place_of(slots)
        for number in np.unique(files).tolist():
            at = np.flatnonzero(files == number)
            part = [sent[index] for index in at.tolist()]
            if not self._send(queue, part, number, indexes[at]):
                self._copies.tier.free(as_slots([item.ssd_slot for item in part]))
                return False
        return True

    def _next_group(self, size: int, queue: dict[int, Item]) -> list[Item]:
        """The pages at the head of a queue that may be copied now."""
        count = max(1, self._config.copy_group_bytes // size)
        group: list[Item] = []
        stale: list[Item] = []
        for item in queue.values():
            if len(group) == count:
                break
            stays = self._epochs.has_room(item.namespace) and self._is_same(item)
            if not stays or self._copies.has(item.slot):
                stale.append(item)
            elif self._may_copy(item.namespace):
                group.append(item)
        for item in stale:
            self._forget(queue, item)
        self._counters.add("copies_skipped", len(stale))
        return group

    def _is_same(self, item: Item) -> bool:
        """Whether the page is still where it was, and what it was."""
        tree = item.namespace.tree
        return (
            item.epoch == tree.epoch
            and self._pages.tier.generation_of(item.slot) == item.generation
            and tree.find(item.key, touch=False)[0] == item.slot
        )

    def _may_copy(self, namespace: Namespace) -> bool:
        """Whether the catalogue knows the namespace; it is told of it otherwise."""
        if self._epochs.is_durable(namespace):
            return True
        if not self._epochs.is_saving(namespace):
            self._epochs.enter(namespace, lambda error: self._entered(namespace, error))
        return False

    def _entered(self, namespace: Namespace, error: str | None) -> None:
        if error is None:
            return
        # Its pages have another chance when they are used next: nothing is tried again and again.
        _LOG.error("namespace %s cannot be entered on the ssd: %s", namespace.id.hex(), error)
        self._counters.add("ssd_errors")
        for queue in self._queues.values():
            for item in [item for item in queue.values() if item.namespace is namespace]:
                self._forget(queue, item)
                self._counters.add("copies_dropped")

    def _send(
        self, queue: dict[int, Item], items: list[Item], file_index: int, indexes: SlotArray
    ) -> bool:
        slots = as_slots([item.slot for item in items])
        ssd_slots = as_slots([item.ssd_slot for item in items])
        offsets, sums = places_of(self._pages.tier, slots)
        generations = self._copies.tier.generations_of(ssd_slots)
        records = records_of(items, indexes, sums, generations)
        rows = tuple(
            CopyOutRow(offset, item.namespace.page_bytes, file_index, index, record)
            for offset, item, index, record in zip(
                offsets.tolist(), items, indexes.tolist(), records, strict=True
            )
        )

        def copied(answer: TokenAnswer) -> None:
            assert isinstance(answer, CopiedOut)
            self._copied(items, sums, answer.statuses)

        if not self._asked.ask(lambda token: CopyOut(token, rows), copied):
            return False
        self._groups += 1
        self._pages.keep(slots.tolist())
        for item in items:
            del queue[item.slot]
            self._under_way[item.slot] = item
        return True

    # --- answers

    def _copied(self, items: list[Item], sums: Numbers, statuses: bytes) -> None:
        self._groups -= 1
        done: list[Item] = []
        done_sums: list[int] = []
        for at, (item, status) in enumerate(zip(items, statuses, strict=True)):
            del self._under_way[item.slot]
            self.queued_bytes -= item.size_bytes
            if status == PageStatus.HIT and self._is_same(item):
                done.append(item)
                done_sums.append(int(sums[at]))
            else:
                self._undo(item, status)
        if done and self._in_service:
            ssd_slots = as_slots([item.ssd_slot for item in done])
            self._copies.tier.publish(ssd_slots, np.array(done_sums, dtype=np.uint64))
            for namespace, own in by_namespace(done).items():
                near = as_slots([item.slot for item in own])
                self._copies.attach(namespace, near, as_slots([item.ssd_slot for item in own]))
            self._counters.add("copies_done", len(done))
        for item in items:
            for told in self._watched.pop(item.slot, ()):
                told(item.ssd_slot)
        self._pages.let_go(item.slot for item in items)
        if items:
            self._room.make_ahead(self._copies.slot_bytes_of(items[0].namespace))

    def _undo(self, item: Item, status: int) -> None:
        """A copy that failed, or whose page is another one by now."""
        slot = as_slots([item.ssd_slot])
        if status == PageStatus.HIT:
            self._counters.add("copies_skipped")
            self._copies.drops.add(item.namespace, slot)
            return
        self._counters.add("copies_failed")
        if status == PageStatus.NO_SPACE:
            self._copies.tier.free(slot)
            return
        # The worker may have died between the row and its answer: there may be one.
        self._counters.add("ssd_errors")
        self._copies.drops.add(item.namespace, slot)


def by_namespace(items: Iterable[Item]) -> dict[Namespace, list[Item]]:
    """The items of each namespace, in order."""
    found: dict[Namespace, list[Item]] = {}
    for item in items:
        found.setdefault(item.namespace, []).append(item)
    return found


def places_of(tier: HostTier, slots: SlotArray) -> tuple[Numbers, Numbers]:
    """Offsets in the data file and checksums of the pages in some host slots."""
    rows = np.frombuffer(tier.descriptors(slots, 1), dtype="<u8").reshape(-1, 4)
    return rows[:, 1], rows[:, 2]


def records_of(
    items: list[Item], indexes: SlotArray, sums: Numbers, generations: Numbers
) -> list[bytes]:
    """The catalogue's rows for copies: 256 bytes each."""
    batch = new_batch(len(items))
    batch["slot"] = indexes
    batch["generation"] = generations
    batch["checksum"] = sums
    batch["state"] = SlotState.READY.value
    batch["epoch"] = [item.epoch for item in items]
    batch["size_bytes"] = [item.namespace.page_bytes for item in items]
    for at, item in enumerate(items):
        width = item.namespace.key_bytes
        state, parent = on_record(item.namespace.tree.parent_of(item.key))
        batch["namespace_id"][at] = np.void(item.namespace.id)
        batch["key_bytes"][at] = width
        batch["key"][at, :width] = np.frombuffer(item.key, dtype=np.uint8)
        batch["parent_state"][at] = state.value
        batch["parent"][at, : len(parent)] = np.frombuffer(parent, dtype=np.uint8)
    seal(batch)
    raw = batch.tobytes()
    return [raw[at : at + RECORD_BYTES] for at in range(0, len(raw), RECORD_BYTES)]
