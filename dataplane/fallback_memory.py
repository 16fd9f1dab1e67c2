"""Memory by address for the pure-Python twin: buffers, vectored copies, page tables, by ctypes.

Every call here that can last goes through ctypes' CDLL, which gives the GIL up.
"""

import ctypes
import errno
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from nexuskv.dataplane.batch import Buffer
from nexuskv.types import PAGE_ALIGN_BYTES

_REGIONS_A_CALL: Final = 1024
_BYTES_A_CALL: Final = 1 << 30  # the kernel moves less than 2 GiB at once
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_PYBUF_WRITABLE: Final = 1

_libc: Final = ctypes.CDLL(None, use_errno=True)


class Region(NamedTuple):
    """`length` bytes of memory from `address` on."""

    address: int
    length: int


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of the C interface of CPython."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@contextmanager
def region_of(data: Buffer, *, writable: bool) -> Generator[Region, None, None]:
    """Where a C-contiguous buffer lies; it is held, neither moved nor freed, inside the block.

    Raises:
        BufferError, ValueError: not contiguous, or read-only though `writable`.
    """
    export = _PyBuffer()
    flags = _PYBUF_WRITABLE if writable else 0
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(export), flags)
    try:
        yield Region(export.buf or 0, export.len)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(export))


def address_of(data: Buffer) -> int:
    """See `nexuskv.dataplane.native`."""
    with region_of(data, writable=False) as region:
        return region.address


def bytes_at(region: Region) -> memoryview:
    """The memory itself, without a copy."""
    return memoryview((ctypes.c_char * region.length).from_address(region.address))


def copy(source: Sequence[Region], into: Sequence[Region]) -> None:
    """Copy one stream of regions into another of the same total length.

    Raises:
        OSError: a page of either cannot be read or written.
    """
    for writes, reads in _equal_groups(list(into), list(source)):
        _read_own_memory(writes, reads)


def _equal_groups(
    local: list[Region], remote: list[Region]
) -> Iterator[tuple[list[Region], list[Region]]]:
    """Cut both streams at the same bytes into groups that one call can take."""
    while local:
        writes, room = _take(local, _REGIONS_A_CALL, _BYTES_A_CALL)
        reads, room = _take(remote, _REGIONS_A_CALL, room)
        got = sum(r.length for r in reads)
        if got < sum(r.length for r in writes):
            local[:0] = writes
            writes, _ = _take(local, _REGIONS_A_CALL, got)
        yield writes, reads


def _take(regions: list[Region], count_max: int, bytes_max: int) -> tuple[list[Region], int]:
    """Cut up to `bytes_max` bytes in up to `count_max` regions off the front."""
    taken: list[Region] = []
    total = 0
    while regions and len(taken) < count_max and total < bytes_max:
        first = regions[0]
        length = min(first.length, bytes_max - total)
        taken.append(Region(first.address, length))
        total += length
        if length == first.length:
            del regions[0]
        else:
            regions[0] = Region(first.address + length, first.length - length)
    return taken, total


def _vectors(regions: list[Region]) -> ctypes.Array[_IoVec]:
    return (_IoVec * len(regions))(*(_IoVec(r.address, r.length) for r in regions))


def _read_own_memory(writes: list[Region], reads: list[Region]) -> None:
    wanted = sum(r.length for r in reads)
    moved = _libc_readv(_vectors(writes), _vectors(reads))
    if moved != wanted:
        raise OSError(errno.EFAULT, f"only {moved} of {wanted} bytes could be copied")


def _libc_readv(local: ctypes.Array[_IoVec], remote: ctypes.Array[_IoVec]) -> int:
    call = _libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    pid = ctypes.c_int(os.getpid())
    counts = ctypes.c_ulong(len(local)), ctypes.c_ulong(len(remote))
    moved = call(pid, local, counts[0], remote, counts[1], ctypes.c_ulong(0))
    if moved < 0:
        raise _os_error()
    return int(moved)


def populate(address: int, length: int, *, write: bool) -> None:
    """See `nexuskv.dataplane.native`."""
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    _check_range(address, length)
    try:
        _advise(address, length, advice)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        touch(address, length, write=write)  # before Linux 5.14


def touch(address: int, length: int, *, write: bool) -> None:
    """See `nexuskv.dataplane.native`. Reads only, whatever `write` says.

    Python has no atomic write that leaves a byte as it is, and another thread may be storing here.
    A shared file's pages are present afterwards; the first write to each still faults once.
    """
    del write
    _check_range(address, length)
    places = range(address, address + length, PAGE_ALIGN_BYTES)
    for at in range(0, len(places), _REGIONS_A_CALL):
        group = [Region(place, 1) for place in places[at : at + _REGIONS_A_CALL]]
        sink = (ctypes.c_char * len(group))()
        _read_own_memory([Region(ctypes.addressof(sink), len(group))], group)


def advise_huge(address: int, length: int) -> None:
    """See `nexuskv.dataplane.native`."""
    _check_range(address, length)
    _advise(address, length, _MADV_HUGEPAGE)


def _advise(address: int, length: int, advice: int) -> None:
    place = ctypes.c_void_p(address), ctypes.c_size_t(length)
    if _libc.madvise(*place, ctypes.c_int(advice)):
        raise _os_error()


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _check_range(address: int, length: int) -> None:
    in_range = 0 < address < 2**64 and length > 0 and address + length < 2**64
    if not in_range or address % PAGE_ALIGN_BYTES:
        raise ValueError(f"range of {length} bytes at {address} is empty or not page-aligned")
