"""How an ssd folder is cut: files of one length, a superblock each, then slots of one size.

Control and worker both compute with it, so that neither has to ask the other where a slot lies.
Pure arithmetic; any thread.
"""

from dataclasses import dataclass
from typing import Final

from nexuskv.config import format_size
from nexuskv.errors import ConfigError

SUPERBLOCK_BYTES: Final = 4096
SLAB_ALIGN_BYTES: Final = 4096
"""What O_DIRECT wants of offsets, lengths and addresses."""

SSD_SLOTS_MAX: Final = (1 << 31) - 1
"""Slot ids of the ssd tier fit a place beside the host's, and never meet the one for no place."""


@dataclass(frozen=True, slots=True)
class SlabGeometry:
    """File length and least slot size of one folder; both are fixed when the folder is made.

    Raises:
        ConfigError: a size is not a multiple of 4096, or a file has no room for one slot.
    """

    file_bytes: int
    slot_bytes_min: int

    def __post_init__(self) -> None:
        for name, size in (("file", self.file_bytes), ("least slot", self.slot_bytes_min)):
            if size <= 0 or size % SLAB_ALIGN_BYTES:
                raise ConfigError(f"ssd {name} size {size} is not a multiple of {SLAB_ALIGN_BYTES}")
        if self.slot_bytes_min > self.usable_bytes:
            raise ConfigError(
                f"ssd files of {format_size(self.file_bytes)} (ssd_file_bytes) have no room for a "
                f"slot of {format_size(self.slot_bytes_min)} (ssd_slot_bytes_min)"
            )

    @property
    def usable_bytes(self) -> int:
        """Bytes of a file behind its superblock."""
        return self.file_bytes - SUPERBLOCK_BYTES

    @property
    def stride(self) -> int:
        """Slot ids of a file: slot id = file index * stride + slot index."""
        return self.file_bytes // self.slot_bytes_min

    def slot_count(self, slot_bytes: int) -> int:
        """Slots of this size in one file."""
        return self.usable_bytes // slot_bytes

    def is_slot_size(self, slot_bytes: int) -> bool:
        """Whether files may be cut into slots of this size."""
        fits = self.slot_bytes_min <= slot_bytes <= self.usable_bytes
        return fits and slot_bytes % SLAB_ALIGN_BYTES == 0

    def slot_bytes_of(self, page_bytes: int) -> int:
        """The slot size for pages of this size.

        Raises:
            ConfigError: the page is empty or larger than a file.
        """
        slot_bytes = max(self.slot_bytes_min, round_up(page_bytes))
        if page_bytes <= 0 or slot_bytes > self.usable_bytes:
            raise ConfigError(
                f"a page of {page_bytes} bytes does not fit an ssd file of {self.file_bytes} bytes "
                f"(ssd_file_bytes)"
            )
        return slot_bytes

    def offset_bytes(self, slot_bytes: int, slot_index: int) -> int:
        """Where a slot starts in its file."""
        return SUPERBLOCK_BYTES + slot_index * slot_bytes

    def file_count(self, capacity_bytes: int) -> int:
        """How many files a capacity allows.

        Raises:
            ConfigError: not one, or so many that their slots have no ids.
        """
        count = capacity_bytes // self.file_bytes
        if count < 1 or count * self.stride > SSD_SLOTS_MAX:
            raise ConfigError(
                f"ssd capacity of {capacity_bytes} bytes (ssd_capacity) is not between one file of "
                f"{self.file_bytes} bytes (ssd_file_bytes) and {SSD_SLOTS_MAX} slots of "
                f"{self.slot_bytes_min} bytes (ssd_slot_bytes_min)"
            )
        return count


def round_up(size_bytes: int) -> int:
    """The next multiple of `SLAB_ALIGN_BYTES`."""
    return -(-size_bytes // SLAB_ALIGN_BYTES) * SLAB_ALIGN_BYTES
