"""What the two headers of an ssd folder say: its `FORMAT` file, and each slab file's superblock.

Both carry their own checksum, so that a torn or flipped one is told from one of another product,
version or folder. Pure functions; any thread.
"""

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from nexuskv.config import format_size
from nexuskv.errors import ConfigError
from nexuskv.tiers.geometry import SUPERBLOCK_BYTES, SlabGeometry

FORMAT_MAGIC: Final = b"NexusKV ssd\n\0\0\0\0"
SUPERBLOCK_MAGIC: Final = b"NKVSLAB\0"
SSD_VERSION: Final = 0
"""Of everything in the folder; `FORMAT` says it for all."""
FOLDER_ID_BYTES: Final = 16

FORMAT_FIELDS: Final = struct.Struct("<16sIIQQII16s")
FORMAT_BYTES: Final = FORMAT_FIELDS.size + 8
SUPERBLOCK_FIELDS: Final = struct.Struct("<8sIIQQII16s")
SUPERBLOCK_CHECKSUM_OFFSET: Final = SUPERBLOCK_BYTES - 8

_VERSION_OFFSET: Final = len(FORMAT_MAGIC)  # in every version there will be


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """What the `FORMAT` file says. `folder_id` is random and ties the slab files to the folder."""

    geometry: SlabGeometry
    folder_id: bytes

    def encode(self) -> bytes:
        """The file's content, with its own checksum."""
        if len(self.folder_id) != FOLDER_ID_BYTES:
            raise ConfigError(f"a folder id has {FOLDER_ID_BYTES} bytes: {self.folder_id!r}")
        cut = self.geometry
        raw = FORMAT_FIELDS.pack(
            FORMAT_MAGIC, SSD_VERSION, SUPERBLOCK_BYTES, cut.file_bytes, cut.slot_bytes_min,
            cut.stride, 0, self.folder_id,
        )  # fmt: skip
        return raw + _hash(raw)

    @classmethod
    def decode(cls, raw: bytes) -> "FolderFormat":
        """Read a `FORMAT` file.

        Raises:
            ConfigError: it is another product's, of another version, or damaged; says which.
        """
        if raw[: len(FORMAT_MAGIC)] != FORMAT_MAGIC:
            raise ConfigError("it is not NexusKV's, or damaged")
        version = int.from_bytes(raw[_VERSION_OFFSET : _VERSION_OFFSET + 4], "little")
        if version != SSD_VERSION:
            raise ConfigError(
                f"it says version {version}, and this NexusKV reads version {SSD_VERSION}"
            )
        body, own = raw[: FORMAT_FIELDS.size], raw[FORMAT_FIELDS.size :]
        if len(raw) != FORMAT_BYTES or own != _hash(body):
            raise ConfigError("it is damaged")
        _, _, superblock, file_bytes, slot_bytes_min, _, _, folder_id = FORMAT_FIELDS.unpack(body)
        if superblock != SUPERBLOCK_BYTES:
            raise ConfigError(f"it says superblocks of {superblock} bytes, not {SUPERBLOCK_BYTES}")
        return cls(SlabGeometry(file_bytes, slot_bytes_min), folder_id)

    def check_same(self, wanted: SlabGeometry) -> None:
        """Check that a folder is cut as the configuration says.

        Raises:
            ConfigError: it is not; names both.
        """
        for setting, there, given in (
            ("ssd_file_bytes", self.geometry.file_bytes, wanted.file_bytes),
            ("ssd_slot_bytes_min", self.geometry.slot_bytes_min, wanted.slot_bytes_min),
        ):
            if there != given:
                raise ConfigError(
                    f"it was made with {setting} {there} ({format_size(there)}), and now "
                    f"{setting} is {given} ({format_size(given)})"
                )


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the first block of a slab file says."""

    file_index: int
    slot_bytes: int
    folder: FolderFormat

    def encode(self) -> bytes:
        """The whole block, with its own checksum at its end."""
        cut = self.folder.geometry
        raw = SUPERBLOCK_FIELDS.pack(
            SUPERBLOCK_MAGIC, SSD_VERSION, self.file_index, cut.file_bytes, self.slot_bytes,
            cut.slot_count(self.slot_bytes), 0, self.folder.folder_id,
        ).ljust(SUPERBLOCK_CHECKSUM_OFFSET, b"\0")  # fmt: skip
        return raw + _hash(raw)


def slot_bytes_in(raw: bytes, file_index: int, folder: FolderFormat) -> int | None:
    """The slot size that a superblock says.

    Returns:
        None when the block is torn, flipped, or was written for another file or folder.
    """
    _, _, _, _, slot_bytes, *_ = SUPERBLOCK_FIELDS.unpack_from(raw.ljust(SUPERBLOCK_BYTES, b"\0"))
    if not folder.geometry.is_slot_size(slot_bytes):
        return None
    return slot_bytes if raw == Superblock(file_index, slot_bytes, folder).encode() else None


def _hash(raw: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")
