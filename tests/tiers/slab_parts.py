"""An ssd folder small enough to look at byte by byte, and the memory that it is read into."""

import mmap
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from nexuskv.tiers.disk import Disk
from nexuskv.tiers.geometry import SlabGeometry
from nexuskv.tiers.record import Record, SlotState
from nexuskv.tiers.slabs import SlabFolder

KIB = 1024
FILE_BYTES = 256 * KIB
SLOT_BYTES = 16 * KIB
GEOMETRY = SlabGeometry(FILE_BYTES, SLOT_BYTES)
FOLDER_ID = bytes(range(16))
NAMESPACE = bytes(range(100, 116))


def open_folder(
    folder: Path,
    *,
    files: int = 4,
    geometry: SlabGeometry = GEOMETRY,
    create: bool = True,
    open_files_max: int = 8,
    disk: Disk | None = None,
) -> SlabFolder:
    return SlabFolder.open(
        folder,
        geometry=geometry,
        capacity_bytes=files * geometry.file_bytes,
        new_folder_id=FOLDER_ID,
        open_files_max=open_files_max,
        create=create,
        disk=disk,
    )


@contextmanager
def page_memory(content: bytes = b"", length: int = SLOT_BYTES) -> Generator[memoryview]:
    """Page-aligned memory, as a slot of the host tier is."""
    with mmap.mmap(-1, length) as memory:
        memory[: len(content)] = content
        with memoryview(memory) as view:
            yield view


def store(slabs: SlabFolder, file_index: int, slot_index: int, content: bytes) -> None:
    with page_memory(content) as view:
        slabs.write_from(
            view, file_index=file_index, slot_index=slot_index, size_bytes=len(content)
        )


def load(slabs: SlabFolder, file_index: int, slot_index: int, size_bytes: int) -> bytes:
    with page_memory() as view:
        slabs.read_into(view, file_index=file_index, slot_index=slot_index, size_bytes=size_bytes)
        return bytes(view[:size_bytes])


def record(slot_index: int, number: int, *, epoch: int = 0, size_bytes: int = 9000) -> bytes:
    """The record of a page, as a copy's row has it."""
    return Record(
        slot=slot_index,
        generation=1000 + number,
        state=SlotState.READY,
        size_bytes=size_bytes,
        epoch=epoch,
        checksum=2**60 + number,
        namespace_id=NAMESPACE,
        key=number.to_bytes(12, "big"),
    ).encode()
