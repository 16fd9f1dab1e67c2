"""Opening an ssd folder: whose it is, what is good in it, what is taken away."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from nexuskv.errors import ConfigError
from nexuskv.tiers.geometry import SUPERBLOCK_BYTES, SlabGeometry
from nexuskv.tiers.slab_folder import path_of
from nexuskv.tiers.slab_format import FORMAT_BYTES, FolderFormat, Superblock, slot_bytes_in
from tests.tiers.slab_parts import (
    FILE_BYTES,
    FOLDER_ID,
    GEOMETRY,
    KIB,
    SLOT_BYTES,
    load,
    open_folder,
    store,
)

REPO = Path(__file__).parents[2]
FORMAT = FolderFormat(GEOMETRY, FOLDER_ID)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files 0 and 1, a page in each, closed."""
    with open_folder(tmp_path / "ssd") as slabs:
        for index in (0, 1):
            slabs.make(index, SLOT_BYTES)
            store(slabs, index, 0, b"page of file %d" % index)
        slabs.sync({0, 1})
    return tmp_path / "ssd"


# --- a folder that is new


@pytest.mark.parametrize("before", ["missing", "deep", "empty", "lost+found", "cut short"])
def test_folder_is_made_where_there_is_none(tmp_path: Path, before: str) -> None:
    folder = tmp_path / "deep" / "er" / "ssd" if before == "deep" else tmp_path / "ssd"
    if before not in ("missing", "deep"):
        folder.mkdir()
    if before == "lost+found":
        (folder / before).mkdir()
    if before == "cut short":
        (folder / "FORMAT.new").write_bytes(b"torn")
        (folder / "slabs").mkdir()
    open_folder(folder).close()
    assert (folder / "FORMAT").read_bytes() == FORMAT.encode()
    assert not (folder / "FORMAT.new").exists()


def test_missing_folder_is_not_made_for_one_who_only_looks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no ssd folder"):
        open_folder(tmp_path / "ssd", create=False)
    assert not (tmp_path / "ssd").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "catalogue", "slabs/00"])
def test_folder_of_other_files_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("somebody's")
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=f"no FORMAT file, but other files .{name}"):
        open_folder(tmp_path)
    assert (tmp_path / name).read_text() == "somebody's"


def test_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    (tmp_path / "ssd").chmod(0o777)
    with pytest.raises(ConfigError, match=r"ssd folder .* must be a directory of user"):
        open_folder(tmp_path / "ssd")


def test_folder_that_others_may_read_is_taken(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir(mode=0o755)
    open_folder(tmp_path / "ssd").close()


# --- FORMAT


@pytest.mark.parametrize("at", range(FORMAT_BYTES))
def test_flipped_byte_of_format_is_refused(at: int) -> None:
    raw = FORMAT.encode()
    with pytest.raises(ConfigError):
        FolderFormat.decode(raw[:at] + bytes((raw[at] ^ 0x10,)) + raw[at + 1 :])


def test_format_comes_back_as_it_was_written() -> None:
    assert FolderFormat.decode(FORMAT.encode()) == FORMAT


def resealed(**changes: int) -> bytes:
    """A FORMAT file of another version or cut, with a checksum that fits."""
    raw = bytearray(FORMAT.encode())
    places = {"version": (16, 4), "superblock": (20, 4), "file_bytes": (24, 8)}
    for name, number in changes.items():
        at, length = places[name]
        raw[at : at + length] = number.to_bytes(length, "little")
    raw[-8:] = xxhash.xxh3_64_intdigest(bytes(raw[:-8])).to_bytes(8, "little")
    return bytes(raw)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not NexusKV's"),
        (b"another product's file, long enough to be read as one of ours" * 3, "not NexusKV's"),
        (FORMAT.encode()[:-1], "damaged"),
        (FORMAT.encode() + b"\0", "damaged"),
        (resealed(version=1), "version 1, and this NexusKV reads version 0"),
        (resealed(version=77)[:30], "version 77"),
        (resealed(superblock=8192), "superblocks of 8192 bytes"),
        (resealed(file_bytes=1 << 30), "ssd_file_bytes 1073741824 .1GiB., and now .* 262144"),
    ],
)
def test_format_that_is_not_ours_is_refused_in_words(folder: Path, raw: bytes, said: str) -> None:
    (folder / "FORMAT").write_bytes(raw)
    with pytest.raises(ConfigError, match=said) as error:
        open_folder(folder)
    assert str(folder) in str(error.value)
    assert "Name another folder (ssd_dir)" in str(error.value)
    assert path_of(folder, 0).exists()


@pytest.mark.parametrize(
    ("geometry", "setting"),
    [
        (SlabGeometry(2 * FILE_BYTES, SLOT_BYTES), "ssd_file_bytes"),
        (SlabGeometry(FILE_BYTES, 2 * SLOT_BYTES), "ssd_slot_bytes_min"),
    ],
)
def test_folder_cut_otherwise_is_refused_and_left_alone(
    folder: Path, geometry: SlabGeometry, setting: str
) -> None:
    with pytest.raises(ConfigError, match=f"made with {setting}"):
        open_folder(folder, geometry=geometry)
    with open_folder(folder) as slabs:
        assert load(slabs, 0, 0, 14) == b"page of file 0"


def test_format_that_is_lost_is_refused(folder: Path) -> None:
    (folder / "FORMAT").unlink()
    with pytest.raises(ConfigError, match="no FORMAT file"):
        open_folder(folder)
    assert path_of(folder, 0).exists()


# --- slab files


def change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int) -> None:
    change(path, at, bytes((path.read_bytes()[at] ^ 0x04,)))


def test_every_flipped_byte_of_a_superblock_costs_its_file(tmp_path: Path) -> None:
    raw = Superblock(0, SLOT_BYTES, FORMAT).encode()
    assert slot_bytes_in(raw, 0, FORMAT) == SLOT_BYTES
    for at in range(SUPERBLOCK_BYTES):
        flipped = raw[:at] + bytes((raw[at] ^ 0x04,)) + raw[at + 1 :]
        assert slot_bytes_in(flipped, 0, FORMAT) is None


def to_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


BAD_FILES: dict[str, Callable[[Path], None]] = {
    "flipped at the start": lambda path: flip(path, 0),
    "flipped in the slot size": lambda path: flip(path, 25),
    "flipped in the zeros": lambda path: flip(path, 2000),
    "flipped in the checksum": lambda path: flip(path, 4095),
    "no superblock": lambda path: change(path, 0, bytes(4096)),
    "cut short": lambda path: os.truncate(path, FILE_BYTES - 1),
    "longer": lambda path: os.truncate(path, FILE_BYTES + 1),
    "empty": lambda path: os.truncate(path, 0),
    "of another index": lambda path: change(path, 0, Superblock(1, SLOT_BYTES, FORMAT).encode()),
    "of another folder": lambda path: change(
        path, 0, Superblock(0, SLOT_BYTES, FolderFormat(GEOMETRY, b"x" * 16)).encode()
    ),
    "of a slot size below the least": lambda path: change(
        path, 0, Superblock(0, 4096, FORMAT).encode()
    ),
    "a link": to_link,
}


@pytest.mark.parametrize("spoil", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_file_is_removed_and_reported(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(path_of(folder, 0))
    with open_folder(folder) as slabs:
        assert slabs.files == {1: SLOT_BYTES}
        assert [removed.path for removed in slabs.removed] == [path_of(folder, 0)]
        assert slabs.removed[0].reason
        assert not path_of(folder, 0).is_symlink()
        assert not path_of(folder, 0).exists()
        assert load(slabs, 1, 0, 14) == b"page of file 1"
        slabs.make(0, SLOT_BYTES)
    with open_folder(folder) as slabs:
        assert slabs.removed == []


def test_two_swapped_files_are_both_removed(folder: Path) -> None:
    one, other, aside = path_of(folder, 0), path_of(folder, 1), folder / "slabs" / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    with open_folder(folder) as slabs:
        assert slabs.files == {}
        assert len(slabs.removed) == 2


def test_strange_files_among_the_slabs_are_left_alone(folder: Path) -> None:
    strange = [
        folder / "notes",
        folder / "slabs" / "README",
        folder / "slabs" / "zz",
        folder / "slabs" / "00" / "slab-1",
        folder / "slabs" / "00" / "slab-000001",  # belongs into 01
        folder / "slabs" / "01" / "slab-0000001",
    ]
    for path in strange:
        path.write_text("somebody's")
    with open_folder(folder) as slabs:
        assert (list(slabs.files), slabs.removed) == ([0, 1], [])
    assert all(path.read_text() == "somebody's" for path in strange)


def test_lowered_capacity_removes_the_files_above_it(folder: Path) -> None:
    with open_folder(folder, files=1) as slabs:
        assert list(slabs.files) == [0]
        assert "above the capacity of 1 files" in slabs.removed[0].reason
        assert load(slabs, 0, 0, 14) == b"page of file 0"
    assert not path_of(folder, 1).exists()


def test_raised_capacity_keeps_the_files(folder: Path) -> None:
    with open_folder(folder, files=400) as slabs:
        assert list(slabs.files) == [0, 1]
        slabs.make(300, 64 * KIB)
    with open_folder(folder, files=400) as slabs:
        assert list(slabs.files) == [0, 1, 300]


# --- one owner


def test_second_process_is_refused_with_the_first_ones_number(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.tiers.slab_parts import open_folder\n"
        "open_folder(Path(sys.argv[1]))"
    )
    with open_folder(folder):
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            capture_output=True,
            text=True,
            cwd=REPO,
            check=False,
        )
    assert done.returncode == 1
    assert f"ssd folder {folder} is in use by process {os.getpid()}" in done.stderr


def test_folder_is_free_again_after_a_refused_opening(folder: Path) -> None:
    with pytest.raises(ConfigError):
        open_folder(folder, geometry=SlabGeometry(2 * FILE_BYTES, SLOT_BYTES))
    open_folder(folder).close()
