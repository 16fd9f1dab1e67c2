"""The ssd folder as the worker opens it: its slab files, and the catalogue that names their pages.

Loads numpy and, when opened, RocksDB: only a worker with an ssd tier imports this, and late.
"""

import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from nexuskv.errors import NexusError
from nexuskv.tiers.catalogue import Catalogue, CatalogueRow
from nexuskv.tiers.disk import Disk
from nexuskv.tiers.geometry import SlabGeometry
from nexuskv.tiers.slabs import SlabFolder
from nexuskv.worker.codec import WorkerSettings
from nexuskv.worker.commands import FileRow, NamespaceRow

_LOG = logging.getLogger("nexuskv.worker")
_FOLDER_ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Ssd:
    """Both halves of one open ssd folder. `close` is idempotent."""

    slabs: SlabFolder
    catalogue: Catalogue

    @classmethod
    def open(cls, settings: WorkerSettings, *, disk: Disk | None = None) -> Self:
        """Take the folder that the settings name; what is bad in it is logged and given up.

        Args:
            settings: the worker's.
            disk: what reads and writes; None is the kernel.

        Raises:
            ConfigError: the folder is in use, not ours, or cut otherwise.
            TransferFailed: the disk fails.
            OutOfSpace: the disk is full.
        """
        geometry = SlabGeometry(settings.ssd_file_bytes, settings.ssd_slot_bytes_min)
        slabs = SlabFolder.open(
            Path(settings.ssd_dir),
            geometry=geometry,
            capacity_bytes=settings.ssd_capacity,
            new_folder_id=secrets.token_bytes(_FOLDER_ID_BYTES),
            open_files_max=settings.ssd_open_files,
            disk=disk,
        )
        try:
            catalogue = Catalogue.open(
                slabs.catalogue_folder,
                geometry=geometry,
                files=lambda: slabs.files,
                start_over=True,
            )
        except NexusError:
            slabs.close()
            raise
        for removed in slabs.removed:
            _LOG.warning("ssd file %s is removed: %s", removed.path, removed.reason)
        if catalogue.started_over is not None:
            _LOG.error("the ssd catalogue begins anew: %s", catalogue.started_over)
        return cls(slabs, catalogue)

    def put_rows(self, rows: Iterable[tuple[int, int, bytes]]) -> None:
        """Write rows (file index, slot index, record) in one durable batch; see `Catalogue.put`."""
        self.catalogue.put(CatalogueRow(*row) for row in rows)

    def files(self) -> tuple[FileRow, ...]:
        """The files there are, by index."""
        return tuple(FileRow(*each) for each in sorted(self.slabs.files.items()))

    def namespaces(self) -> tuple[NamespaceRow, ...]:
        """The namespaces on record."""
        return tuple(NamespaceRow(*each) for each in self.catalogue.namespaces())

    def close(self) -> None:
        """Close the catalogue, then give the folder up."""
        self.catalogue.close()
        self.slabs.close()
