"""How a tier's memory is used, counted in slots: the rows that inspection and metrics show."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nexuskv.tiers.chunks import SlotArray


@dataclass(frozen=True, slots=True)
class ChunkSlots:
    """The slots of one chunk that are not free."""

    slot_bytes: int
    slots: SlotArray
    states: npt.NDArray[np.uint8]  # one `SlotState` a slot


class ChunkRow(NamedTuple):
    """One chunk for inspection; `slot_bytes` 0 means spare. Counts of slots, free ones left out."""

    chunk_index: int
    slot_bytes: int
    used: int
    writing: int
    quarantined: int
    unlinked: int


class SizeUsage(NamedTuple):
    """Slots of one size, counted by what they do."""

    slot_bytes: int
    free: int
    used: int
    writing: int
    quarantined: int
    unlinked: int
