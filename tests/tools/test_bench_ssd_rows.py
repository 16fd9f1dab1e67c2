"""A made-up ssd folder is one that the code that reads real ones accepts, row for row."""

from pathlib import Path

import numpy as np
import pytest

from nexuskv.dataplane.checksum import page_checksum
from nexuskv.namespace import NamespaceRecord, namespace_id
from nexuskv.tiers.catalogue import Catalogue
from nexuskv.tiers.geometry import SlabGeometry
from nexuskv.tiers.record import RECORD_BYTES, ParentState, decode
from nexuskv.tiers.slabs import SlabFolder
from nexuskv.tools.bench.ssd_rows import Chains, fill

FILE_BYTES = 1 << 20
RECORD = NamespaceRecord(model="m", dtype="uint8", page_tokens=16, page_bytes=4096, key_bytes=8)
CHAINS = Chains(b"".join(n.to_bytes(8, "big") for n in range(600)), 8, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "ssd", file_bytes=FILE_BYTES, record=RECORD, chains=CHAINS)
    return tmp_path / "ssd"


def opened(folder: Path) -> tuple[SlabFolder, Catalogue]:
    geometry = SlabGeometry(FILE_BYTES, 4096)
    slabs = SlabFolder.open(
        folder,
        geometry=geometry,
        capacity_bytes=16 * FILE_BYTES,
        new_folder_id=bytes(16),
        open_files_max=4,
        create=False,
    )
    catalogue = Catalogue.open(
        slabs.catalogue_folder, geometry=geometry, files=lambda: slabs.files, start_over=False
    )
    return slabs, catalogue


def test_every_row_is_trusted_and_has_its_chain(folder: Path) -> None:
    slabs, catalogue = opened(folder)
    with slabs, catalogue:
        page = catalogue.rows(b"", 10_000)
        assert catalogue.bad_rows == 0
    found = [
        decode(page.records[at : at + RECORD_BYTES])
        for at in range(0, len(page.records), RECORD_BYTES)
    ]
    links = {record.key: record.parent for record in found if record is not None}
    roots = {r.key for r in found if r is not None and r.parent_state is ParentState.ROOT}
    assert len(links) == CHAINS.count
    assert roots == {CHAINS.key(row) for row in range(0, CHAINS.count, CHAINS.length)}
    assert all(
        links[CHAINS.key(row)] == (CHAINS.key(row - 1) if row % CHAINS.length else b"")
        for row in range(CHAINS.count)
    )


def test_every_page_has_the_bytes_that_its_record_names(folder: Path) -> None:
    slabs, catalogue = opened(folder)
    into = np.empty(2 * 4096, np.uint8)
    start = -into.ctypes.data % 4096
    aligned = memoryview(into.data)[start : start + 4096]
    with slabs, catalogue:
        page = catalogue.rows(b"", 10_000)
        places = np.frombuffer(page.places, "<u4").reshape(-1, 2)
        for at in (0, 254, 255, 256, 599):
            record = decode(page.records[at * RECORD_BYTES : (at + 1) * RECORD_BYTES])
            assert record is not None
            file_index, slot_index = map(int, places[at])
            slabs.read_into(aligned, file_index=file_index, slot_index=slot_index, size_bytes=4096)
            name = namespace_id(RECORD.encode())
            assert page_checksum(aligned, name, record.key) == record.checksum
