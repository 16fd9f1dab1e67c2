import ctypes
import mmap
import os
from pathlib import Path
from types import ModuleType

import pytest

PAGE = 4096
HUGE = 2 << 20


def _resident(module: ModuleType, mapping: mmap.mmap) -> int:
    """Pages of the mapping that have a page table entry."""
    first = module.address_of(mapping) // PAGE
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(first * 8)
        entries = memoryview(file.read(len(mapping) // PAGE * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries)


@pytest.mark.parametrize("how", ["populate", "touch"])
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("pages", [1, 1024, 1025, 2500])
def test_every_page_is_present_afterwards(
    moving: ModuleType, how: str, write: bool, pages: int
) -> None:
    with mmap.mmap(-1, pages * PAGE) as mapping:
        getattr(moving, how)(_address(moving, mapping), pages * PAGE, write=write)
        assert _resident(moving, mapping) == pages


def _address(module: ModuleType, mapping: mmap.mmap) -> int:
    address = module.address_of(mapping)
    assert isinstance(address, int)
    return address


@pytest.mark.parametrize("how", ["populate", "touch"])
def test_bytes_are_left_as_they_are(moving: ModuleType, how: str) -> None:
    with mmap.mmap(-1, 4 * PAGE) as mapping:
        mapping[:] = bytes(range(256)) * 64
        getattr(moving, how)(_address(moving, mapping), len(mapping), write=True)
        assert mapping[:] == bytes(range(256)) * 64


@pytest.mark.parametrize("how", ["populate", "touch"])
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_memory_that_cannot_be_had_is_an_os_error(
    moving: ModuleType, how: str, write: bool
) -> None:
    with mmap.mmap(-1, 2 * PAGE) as mapping:
        address = _address(moving, mapping)
    with pytest.raises(OSError, match=r"Bad address|Cannot allocate|could be copied"):
        getattr(moving, how)(address, 2 * PAGE, write=write)


@pytest.mark.parametrize("how", ["populate", "touch"])
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_a_mapping_past_the_end_of_its_file_is_an_error_and_no_signal(
    moving: ModuleType, how: str, write: bool, shm_dir: Path
) -> None:
    path = shm_dir / "short"
    path.write_bytes(bytes(4 * PAGE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4 * PAGE) as mapping:
        os.truncate(path, PAGE)
        with pytest.raises(OSError, match=r"Bad address|Cannot allocate|could be copied"):
            getattr(moving, how)(_address(moving, mapping), 4 * PAGE, write=write)


@pytest.mark.parametrize(
    ("offset", "length"), [(1, PAGE), (0, 0), (0, 2**64 - 1)], ids=["unaligned", "empty", "wraps"]
)
@pytest.mark.parametrize("how", ["populate", "touch"])
def test_a_range_that_is_none_is_refused(
    moving: ModuleType, how: str, offset: int, length: int
) -> None:
    with mmap.mmap(-1, 2 * PAGE) as mapping, pytest.raises(ValueError, match="page-aligned"):
        getattr(moving, how)(_address(moving, mapping) + offset, length, write=False)


@pytest.mark.parametrize("address", [-1, 0, 2**64])
def test_an_address_that_is_none_is_refused(moving: ModuleType, address: int) -> None:
    with pytest.raises(ValueError, match=r"page-aligned|64 bits"):
        moving.populate(address, PAGE, write=False)


def test_huge_pages_can_be_asked_for(moving: ModuleType) -> None:
    with mmap.mmap(-1, 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        address = _address(moving, mapping)
        moving.advise_huge(address, len(mapping))
        assert _advised_huge(address)


def _advised_huge(address: int) -> bool:
    found = False
    with open("/proc/self/smaps") as file:
        for line in file:
            first, _, _ = line.partition(" ")
            if "-" in first and not first.endswith(":"):
                start, end = (int(part, 16) for part in first.split("-"))
                found = start <= address < end
            elif found and line.startswith("VmFlags:"):
                return " hg" in line
    return False


def test_huge_pages_for_unmapped_memory_are_an_os_error(moving: ModuleType) -> None:
    with mmap.mmap(-1, PAGE) as mapping:
        address = _address(moving, mapping)
    with pytest.raises(OSError, match="Cannot allocate"):
        moving.advise_huge(address, PAGE)


@pytest.mark.parametrize("data", [b"read-only", bytearray(b"writable")], ids=["bytes", "bytearray"])
def test_address_of_is_where_the_bytes_are(moving: ModuleType, data: "bytes | bytearray") -> None:
    assert ctypes.string_at(moving.address_of(data), len(data)) == bytes(data)
