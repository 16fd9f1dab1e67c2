"""docs/storage-format.md and the code say the same, field by field."""

import re
from pathlib import Path

import pytest
import xxhash

from nexuskv.tiers.catalogue import NAMESPACE_PREFIX, ROW_BYTES, Catalogue, CatalogueRow, row_key
from nexuskv.tiers.geometry import SUPERBLOCK_BYTES, SlabGeometry
from nexuskv.tiers.namespace_table import NamespaceTable
from nexuskv.tiers.record import RECORD_BYTES, RECORD_DTYPE, ParentState, Record, SlotState
from nexuskv.tiers.rocks import Rocks
from nexuskv.tiers.segment import ABSENT, HEADER_BYTES, SLOT_ALIGN_BYTES, TableHeader
from nexuskv.tiers.slab_folder import path_of
from nexuskv.tiers.slab_format import FolderFormat, Superblock

PAGE = (Path(__file__).parents[2] / "docs/storage-format.md").read_text(encoding="utf-8")
FLAT = " ".join(PAGE.split())

Field = bytes | int
Row = tuple[int, int, str, str]  # offset, size (0: the rest), field, what it holds

ID = bytes(range(16))
FOLDER = FolderFormat(SlabGeometry(1 << 20, 16384), ID)
RECORD = Record(
    slot=0x0A0B0C0D,
    generation=2**63 + 5,
    state=SlotState.READY,
    size_bytes=70000,
    epoch=9,
    checksum=2**62 + 1,
    writer_pid=77,
    writer_start_time=88,
    writer_session=99,
    namespace_id=ID,
    key=b"k" * 20,
    parent_state=ParentState.KEY,
    parent=b"p" * 20,
)
HEADER = TableHeader(1 << 30, 1 << 26, 4096 + 256 * 7, b"incarnat", ID)


def table(heading: str, *, number: int = 0) -> list[Row]:
    """A table of fields under a heading of any level."""
    section = re.split(rf"\n#+ {heading}\n", PAGE)[1]
    section = re.split(r"\n#+ ", section)[0]
    tables = section.split("| offset | size | field | holds |\n|---|---|---|---|\n")[1:]
    rows: list[Row] = []
    for line in tables[number].splitlines():
        if not line.startswith("|"):
            break
        offset, size, field, holds = (cell.strip() for cell in line.strip("|").split("|", 3))
        rows.append((int(offset), 0 if size == "…" else int(size), field, holds.strip("| ")))
    return rows


def check(rows: list[Row], raw: bytes, expected: dict[str, Field]) -> None:
    """Each field of the page lies in `raw` where the page says, and nothing else does."""
    assert [field for _, _, field, _ in rows] == list(expected)
    at = 0
    for offset, size, field, holds in rows:
        assert raw[at:offset] == bytes(offset - at), f"unnamed bytes before {field}"
        at = offset + size if size else len(raw)
        value = expected[field]
        if isinstance(value, int):
            value = value.to_bytes(size, "big" if holds.endswith("BE") else "little")
        assert raw[offset:at] == value.ljust(size, b"\0"), field
    assert not any(raw[at:])


def test_table_header_is_as_on_the_page() -> None:
    raw = HEADER.encode()
    check(
        table("Table header"),
        raw,
        {
            "magic": b"NEXUSKV\0",
            "format_version": 0,
            "header_bytes": HEADER_BYTES,
            "record_bytes": RECORD_BYTES,
            "slot_align_bytes": SLOT_ALIGN_BYTES,
            "generation_offset": 8,
            "segment_id": 0,
            "capacity_bytes": HEADER.capacity_bytes,
            "chunk_bytes": HEADER.chunk_bytes,
            "table_bytes": HEADER.table_bytes,
            "incarnation": HEADER.incarnation,
            "instance_id": ID,
            "checksum": xxhash.xxh3_64_intdigest(raw[:80]),
        },
    )
    assert f"The first {len(raw)} bytes" in FLAT


def test_record_is_as_on_the_page() -> None:
    raw = RECORD.encode()
    expected: dict[str, Field] = {
        "own_checksum": xxhash.xxh3_64_intdigest(raw[8:]),
        "generation": RECORD.generation,
        "epoch": RECORD.epoch,
        "checksum": RECORD.checksum,
        "writer_start_time": RECORD.writer_start_time,
        "size_bytes": RECORD.size_bytes,
        "slot": RECORD.slot,
        "writer_pid": RECORD.writer_pid,
        "format_version": 0,
        "state": SlotState.READY,
        "key_bytes": 20,
        "parent_state": ParentState.KEY,
        "namespace_id": ID,
        "writer_session": RECORD.writer_session,
        "key": RECORD.key,
        "parent": RECORD.parent,
    }
    check(table("Record"), raw, expected)
    assert list(expected) == list(RECORD_DTYPE.names or ())


@pytest.mark.parametrize("state", [*SlotState, *ParentState], ids=str)
def test_every_state_of_a_record_is_on_the_page(state: SlotState | ParentState) -> None:
    field = "state" if isinstance(state, SlotState) else "parent_state"
    (holds,) = (row[3] for row in table("Record") if row[2] == field)
    assert re.search(rf"\b{int(state)} {state.name.lower()}\b", holds)


def test_format_file_is_as_on_the_page() -> None:
    raw = FOLDER.encode()
    check(
        table("FORMAT"),
        raw,
        {
            "magic": b"NexusKV ssd\n\0\0\0\0",
            "version": 0,
            "superblock_bytes": SUPERBLOCK_BYTES,
            "file_bytes": 1 << 20,
            "slot_bytes_min": 16384,
            "stride": 64,
            "folder_id": ID,
            "checksum": xxhash.xxh3_64_intdigest(raw[:64]),
        },
    )
    assert f"### FORMAT\n\n{len(raw)} bytes." in PAGE


def test_superblock_is_as_on_the_page() -> None:
    raw = Superblock(5, 20480, FOLDER).encode()
    check(
        table("Superblock"),
        raw,
        {
            "magic": b"NKVSLAB\0",
            "version": 0,
            "file_index": 5,
            "file_bytes": 1 << 20,
            "slot_bytes": 20480,
            "slot_count": ((1 << 20) - 4096) // 20480,
            "folder_id": ID,
            "checksum": xxhash.xxh3_64_intdigest(raw[:4088]),
        },
    )


def test_key_of_a_row_is_as_on_the_page() -> None:
    check(
        table("Catalogue", number=0),
        row_key(0x01020304, 0x05060708),
        {"prefix": b"p", "file_index": 0x01020304, "slot_index": 0x05060708},
    )


def test_rows_of_a_catalogue_are_as_on_the_page(shm_dir: Path) -> None:
    raw = RECORD.encode()
    with Catalogue.open(
        shm_dir / "catalogue", geometry=FOLDER.geometry, files=dict[int, int], start_over=False
    ) as catalogue:
        catalogue.put([CatalogueRow(3, RECORD.slot, raw)])
        catalogue.save_namespace(ID, b"encoded", 6)
    rocks = Rocks(shm_dir / "catalogue")
    namespaces, pages = rocks.scan(b"n", b"o", 9), rocks.scan(b"p", b"q", 9)
    rocks.close()
    assert pages[0] == [row_key(3, RECORD.slot)]
    check(
        table("Catalogue", number=1),
        pages[1][0],
        {"record": raw, "file_index": 3, "slot_index": RECORD.slot},
    )
    assert f"Value of a page's row, {ROW_BYTES} bytes" in FLAT
    assert namespaces[0] == [NAMESPACE_PREFIX + ID]
    (value,) = namespaces[1]
    own = xxhash.xxh3_64_intdigest(ID + value[8:])
    check(table("Catalogue", number=2), value, {"checksum": own, "epoch": 6, "record": b"encoded"})


@pytest.mark.parametrize(
    "said",
    [
        f"Slot id {ABSENT} stands for no slot",
        f"at `{HEADER_BYTES} + {RECORD_BYTES} * s` of the table file",
        f"`{SUPERBLOCK_BYTES} + i * slot_bytes`",
        "a superblock of 4096 bytes",
    ],
)
def test_the_page_says_the_codes_numbers(said: str) -> None:
    assert said in FLAT


def test_slab_file_lies_where_the_page_says() -> None:
    assert "DIR/slabs/XX/slab-NNNNNN" in PAGE
    assert path_of(Path("DIR"), 0x1AB) == Path(f"DIR/slabs/ab/slab-{0x1AB:06d}")


def test_namespace_table_is_as_on_the_page(tmp_path: Path) -> None:
    opened = NamespaceTable.open(tmp_path, rows_max=1)
    opened.save(ID, b"its record", 7)
    opened.close()
    raw = (tmp_path / "namespaces").read_bytes()
    row = raw[64 : 64 + 40 + 10]
    check(
        table("Namespaces header"),
        raw[:64],
        {
            "magic": b"NEXUSKVN",
            "format_version": 0,
            "header_bytes": 64,
            "rows_bytes": len(row),
            "checksum": xxhash.xxh3_64_intdigest(raw[:24]),
        },
    )
    check(
        table("Namespace row"),
        row,
        {
            "own_checksum": xxhash.xxh3_64_intdigest(row[8:]),
            "epoch": 7,
            "record_bytes": 10,
            "namespace_id": ID,
            "record": b"its record",
        },
    )
    assert not any(raw[64 + len(row) :])
