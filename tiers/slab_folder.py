"""What lies in an ssd folder: making a new one, refusing a foreign one, sorting out its files.

Worker process only; called before anything of the folder is in use.
"""

import os
import re
import stat
from pathlib import Path
from typing import Final, NamedTuple

from nexuskv.errors import ConfigError
from nexuskv.tiers.folder import LOCK_NAME
from nexuskv.tiers.geometry import SUPERBLOCK_BYTES
from nexuskv.tiers.slab_format import FORMAT_BYTES, FolderFormat, slot_bytes_in

FORMAT_NAME: Final = "FORMAT"
FORMAT_NEW_NAME: Final = "FORMAT.new"
SLABS_NAME: Final = "slabs"
CATALOGUE_NAME: Final = "catalogue"

# What may lie in a folder that is not made yet: a lock, a making that was cut short, and what
# mkfs puts at the top of a filesystem of its own.
_BEFORE_FORMAT: Final = frozenset({LOCK_NAME, FORMAT_NEW_NAME, SLABS_NAME, "lost+found"})
_SHARDS: Final = 256
_SHARD_NAME: Final = re.compile(r"[0-9a-f]{2}")
_SLAB_NAME: Final = re.compile(r"slab-([0-9]{6,9})")
_NAMED_MAX: Final = 3  # files that one message names


class Removed(NamedTuple):
    """A slab file that was taken away when the folder was opened."""

    path: Path
    reason: str


def path_of(folder: Path, file_index: int) -> Path:
    """Where a slab file lies: at most a 256th of them in one folder."""
    shard = f"{file_index % _SHARDS:02x}"
    return folder / SLABS_NAME / shard / f"slab-{file_index:06d}"


def open_format(folder: Path, wanted: FolderFormat, *, create: bool) -> FolderFormat:
    """Read the FORMAT file, or make it in an empty folder.

    Raises:
        ConfigError: the folder is not ours, or not as wanted.
        OSError: the disk fails.
    """
    path = folder / FORMAT_NAME
    if not path.exists():
        _check_empty(folder, create=create)
        _make(folder, wanted)
        return wanted
    # One byte more than there should be, so that a longer file is seen.
    raw = _read_start(path, FORMAT_BYTES + 1)
    try:
        found = FolderFormat.decode(raw)
        found.check_same(wanted.geometry)
    except ConfigError as exc:
        raise ConfigError(
            f"ssd folder {folder} cannot be used: of its FORMAT file, {exc}. Name another folder "
            f"(ssd_dir), give it the settings it was made with, or empty it: its pages are a cache"
        ) from exc
    return found


def find_slabs(
    folder: Path, format_: FolderFormat, file_count: int
) -> tuple[dict[int, int], list[Removed]]:
    """The good slab files, index → slot size; the others are removed.

    Files whose names are none of ours stay where they are.

    Raises:
        OSError: the disk fails, or a bad file cannot be removed.
    """
    slabs = folder / SLABS_NAME
    slabs.mkdir(mode=0o700, exist_ok=True)
    files: dict[int, int] = {}
    removed: list[Removed] = []
    for path, file_index in _named_slabs(slabs):
        slot_bytes, reason = _judge(path, file_index, format_, file_count)
        if slot_bytes:
            files[file_index] = slot_bytes
        else:
            path.unlink()
            removed.append(Removed(path, reason))
    return dict(sorted(files.items())), removed


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_empty(folder: Path, *, create: bool) -> None:
    names = sorted(os.listdir(folder))
    strange = [name for name in names if name not in _BEFORE_FORMAT]
    slabs = folder / SLABS_NAME
    if not strange and slabs.is_dir():
        strange = [f"{SLABS_NAME}/{name}" for name in sorted(os.listdir(slabs))]
    if strange:
        more = ", …" if len(strange) > _NAMED_MAX else ""
        raise ConfigError(
            f"ssd folder {folder} has no FORMAT file, but other files "
            f"({', '.join(strange[:_NAMED_MAX])}{more}): name an empty folder (ssd_dir) or empty it"
        )
    if not create:
        raise ConfigError(f"ssd folder {folder} is empty")


def _make(folder: Path, format_: FolderFormat) -> None:
    """The FORMAT file comes last, whole: a folder with one is complete."""
    (folder / SLABS_NAME).mkdir(mode=0o700, exist_ok=True)
    new = folder / FORMAT_NEW_NAME
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(new, flags, 0o600)
    try:
        os.write(fd, format_.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    new.rename(folder / FORMAT_NAME)
    sync_folder(folder)
    sync_folder(folder.parent)


def _named_slabs(slabs: Path) -> list[tuple[Path, int]]:
    found: list[tuple[Path, int]] = []
    for shard in sorted(os.listdir(slabs)):
        if not _SHARD_NAME.fullmatch(shard) or not stat.S_ISDIR((slabs / shard).lstat().st_mode):
            continue
        for name in sorted(os.listdir(slabs / shard)):
            named = _SLAB_NAME.fullmatch(name)
            if named and path_of(slabs.parent, int(named[1])) == slabs / shard / name:
                found.append((slabs / shard / name, int(named[1])))
    return found


def _judge(path: Path, file_index: int, format_: FolderFormat, file_count: int) -> tuple[int, str]:
    """The slot size of a good file, or 0 and what is wrong with it."""
    found = path.lstat()
    if file_index >= file_count:
        return 0, f"above the capacity of {file_count} files"
    if not stat.S_ISREG(found.st_mode):
        return 0, "no regular file"
    if found.st_size != format_.geometry.file_bytes:
        return 0, f"{found.st_size} bytes long, not {format_.geometry.file_bytes}"
    try:
        raw = _read_start(path, SUPERBLOCK_BYTES)
    except OSError as exc:
        return 0, f"its superblock cannot be read: {exc.strerror}"
    slot_bytes = slot_bytes_in(raw, file_index, format_)
    return (slot_bytes, "") if slot_bytes else (0, "no superblock of this folder and file")


def _read_start(path: Path, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.pread(fd, length, 0)
    finally:
        os.close(fd)
