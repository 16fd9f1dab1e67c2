"""An ssd folder with any number of pages on record, made by the code that writes real ones.

Only the pages' bytes are cheap: slab files are preallocated, so each slot reads as zeros, and every
record has the checksum of a page of zeros under its own key. A daemon finds nothing odd in it, and
serves all of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from nexuskv.dataplane.checksum import hash64, mix
from nexuskv.namespace import NamespaceRecord, namespace_id
from nexuskv.tiers.catalogue import Catalogue, CatalogueRow
from nexuskv.tiers.geometry import SlabGeometry
from nexuskv.tiers.record import RECORD_BYTES, ParentState, SlotState, new_batch, seal
from nexuskv.tiers.slabs import SlabFolder

OPEN_FILES: Final = 16
ROWS_A_BATCH: Final = 4096


@dataclass(frozen=True, slots=True)
class Chains:
    """Keys of equal chains, joined: row `i` is page `i % length` of chain `i // length`."""

    keys: bytes
    key_bytes: int
    length: int

    @property
    def count(self) -> int:
        """Pages in all."""
        return len(self.keys) // self.key_bytes

    def chain(self, number: int) -> list[bytes]:
        """The keys of one chain."""
        first = number * self.length
        return [self.key(row) for row in range(first, first + self.length)]

    def key(self, row: int) -> bytes:
        """One key."""
        return self.keys[row * self.key_bytes : (row + 1) * self.key_bytes]


def fill(folder: Path, *, file_bytes: int, record: NamespaceRecord, chains: Chains) -> None:
    """Make an ssd folder that holds all pages of the chains.

    Raises:
        NexusError: the folder is in use or the disk is full.
    """
    geometry = SlabGeometry(file_bytes, record.page_bytes)
    per_file = geometry.slot_count(record.page_bytes)
    file_count = -(-chains.count // per_file)
    encoded = record.encode()
    with SlabFolder.open(
        folder,
        geometry=geometry,
        capacity_bytes=file_count * file_bytes,
        new_folder_id=bytes(16),
        open_files_max=OPEN_FILES,
    ) as slabs:
        for file_index in range(file_count):
            slabs.make(file_index, record.page_bytes)
        with Catalogue.open(
            slabs.catalogue_folder,
            geometry=geometry,
            files=lambda: slabs.files,
            start_over=False,
        ) as catalogue:
            catalogue.save_namespace(namespace_id(encoded), encoded, 0)
            for first in range(0, chains.count, ROWS_A_BATCH):
                last = min(first + ROWS_A_BATCH, chains.count)
                catalogue.put(_rows(namespace_id(encoded), record, chains, (first, last), per_file))


def _rows(
    name: bytes, record: NamespaceRecord, chains: Chains, span: tuple[int, int], per_file: int
) -> list[CatalogueRow]:
    first, last = span
    count, size = last - first, chains.key_bytes
    zeros = hash64(bytes(record.page_bytes))
    numbers = np.arange(first, last)
    every = np.frombuffer(chains.keys, np.uint8).reshape(-1, size)
    batch = new_batch(count)
    batch["generation"] = numbers + 1
    batch["checksum"] = [zeros ^ mix(name, chains.key(row)) for row in range(first, last)]
    batch["size_bytes"] = record.page_bytes
    batch["slot"] = numbers % per_file
    batch["state"] = SlotState.READY.value
    batch["key_bytes"] = size
    heads = numbers % chains.length == 0
    batch["parent_state"] = np.where(heads, ParentState.ROOT.value, ParentState.KEY.value)
    batch["namespace_id"] = np.frombuffer(name, "V16")
    batch["key"][:, :size] = every[first:last]
    batch["parent"][:, :size] = every[np.maximum(numbers - 1, 0)]
    batch["parent"][heads] = 0
    seal(batch)
    raw = batch.tobytes()
    return [
        CatalogueRow(
            row // per_file, row % per_file, raw[at * RECORD_BYTES : (at + 1) * RECORD_BYTES]
        )
        for at, row in enumerate(range(first, last))
    ]
