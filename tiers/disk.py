"""The calls that read, write and sync slab files, and the descriptors they work on.

`Disk` is the seam where a test puts a disk that fails. `OpenFiles` keeps a bounded number of files
open for many threads at a time. Any thread.
"""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

from nexuskv.errors import TransferFailed


class Disk(Protocol):
    """One call of the kernel each: it may do less than it was asked for, or fail."""

    def read(self, fd: int, into: memoryview, offset_bytes: int) -> int:
        """Read at an offset; bytes read, 0 at the end of the file. Raises OSError."""
        ...

    def write(self, fd: int, data: memoryview, offset_bytes: int) -> int:
        """Write at an offset; bytes written. Raises OSError."""
        ...

    def sync(self, fd: int) -> None:
        """Make what was written durable. Raises OSError."""
        ...


class KernelDisk:
    """The real one. Each call drops the GIL for its whole duration."""

    def read(self, fd: int, into: memoryview, offset_bytes: int) -> int:
        """See `Disk.read`."""
        return os.preadv(fd, [into], offset_bytes)

    def write(self, fd: int, data: memoryview, offset_bytes: int) -> int:
        """See `Disk.write`."""
        return os.pwritev(fd, [data], offset_bytes)

    def sync(self, fd: int) -> None:
        """See `Disk.sync`."""
        os.fdatasync(fd)


class Opened(NamedTuple):
    """Which file, and how: `direct` goes around the page cache."""

    file_index: int
    direct: bool


class _Entry:
    __slots__ = ("fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd: Final = fd
        self.users = 0


class OpenFiles:
    """Descriptors by file; the one longest unused is closed first, never one in use.

    No more than `limit` are open, or as many as are in use at a time.
    """

    def __init__(self, open_file: Callable[[Opened], int], limit: int) -> None:
        """Use `open_file`, which may raise OSError, for files that are not open."""
        self._open_file = open_file
        self._limit = limit
        self._guard = threading.Lock()
        self._entries: dict[Opened, _Entry] = {}  # longest unused first
        self._closed = False

    @contextmanager
    def borrow(self, which: Opened) -> Generator[int]:
        """A descriptor for as long as the block runs.

        Raises:
            OSError: the file cannot be opened.
            TransferFailed: closed.
        """
        entry = self._enter(which)
        try:
            yield entry.fd
        finally:
            self._leave(entry)

    def forget(self, file_index: int) -> None:
        """Close a file that nobody uses, so that the next user opens what lies at its path then."""
        with self._guard:
            for direct in (False, True):
                entry = self._entries.get(Opened(file_index, direct))
                if entry is not None and not entry.users:
                    del self._entries[Opened(file_index, direct)]
                    os.close(entry.fd)

    def close(self) -> None:
        """Close what nobody uses; the last user closes the rest. Idempotent."""
        with self._guard:
            self._closed = True
            self._shrink(0)

    @property
    def count(self) -> int:
        """Descriptors that are open."""
        return len(self._entries)

    def _enter(self, which: Opened) -> _Entry:
        with self._guard:
            if self._closed:
                raise TransferFailed(f"slab file {which.file_index}: the folder is closed")
            entry = self._entries.pop(which, None)
            if entry is None:
                entry = _Entry(self._open_file(which))
            entry.users += 1
            self._entries[which] = entry
            self._shrink(self._limit)
            return entry

    def _leave(self, entry: _Entry) -> None:
        with self._guard:
            entry.users -= 1
            self._shrink(0 if self._closed else self._limit)

    def _shrink(self, limit: int) -> None:
        if len(self._entries) <= limit:
            return
        for which in [which for which, entry in self._entries.items() if not entry.users]:
            os.close(self._entries.pop(which).fd)
            if len(self._entries) <= limit:
                return
