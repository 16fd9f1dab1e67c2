"""Reserving a chunk's memory so that no later touch of it can fail.

A hole of a sparse file on a full tmpfs answers a load or store with SIGBUS, in whichever process
touches it. `allocate` is what makes the promise; huge pages are about speed. All calls release the
GIL for their whole duration, unlike `mmap.madvise`. Any thread.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeAlias

from nexuskv.errors import OutOfSpace, translating

_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

Allocate: TypeAlias = Callable[[int, int, int], None]
"""What `allocate` does, for those who must see it fail: file descriptor, offset, length."""


def allocate(fd: int, offset_bytes: int, length_bytes: int) -> None:
    """Reserve a region of a file. Idempotent; bytes already written stay.

    Raises:
        OutOfSpace: the filesystem is full or a limit of the process is reached.
    """
    with translating({OSError: OutOfSpace}):
        os.posix_fallocate(fd, offset_bytes, length_bytes)


def give_back(fd: int, offset_bytes: int, length_bytes: int) -> None:
    """Turn a region into a hole again. Only where no reader has ever been shown the way.

    Raises:
        OutOfSpace: the filesystem cannot; the region is as before.
    """
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    if _libc().fallocate(fd, mode, offset_bytes, length_bytes):
        raise OutOfSpace(f"cannot give memory back: {os.strerror(ctypes.get_errno())}")


def advise_huge(fd: int, offset_bytes: int, length_bytes: int) -> None:
    """Back a region with huge pages where the kernel agrees. A wish: failing changes nothing.

    Shared memory decides on huge pages when a page is first touched through an advised mapping, so
    this comes before `allocate`, which then reserves whatever is still missing.
    """
    libc = _libc()
    address = libc.mmap(
        None, length_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset_bytes
    )
    if address == _MAP_FAILED:
        return
    try:
        if libc.madvise(address, length_bytes, _MADV_HUGEPAGE) == 0:
            # Unlike a plain store, this reports a full filesystem as an error, not as SIGBUS.
            libc.madvise(address, length_bytes, _MADV_POPULATE_WRITE)
    finally:
        libc.munmap(address, length_bytes)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
