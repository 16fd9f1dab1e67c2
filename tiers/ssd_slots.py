"""What ssd slots do, and the rows that the ssd tier answers about them. Plain records."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nexuskv.tiers.chunks import SlotArray
from nexuskv.tiers.record import SlotState


class SsdSlotState(IntEnum):
    """What an ssd slot is doing. The numbers are those by which the ledger counts slots."""

    FREE = SlotState.FREE
    WRITING = SlotState.WRITING  # a copy is on its way into it
    READY = SlotState.READY  # its copy is durable, and so is its row
    UNKNOWN = SlotState.QUARANTINED  # found on disk; its row, if it has one, is not read yet
    DROPPING = SlotState.UNLINKED  # its row is being deleted


class FileToMake(NamedTuple):
    """A file the worker should make: preallocated, with a durable superblock for this slot size."""

    file_index: int
    slot_bytes: int


class Taken(NamedTuple):
    """Slots that became WRITING, and what must be made for the next ones."""

    slots: SlotArray
    files: list[FileToMake]


class SlotsOfFile(NamedTuple):
    """The slots of one file that are not free, ascending, with an `SsdSlotState` each."""

    slot_bytes: int
    slots: SlotArray
    states: npt.NDArray[np.uint8]


class FileRow(NamedTuple):
    """One file for inspection and for choosing which to empty. Counts of slots."""

    file_index: int
    slot_bytes: int  # 0: made once, without a slot size now
    used: int
    writing: int
    unknown: int
    dropping: int


class SsdUsage(NamedTuple):
    """Slots of one size, counted by what they do."""

    slot_bytes: int
    free: int
    used: int
    writing: int
    unknown: int
    dropping: int
