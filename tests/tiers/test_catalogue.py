"""The catalogue on a real RocksDB: what is put stays, what is deleted or damaged is gone."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexuskv.errors import ConfigError, TransferFailed
from nexuskv.tiers.catalogue import (
    ROW_BYTES,
    Catalogue,
    CatalogueRow,
    NamespaceRow,
    RowPage,
    row_key,
)
from nexuskv.tiers.record import decode
from nexuskv.tiers.rocks import Rocks
from tests.tiers.slab_parts import GEOMETRY, KIB, NAMESPACE, SLOT_BYTES, record

FILES = {0: SLOT_BYTES, 1: SLOT_BYTES, 3: 32 * KIB}
RECORD = b"a namespace, encoded"

Places = list[tuple[int, int]]


def open_catalogue(
    folder: Path, files: dict[int, int] | None = None, *, start_over: bool = False
) -> Catalogue:
    held = FILES if files is None else files
    return Catalogue.open(folder, geometry=GEOMETRY, files=lambda: held, start_over=start_over)


def row(file_index: int, slot_index: int, number: int = 0) -> CatalogueRow:
    return CatalogueRow(file_index, slot_index, record(slot_index, number))


def every_row(catalogue: Catalogue, limit: int = 100) -> dict[tuple[int, int], bytes]:
    """All rows, place → record."""
    found: dict[tuple[int, int], bytes] = {}
    page = RowPage(b"", b"", b"")
    while True:
        page = catalogue.rows(page.cursor, limit)
        assert len(page.records) // 256 == len(page.places) // 8 <= limit
        for at in range(len(page.places) // 8):
            place = page.places[at * 8 : at * 8 + 8]
            key = (int.from_bytes(place[:4], "little"), int.from_bytes(place[4:], "little"))
            assert key not in found
            found[key] = page.records[at * 256 : at * 256 + 256]
        if not page.cursor:
            return found


@pytest.fixture
def folder(shm_dir: Path) -> Path:
    """In shared memory: RocksDB syncs a dozen times when it opens, and these tests open often."""
    return shm_dir / "catalogue"


@pytest.fixture
def catalogue(folder: Path) -> Iterator[Catalogue]:
    with open_catalogue(folder) as catalogue:
        yield catalogue


def test_rows_come_back_in_the_order_of_their_places(catalogue: Catalogue) -> None:
    rows = [row(3, 0, 1), row(0, 14, 2), row(1, 0, 3), row(0, 2, 4)]
    catalogue.put(rows)
    found = every_row(catalogue)
    assert list(found) == [(0, 2), (0, 14), (1, 0), (3, 0)]
    assert found == {(file, slot): raw for file, slot, raw in rows}


@pytest.mark.parametrize("limit", [1, 2, 3, 14, 15, 16])
def test_rows_come_in_pages_of_any_size(catalogue: Catalogue, limit: int) -> None:
    catalogue.put(row(1, at) for at in range(15))
    assert list(every_row(catalogue, limit)) == [(1, at) for at in range(15)]


def test_rows_of_an_empty_catalogue_end_at_once(catalogue: Catalogue) -> None:
    assert catalogue.rows(b"", 10) == RowPage(b"", b"", b"")


def test_row_put_again_is_replaced(catalogue: Catalogue) -> None:
    catalogue.put([row(0, 1, 1)])
    catalogue.put([row(0, 1, 2)])
    assert every_row(catalogue) == {(0, 1): record(1, 2)}


def test_deleted_rows_are_gone_after_opening_again(folder: Path) -> None:
    with open_catalogue(folder) as catalogue:
        catalogue.put(row(0, at) for at in range(5))
        catalogue.delete([(0, 1), (0, 3), (1, 9)])
    with open_catalogue(folder) as catalogue:
        assert list(every_row(catalogue)) == [(0, 0), (0, 2), (0, 4)]
        assert catalogue.started_over is None


def test_record_of_a_wrong_length_writes_nothing(catalogue: Catalogue) -> None:
    with pytest.raises(ConfigError, match="256 bytes"):
        catalogue.put([row(0, 0), CatalogueRow(0, 1, b"short")])
    assert every_row(catalogue) == {}


def test_namespaces_keep_their_latest_epoch(folder: Path) -> None:
    with open_catalogue(folder) as catalogue:
        catalogue.save_namespace(NAMESPACE, RECORD, 0)
        catalogue.save_namespace(bytes(16), b"", 2**64 - 1)
        catalogue.save_namespace(NAMESPACE, RECORD, 7)
        catalogue.save_namespace(b"x" * 16, b"gone", 1)
        catalogue.delete_namespaces([b"x" * 16, b"y" * 16])
    with open_catalogue(folder) as catalogue:
        assert catalogue.namespaces() == [
            NamespaceRow(bytes(16), b"", 2**64 - 1),
            NamespaceRow(NAMESPACE, RECORD, 7),
        ]
        assert every_row(catalogue) == {}


def test_namespace_id_of_a_wrong_length_is_refused(catalogue: Catalogue) -> None:
    with pytest.raises(ConfigError, match="16 bytes"):
        catalogue.save_namespace(b"short", RECORD, 0)


# --- files that are not there


@pytest.mark.parametrize("lost", [0, 1, 3, None], ids=str)
def test_rows_of_a_lost_file_are_deleted_before_it_can_be_made_again(
    folder: Path, lost: int | None
) -> None:
    with open_catalogue(folder) as catalogue:
        catalogue.put(row(file, slot) for file in FILES for slot in range(6))
    left = {file: size for file, size in FILES.items() if lost is not None and file != lost}
    open_catalogue(folder, left).close()
    with open_catalogue(folder) as catalogue:
        assert {file for file, _ in every_row(catalogue)} == set(left)


def test_rows_of_files_made_later_are_known(folder: Path) -> None:
    files = {0: SLOT_BYTES}
    with Catalogue.open(
        folder, geometry=GEOMETRY, files=lambda: files, start_over=False
    ) as catalogue:
        files = {0: SLOT_BYTES, 2: SLOT_BYTES}
        catalogue.put([row(0, 0), row(2, 3)])
        assert list(every_row(catalogue)) == [(0, 0), (2, 3)]
        assert catalogue.bad_rows == 0


# --- rows that cannot be trusted


def planted(folder: Path, rows: dict[bytes, bytes]) -> None:
    """Write rows past every check, as damage below RocksDB's own checksums would."""
    rocks = Rocks(folder)
    with rocks.batch() as batch:
        for key, value in rows.items():
            batch.put(key, value)
    rocks.close()


def value(place: CatalogueRow) -> bytes:
    index = place.file_index.to_bytes(4, "little") + place.slot_index.to_bytes(4, "little")
    return place.record + index


GOOD = row(0, 5, 50)


def test_every_flipped_byte_of_a_row_costs_that_row_alone(folder: Path) -> None:
    rows = {row_key(0, 5): value(GOOD)}
    for at in range(ROW_BYTES):  # one file for each byte, so that each flipped row has a key
        raw = value(row(at + 1, 5, at))
        rows[row_key(at + 1, 5)] = raw[:at] + bytes((raw[at] ^ 0x40,)) + raw[at + 1 :]
    planted(folder, rows)
    with open_catalogue(folder, dict.fromkeys(range(ROW_BYTES + 1), SLOT_BYTES)) as catalogue:
        assert list(every_row(catalogue)) == [(0, 5)]
        assert catalogue.bad_rows == ROW_BYTES


def test_two_swapped_rows_are_both_left_out(folder: Path) -> None:
    one, other = row(0, 5, 1), row(1, 5, 2)  # the same slot of two files
    planted(folder, {row_key(0, 5): value(other), row_key(1, 5): value(one)})
    with open_catalogue(folder) as catalogue:
        assert every_row(catalogue) == {}
        assert catalogue.bad_rows == 2


BAD_ROWS = {
    "cut short": (row_key(0, 5), value(GOOD)[:-1]),
    "too long": (row_key(0, 5), value(GOOD) + b"\0"),
    "empty": (row_key(0, 5), b""),
    "key too long": (row_key(0, 5) + b"\0", value(GOOD)),
    "key too short": (b"p\0\0", value(GOOD)),
    "slot beyond the file": (row_key(0, 15), value(row(0, 15))),
    "slot beyond a file of larger slots": (row_key(3, 7), value(row(3, 7))),
    "another slot in the record": (
        row_key(0, 5),
        value(CatalogueRow(0, 5, record(6, 1))),
    ),
    "page larger than the slot": (
        row_key(0, 5),
        value(CatalogueRow(0, 5, record(5, 1, size_bytes=SLOT_BYTES + 1))),
    ),
    "page of no bytes": (row_key(0, 5), value(CatalogueRow(0, 5, record(5, 1, size_bytes=0)))),
}


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_row_is_left_out_counted_and_deleted(folder: Path, bad: tuple[bytes, bytes]) -> None:
    planted(folder, dict([bad, (row_key(1, 1), value(row(1, 1)))]))
    with open_catalogue(folder) as catalogue:
        assert list(every_row(catalogue)) == [(1, 1)]
        assert catalogue.bad_rows == 1
        assert list(every_row(catalogue)) == [(1, 1)]
        assert catalogue.bad_rows == 1
    rocks = Rocks(folder)
    assert rocks.scan(b"p", b"q", 10)[0] == [row_key(1, 1)]
    rocks.close()


def test_bad_rows_do_not_end_a_page_early(folder: Path) -> None:
    rows = {row_key(0, at): value(row(0, at)) for at in range(10)}
    planted(folder, {**rows, **{row_key(0, at): b"bad" for at in range(6)}})
    with open_catalogue(folder) as catalogue:
        assert list(every_row(catalogue, 2)) == [(0, at) for at in range(6, 10)]


@pytest.mark.parametrize("at", [0, 7, 8, 15, 16, 15 + len(RECORD)])
def test_flipped_byte_of_a_namespace_is_damage(folder: Path, at: int) -> None:
    with open_catalogue(folder) as catalogue:
        catalogue.save_namespace(NAMESPACE, RECORD, 7)
        catalogue.put([GOOD])
    rocks = Rocks(folder)
    (key,), (raw,) = rocks.scan(b"n", b"o", 10)
    with rocks.batch() as batch:
        batch.put(key, raw[:at] + bytes((raw[at] ^ 1,)) + raw[at + 1 :])
    rocks.close()
    with pytest.raises(TransferFailed, match="namespace is damaged"):
        open_catalogue(folder)
    with open_catalogue(folder, start_over=True) as catalogue:
        assert (catalogue.namespaces(), every_row(catalogue)) == ([], {})
        assert "damaged" in str(catalogue.started_over)


# --- a damaged database


HELD = dict.fromkeys(range(40), SLOT_BYTES)


class Killed(NamedTuple):
    """What a killed process leaves: rows in a table, and deletes in the log."""

    folder: Path
    ever: dict[tuple[int, int], bytes]
    rows: dict[tuple[int, int], bytes]  # those not deleted


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed") / "catalogue"
    with open_catalogue(folder.with_name("alive"), HELD) as catalogue:
        catalogue.save_namespace(NAMESPACE, RECORD, 3)
        catalogue.put(row(file, slot, file * 15 + slot) for file in HELD for slot in range(15))
        catalogue.flush()
        ever = every_row(catalogue)
        for slot in range(1, 15):
            catalogue.delete([(0, slot)])
        shutil.copytree(folder.with_name("alive"), folder)
        return Killed(folder, ever, every_row(catalogue))


@pytest.fixture
def killed(template: Killed, folder: Path) -> Killed:
    shutil.copytree(template.folder, folder)
    return template._replace(folder=folder)


def damage(folder: Path, kind: str, change: Callable[[bytes], bytes]) -> None:
    """Change the largest file of a kind."""
    path = max(folder.glob(kind), key=lambda path: path.stat().st_size)
    assert path.stat().st_size
    path.write_bytes(change(path.read_bytes()))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda raw: b"",
    "cut in half": lambda raw: raw[: len(raw) // 2],
    "zeroed": lambda raw: bytes(len(raw)),
    "flipped in the middle": lambda raw: (
        raw[: len(raw) // 2] + bytes((raw[len(raw) // 2] ^ 0xFF,)) + raw[len(raw) // 2 + 1 :]
    ),
    "flipped at the start": lambda raw: bytes((raw[0] ^ 0xFF,)) + raw[1:],
}


def test_killed_process_leaves_all_it_answered(killed: Killed) -> None:
    with open_catalogue(killed.folder, HELD) as catalogue:
        assert every_row(catalogue) == killed.rows
        assert len(killed.rows) < len(killed.ever)
        assert catalogue.namespaces() == [NamespaceRow(NAMESPACE, RECORD, 3)]


@pytest.mark.parametrize("kind", ["*.sst", "MANIFEST-*", "CURRENT", "*.log"])
@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
def test_damaged_database_costs_rows_but_names_no_wrong_page(
    killed: Killed, kind: str, change: Callable[[bytes], bytes]
) -> None:
    damage(killed.folder, kind, change)
    with open_catalogue(killed.folder, HELD, start_over=True) as catalogue:
        # A log that lost its end looks as if that had never been answered: rows deleted since the
        # last table are back. They are right, or their slots' bytes fail the checksum.
        known = killed.ever if kind == "*.log" else killed.rows
        assert every_row(catalogue).items() <= known.items()
        assert catalogue.namespaces() in ([], [NamespaceRow(NAMESPACE, RECORD, 3)])
        catalogue.put([row(0, 3)])
        assert every_row(catalogue)[0, 3] == record(3, 0)


@pytest.mark.parametrize("kind", ["OPTIONS-*", "*.json", "IDENTITY"])
def test_damaged_side_file_of_the_database_costs_no_more_than_the_rows(
    killed: Killed, kind: str
) -> None:
    damage(killed.folder, kind, DAMAGES["flipped at the start"])
    with open_catalogue(killed.folder, HELD, start_over=True) as catalogue:
        assert every_row(catalogue) in ({}, killed.rows)


def test_damage_in_the_middle_of_the_log_is_noticed(killed: Killed) -> None:
    damage(killed.folder, "*.log", DAMAGES["flipped in the middle"])
    with pytest.raises(TransferFailed, match="Corruption"):
        open_catalogue(killed.folder, HELD)


def test_damaged_table_is_an_error_unless_it_may_start_over(killed: Killed) -> None:
    damage(killed.folder, "*.sst", DAMAGES["flipped in the middle"])
    with (
        open_catalogue(killed.folder, HELD) as catalogue,
        pytest.raises(TransferFailed, match="Corruption"),
    ):
        every_row(catalogue)


def test_table_found_damaged_while_it_is_read_costs_the_rows_but_no_namespace(
    killed: Killed,
) -> None:
    damage(killed.folder, "*.sst", DAMAGES["flipped in the middle"])
    with open_catalogue(killed.folder, HELD, start_over=True) as catalogue:
        every_row(catalogue)
        assert "Corruption" in str(catalogue.started_over)
        assert every_row(catalogue) == {}
    assert killed.folder.with_name("catalogue.bad").is_dir()
    with open_catalogue(killed.folder, HELD) as catalogue:
        assert catalogue.namespaces() == [NamespaceRow(NAMESPACE, RECORD, 3)]


def test_only_one_damaged_catalogue_is_kept(folder: Path) -> None:
    for _ in range(3):
        open_catalogue(folder).close()
        (folder / "CURRENT").write_bytes(b"damaged\n")
        open_catalogue(folder, start_over=True).close()
    assert sorted(os.listdir(folder.parent)) == ["catalogue", "catalogue.bad"]


def test_database_in_use_is_not_taken_for_a_damaged_one(folder: Path) -> None:
    with open_catalogue(folder) as catalogue:
        catalogue.put([GOOD])
        with pytest.raises(TransferFailed, match="lock"):
            open_catalogue(folder, start_over=True)
        assert every_row(catalogue) == {(0, 5): GOOD.record}


def test_file_in_the_place_of_the_folder_is_an_error(folder: Path) -> None:
    folder.write_text("no folder")
    with pytest.raises(TransferFailed, match="catalogue"):
        open_catalogue(folder)


def test_removed_folder_costs_the_rows(folder: Path) -> None:
    with open_catalogue(folder) as catalogue:
        catalogue.put([GOOD])
        shutil.rmtree(folder)
        with contextlib.suppress(TransferFailed):  # whether it notices is RocksDB's affair
            catalogue.put([row(1, 1)])
    with open_catalogue(folder) as catalogue:
        assert every_row(catalogue) == {}


def test_closed_catalogue_writes_nothing(folder: Path) -> None:
    catalogue = open_catalogue(folder)
    catalogue.close()
    catalogue.close()
    with pytest.raises(TransferFailed, match="is closed"):
        catalogue.put([GOOD])


def test_iterating_does_not_keep_the_database_open(folder: Path) -> None:
    catalogue = open_catalogue(folder)
    catalogue.put(row(0, at) for at in range(10))
    catalogue.rows(b"", 3)
    catalogue.close()
    with open_catalogue(folder) as again:
        assert len(every_row(again)) == 10


# --- against a dict

PLACES = st.tuples(st.sampled_from(sorted(FILES)), st.integers(0, 6))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(PLACES, max_size=5, unique=True)),
        st.tuples(st.just("delete"), st.lists(PLACES, max_size=5, unique=True)),
        st.tuples(st.just("reopen"), st.just([])),
    ),
    max_size=12,
)


@given(steps=STEPS, limit=st.integers(1, 8))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_catalogue_holds_what_a_dict_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Places]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("model") / "catalogue"
    expected: dict[tuple[int, int], bytes] = {}
    catalogue = open_catalogue(folder)
    try:
        for number, (step, places) in enumerate(steps):
            if step == "put":
                rows = [row(*place, number) for place in places]
                catalogue.put(rows)
                expected.update({(file, slot): raw for file, slot, raw in rows})
            elif step == "delete":
                catalogue.delete(places)
                for place in places:
                    expected.pop(place, None)
            else:
                catalogue.close()
                catalogue = open_catalogue(folder)
            assert every_row(catalogue, limit) == expected
    finally:
        catalogue.close()


def test_records_are_those_of_the_codec(catalogue: Catalogue) -> None:
    catalogue.put([GOOD])
    found = decode(every_row(catalogue)[0, 5])
    assert found is not None
    assert (found.slot, found.generation, found.namespace_id) == (5, 1050, NAMESPACE)
