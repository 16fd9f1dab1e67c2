"""The physical limit of cold reads: O_DIRECT preadv of a file by as many threads as a daemon has.

The file lies in the folder that holds the daemon's slab files, is as large as what is read through
the daemon, and is written once. Reads bypass the page cache, as the daemon's do. Python threads
reach what C threads do here, as long as no other Python thread is busy.
"""

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Self

from nexuskv.config import MIB
from nexuskv.errors import NexusError

WRITE_BYTES: Final = 4 * MIB


class RawFile:
    """A file of pages and the threads that read it. A context manager; one caller at a time."""

    def __init__(self, path: Path, *, size_bytes: int, page_bytes: int, threads: int) -> None:
        """Write the file.

        Raises:
            NexusError: the file system has no O_DIRECT: there is no limit to compare with.
        """
        self._page_bytes = page_bytes
        self._page_count = size_bytes // page_bytes
        self._threads = threads
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        except OSError as exc:
            raise NexusError(f"{path.parent} has no O_DIRECT, set TMPDIR: {exc}") from exc
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="raw")
        self._memory = mmap.mmap(-1, threads * page_bytes)  # page aligned, as O_DIRECT wants it
        self._fill(size_bytes)

    def _fill(self, size_bytes: int) -> None:
        with mmap.mmap(-1, WRITE_BYTES) as block:
            block[:] = os.urandom(WRITE_BYTES)
            for at in range(0, size_bytes, WRITE_BYTES):
                os.pwrite(self._fd, block, at)
        os.fsync(self._fd)

    def read(self, turn: int, count: int) -> None:
        """Read the batch of `count` pages of this turn, `threads` of them at a time."""
        first = turn * count % (self._page_count - count + 1)
        lanes = [range(first + lane, first + count, self._threads) for lane in range(self._threads)]
        for done in self._pool.map(self._read_lane, range(self._threads), lanes):
            if not done:
                raise NexusError("a raw read came up short")

    def _read_lane(self, lane: int, pages: Sequence[int]) -> bool:
        size = self._page_bytes
        with memoryview(self._memory) as whole, whole[lane * size : (lane + 1) * size] as into:
            return all(os.preadv(self._fd, [into], page * size) == size for page in pages)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        os.close(self._fd)
        self._memory.close()
