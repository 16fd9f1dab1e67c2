"""The table of namespaces: what was saved is found, whatever happens to the file or the process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nexuskv.errors import OutOfSpace
from nexuskv.tiers.namespace_table import HEADER_BYTES, NamespaceRow, NamespaceTable

IDS = [bytes([index]) * 16 for index in range(8)]
SAVE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from nexuskv.tiers.namespace_table import NamespaceTable
table = NamespaceTable.open(Path(sys.argv[1]), rows_max=8)
epoch = 0
while True:
    epoch += 1
    table.save(bytes(16), b"record", epoch)
    print(epoch, flush=True)
"""


def rows_of(folder: Path, *, rows_max: int = 8) -> dict[bytes, NamespaceRow]:
    table = NamespaceTable.open(folder, rows_max=rows_max)
    table.close()
    return table.rows


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with three namespaces on record, one of them cleared twice."""
    table = NamespaceTable.open(tmp_path, rows_max=8)
    for index in range(3):
        table.save(IDS[index], b"record %d" % index, 0)
    table.save(IDS[1], b"record 1", 1)
    table.save(IDS[1], b"record 1", 2)
    table.close()
    return tmp_path


def test_the_last_row_of_an_id_holds(saved: Path) -> None:
    assert rows_of(saved) == {
        IDS[0]: NamespaceRow(b"record 0", 0),
        IDS[1]: NamespaceRow(b"record 1", 2),
        IDS[2]: NamespaceRow(b"record 2", 0),
    }


def test_what_a_killed_process_was_told_is_on_record(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAVE_AND_DIE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(700)]
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate(timeout=10)
    told = int((lines + rest.split("\n")[:-1])[-1])
    assert rows_of(tmp_path)[bytes(16)].epoch in (told, told + 1)


def test_bytes_behind_the_rows_are_read_by_nobody(saved: Path) -> None:
    before = rows_of(saved)
    with (saved / "namespaces").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff" * 100)
    assert rows_of(saved) == before


def test_a_table_with_any_flipped_byte_is_no_table(saved: Path) -> None:
    path = saved / "namespaces"
    raw = path.read_bytes()
    used = HEADER_BYTES + int.from_bytes(raw[16:24], "little")
    for at in [*range(32), *range(HEADER_BYTES, used)]:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        assert rows_of(saved) == {}, f"byte {at}"


@pytest.mark.parametrize("length", [0, 10, HEADER_BYTES, HEADER_BYTES + 20])
def test_a_cut_table_is_no_table(saved: Path, length: int) -> None:
    os.truncate(saved / "namespaces", length)
    assert rows_of(saved) == {}


def test_many_epochs_do_not_grow_the_file(tmp_path: Path) -> None:
    table = NamespaceTable.open(tmp_path, rows_max=8)
    for epoch in range(5000):
        table.save(IDS[0], bytes(200), epoch)
    table.close()
    assert (tmp_path / "namespaces").stat().st_size < 512 * 1024
    assert rows_of(tmp_path)[IDS[0]].epoch == 4999


def test_more_namespaces_than_allowed_are_refused(tmp_path: Path) -> None:
    table = NamespaceTable.open(tmp_path, rows_max=2)
    for key in IDS[:2]:
        table.save(key, b"", 0)
    with pytest.raises(OutOfSpace, match="namespaces_max"):
        table.save(IDS[2], b"", 0)
    table.close()
    assert list(rows_of(tmp_path)) == IDS[:2]


def test_a_forgotten_namespace_makes_room(tmp_path: Path) -> None:
    table = NamespaceTable.open(tmp_path, rows_max=1)
    table.save(IDS[0], b"", 5)
    table.forget(IDS[0])
    table.save(IDS[1], b"", 0)
    table.close()
    assert rows_of(tmp_path)[IDS[1]].epoch == 0


def test_a_lowered_bound_keeps_so_many(saved: Path) -> None:
    assert len(rows_of(saved, rows_max=2)) == 2
