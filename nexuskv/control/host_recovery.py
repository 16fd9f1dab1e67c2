"""The host tier's part of a recovery: its records, and the processes of the run before.

Owns the rule of I14 across a restart: a slot that a process of an earlier run may still write is
quarantined until that process has ended. Control loop only.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from nexuskv.control.counters import Counters
from nexuskv.control.earlier import EarlierProcesses
from nexuskv.control.namespaces import Namespace
from nexuskv.control.recovery import Found
from nexuskv.key import split_keys
from nexuskv.tiers.host import HostTier, SlotArray
from nexuskv.tiers.owner import Process

_LOG = logging.getLogger("nexuskv.control")
_STEP_ROWS: Final = 2048  # records read at a time: 1 to 2 ms


class HostRecords:
    """A `RecoverySource` over the host tier."""

    def __init__(
        self,
        *,
        tier: HostTier,
        earlier: EarlierProcesses,
        counters: Counters,
        on_memory: Callable[[], None],
    ) -> None:
        """`on_memory` is told when chunks may be there to be populated."""
        self._tier = tier
        self._earlier = earlier
        self._counters = counters
        self._on_memory = on_memory
        self._mappers: set[Process] = set()
        if self.ended:
            self._all_read()

    @property
    def rows_total(self) -> int:
        """Records in the table, free ones among them."""
        return self._tier.adoption.rows_total

    @property
    def rows_done(self) -> int:
        """Those read."""
        return self._tier.adoption.rows_done

    @property
    def ended(self) -> bool:
        """Whether all were."""
        return not self._tier.adoption.pending

    def read(self) -> Found:
        """Read the next records."""
        adopted = self._tier.adoption.step(_STEP_ROWS)
        for process, slots in adopted.written.items():
            self._counters.add("quarantined_slots", len(slots))
            self._earlier.when_ended(process, partial(self._tier.free, slots))
        if self.ended:
            self._all_read()
            self._on_memory()
        return Found(adopted.records, adopted.slots)

    def refuse(self, places: SlotArray) -> None:
        """Free the slots."""
        self._tier.free(places)

    def entered(self, namespace: Namespace, places: SlotArray) -> None:
        """The index and the tier say it all."""

    def also_held(self, place: int, near: int) -> None:
        """Never told: host memory has no far places."""
        raise AssertionError(f"place {place} is no far one (also at {near})")

    def forget(self, namespace: Namespace, keys: bytes) -> tuple[SlotArray, int]:
        """Make pages that are only on record unfindable, for this run and all later ones.

        Returns:
            The slots of those that were read already: they hold no page now, but are not free; and
            how many pages there were.
        """
        names = split_keys(keys, namespace.key_bytes)
        slots, struck_count = self._tier.adoption.forget(namespace.id, names)
        self._tier.unlink(slots)
        return slots, len(slots) + struck_count

    def _all_read(self) -> None:
        adoption = self._tier.adoption
        if not adoption.waits_for_processes:
            return
        self._mappers = set(adoption.mapped_by)
        _LOG.warning(
            "recovery: %d processes still map the segment; what they might write, and memory above "
            "the capacity, waits for their end",
            len(self._mappers),
        )
        for process in list(self._mappers):
            self._earlier.when_ended(process, partial(self._mapper_ended, process))

    def _mapper_ended(self, process: Process) -> None:
        self._mappers.discard(process)
        if not self._mappers:
            self._tier.free(self._tier.adoption.processes_ended())
            self._on_memory()
