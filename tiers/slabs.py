"""The ssd folder on disk: preallocated slab files, and reading and writing their slots.

    DIR/FORMAT            version, geometry and identity of the folder
    DIR/lock              held exclusively by the one process that has it open
    DIR/slabs/XX/slab-N   the files; XX is the low byte of N in hex
    DIR/catalogue/        which page lies where (`nexuskv.tiers.catalogue`)

Worker process only. `read_into`, `write_from` and `sync` may run on many threads at a time, and
`make` beside them on one. Nothing here decides; nothing of another product is ever removed.

Invariants: a file is listed only with a durable superblock of this folder, its own index and a slot
size that fits; a read or write covers all of its bytes or raises.
"""

import errno
import os
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeAlias

from nexuskv.errors import ConfigError, NexusError, OutOfSpace, TransferFailed
from nexuskv.tiers.disk import Disk, KernelDisk, Opened, OpenFiles
from nexuskv.tiers.folder import FolderLock, lock_folder
from nexuskv.tiers.geometry import SUPERBLOCK_BYTES, SlabGeometry, round_up
from nexuskv.tiers.slab_folder import (
    CATALOGUE_NAME,
    Removed,
    find_slabs,
    open_format,
    path_of,
    sync_folder,
)
from nexuskv.tiers.slab_format import FolderFormat, Superblock

__all__ = ["Place", "Removed", "SlabFolder"]

Transfer: TypeAlias = Callable[[int, memoryview, int], int]
"""`Disk.read` or `Disk.write`."""

_FILE_MODE: Final = 0o600
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Place(NamedTuple):
    """A slot of a slab file."""

    file_index: int
    slot_index: int


class SlabFolder:
    """An ssd folder held exclusively. Use `open` to make one; `close` is idempotent."""

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        geometry: SlabGeometry,
        capacity_bytes: int,
        new_folder_id: bytes,
        open_files_max: int,
        create: bool = True,
        disk: Disk | None = None,
    ) -> "SlabFolder":
        """Lock an ssd folder, check that it is ours, and see which files are good.

        Files without a good superblock and files above the capacity are removed: `removed` says
        which and why. Their pages are misses.

        Args:
            folder: made when missing, filled when empty; anything else must have a FORMAT.
            geometry: how the folder is, or is to be, cut.
            capacity_bytes: files at and above this, in whole files, are removed.
            new_folder_id: 16 random bytes, used if the folder is new.
            open_files_max: descriptors kept open.
            create: make the folder if it is missing or empty.
            disk: what reads and writes; None is the kernel.

        Raises:
            ConfigError: the folder is in use, another product's, of another version or geometry,
                or damaged; says what, which and what to do.
            TransferFailed: the disk fails.
            OutOfSpace: the disk is full.
        """
        file_count = geometry.file_count(capacity_bytes)
        if not create and not folder.is_dir():
            raise ConfigError(f"there is no ssd folder {folder}")
        lock = lock_folder(folder, name="ssd folder", private=False)
        try:
            with _translating(folder):
                format_ = open_format(folder, FolderFormat(geometry, new_folder_id), create=create)
                files, removed = find_slabs(folder, format_, file_count)
        except NexusError:
            lock.close(remove=False)
            raise
        return cls(lock, format_, file_count, files, removed, open_files_max, disk or KernelDisk())

    def __init__(
        self,
        lock: FolderLock,
        format_: FolderFormat,
        file_count: int,
        files: dict[int, int],
        removed: list[Removed],
        open_files_max: int,
        disk: Disk,
    ) -> None:
        self.folder = lock.folder
        self.geometry = format_.geometry
        self.removed = removed
        self._lock = lock
        self._format = format_
        self._file_count = file_count
        self._files = files
        self._disk = disk
        self._guard = threading.Lock()
        self._direct = True
        self._buffered_count = 0
        self._opened = OpenFiles(self._open_file, open_files_max)

    @property
    def catalogue_folder(self) -> Path:
        """Where the catalogue of these files belongs."""
        return self.folder / CATALOGUE_NAME

    @property
    def files(self) -> Mapping[int, int]:
        """File index → slot size of the files that may be read and written. Never changes itself.

        A new mapping takes its place when a file is made.
        """
        return self._files

    @property
    def direct(self) -> bool:
        """Whether files are read and written around the page cache."""
        return self._direct

    @property
    def buffered_count(self) -> int:
        """Calls that went through the page cache because the kernel refused them otherwise."""
        return self._buffered_count

    # --- files

    def make(self, file_index: int, slot_bytes: int) -> None:
        """Preallocate a file and write its superblock, durably. A file that exists is cut anew.

        No row may name a slot of the file, and nobody may be reading or writing it.

        Raises:
            ConfigError: the index is beyond the capacity, or the size no slot size.
            OutOfSpace: the disk is full; a file that is new is removed again.
            TransferFailed: the disk fails.
        """
        if not 0 <= file_index < self._file_count or not self.geometry.is_slot_size(slot_bytes):
            raise ConfigError(
                f"cannot make ssd file {file_index} of {self._file_count} with slots of "
                f"{slot_bytes} bytes"
            )
        path = path_of(self.folder, file_index)
        with self._guard:
            self._files = {index: cut for index, cut in self._files.items() if index != file_index}
        self._opened.forget(file_index)
        with _translating(path):
            self._make_file(path, Superblock(file_index, slot_bytes, self._format).encode())
        with self._guard:
            self._files = {**self._files, file_index: slot_bytes}

    def sync(self, file_indexes: set[int]) -> None:
        """Make what was written to these files durable.

        Raises:
            TransferFailed, OutOfSpace: the disk failed, or is full; what was written since the last
                call may be lost.
        """
        for file_index in sorted(file_indexes):
            path = path_of(self.folder, file_index)
            which = Opened(file_index, self._direct)
            with _translating(path), self._opened.borrow(which) as fd:
                self._disk.sync(fd)

    # --- slots

    def read_into(
        self, into: memoryview, *, file_index: int, slot_index: int, size_bytes: int
    ) -> None:
        """Read a page.

        Args:
            into: writable bytes, page aligned, at least `size_bytes` rounded up to 4096; that much
                is overwritten, also when this fails.
            file_index: the file.
            slot_index: the slot in it.
            size_bytes: of the page.

        Raises:
            ConfigError: there is no such slot, or a size is wrong.
            TransferFailed: the disk failed, or the file is shorter than it should be.
        """
        view, offset_bytes = self._span(into, file_index, slot_index, size_bytes)
        with view:
            self._transfer(self._disk.read, view, file_index, offset_bytes)

    def write_from(
        self, data: memoryview, *, file_index: int, slot_index: int, size_bytes: int
    ) -> None:
        """Write a page; it is durable after `sync`. Arguments as in `read_into`.

        Raises:
            ConfigError: there is no such slot, or a size is wrong.
            OutOfSpace: the disk is full.
            TransferFailed: the disk failed.
        """
        view, offset_bytes = self._span(data, file_index, slot_index, size_bytes)
        with view:
            self._transfer(self._disk.write, view, file_index, offset_bytes)

    def close(self) -> None:
        """Close the files, the last ones when their calls end, and give the folder up."""
        self._opened.close()
        self._lock.close(remove=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- inside

    def _span(
        self, view: memoryview, file_index: int, slot_index: int, size_bytes: int
    ) -> tuple[memoryview, int]:
        """The bytes of the call, whole blocks, and where they lie in the file."""
        slot_bytes = self._files.get(file_index)
        length = round_up(size_bytes)
        if slot_bytes is None:
            raise ConfigError(f"there is no ssd file {file_index}")
        if not 0 <= slot_index < self.geometry.slot_count(slot_bytes):
            raise ConfigError(f"ssd file {file_index} has no slot {slot_index}")
        if not 0 < length <= min(slot_bytes, view.nbytes):
            raise ConfigError(
                f"a page of {size_bytes} bytes does not fit a slot of {slot_bytes} and memory of "
                f"{view.nbytes} bytes"
            )
        return view[:length], self.geometry.offset_bytes(slot_bytes, slot_index)

    def _transfer(
        self, call: Transfer, view: memoryview, file_index: int, offset_bytes: int
    ) -> None:
        with _translating(path_of(self.folder, file_index)):
            if self._direct:
                try:
                    return self._run(call, view, Opened(file_index, direct=True), offset_bytes)
                except OSError as exc:
                    if exc.errno != errno.EINVAL:
                        raise
                self._buffered_count += 1
            return self._run(call, view, Opened(file_index, direct=False), offset_bytes)

    def _run(self, call: Transfer, view: memoryview, which: Opened, offset_bytes: int) -> None:
        with self._opened.borrow(which) as fd:
            done = 0
            while done < view.nbytes:
                # Released at once: an error's traceback must not keep the caller's memory mapped.
                with view[done:] as rest:
                    moved = call(fd, rest, offset_bytes + done)
                if moved <= 0:
                    raise TransferFailed(
                        f"ssd file {which.file_index} ended {done} bytes into {view.nbytes} at "
                        f"{offset_bytes}"
                    )
                done += moved

    def _open_file(self, which: Opened) -> int:
        path = path_of(self.folder, which.file_index)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        if which.direct and self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
            self._direct = False  # the filesystem knows no O_DIRECT, so no file of it does
        return os.open(path, flags)

    def _make_file(self, path: Path, superblock: bytes) -> None:
        sharded = path.parent
        if not sharded.is_dir():
            sharded.mkdir(mode=0o700)
            sync_folder(sharded.parent)
        is_new = not path.exists()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, _FILE_MODE)
        try:
            # The superblock last: a file that is not whole yet must not look as if it were.
            os.ftruncate(fd, self.geometry.file_bytes)
            os.posix_fallocate(fd, 0, self.geometry.file_bytes)
            os.fsync(fd)
            _write_all(self._disk, fd, superblock)
            self._disk.sync(fd)
            sync_folder(sharded)
        except OSError:
            if is_new:
                path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def _write_all(disk: Disk, fd: int, superblock: bytes) -> None:
    done = 0
    while done < SUPERBLOCK_BYTES:
        moved = disk.write(fd, memoryview(superblock)[done:], done)
        if moved <= 0:
            raise OSError(errno.EIO, "the disk takes no bytes")
        done += moved


@contextmanager
def _translating(path: Path) -> Generator[None]:
    """Turn an OSError into the error that says what to do, naming the file."""
    try:
        yield
    except OSError as exc:
        ours = OutOfSpace if exc.errno in _FULL else TransferFailed
        raise ours(f"{exc.filename or path}: {exc.strerror or exc}") from exc
