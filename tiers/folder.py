"""The instance folder: who owns it, the lock that says so, and files that earlier runs left.

A folder belongs to the process that holds an exclusive `flock` on its `lock` file. Whoever holds
the lock may unlink segment files in the folder; nobody truncates one, because a client may still
map it.
Control thread only.
"""

import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from nexuskv.config import format_size
from nexuskv.errors import ConfigError

LOCK_NAME: Final = "lock"
SEGMENT_PREFIXES: Final = ("data-", "table-")

_FOLDER_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_LOCK_TRIES: Final = 16  # each retry means that another owner removed the folder in between


class FolderLock:
    """An instance folder held exclusively. Made by `lock_folder`; `close` is idempotent."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self._fd: int | None = fd

    def discard_segments(self) -> None:
        """Unlink every segment file in the folder. Processes that map one keep their mapping."""
        for path in segment_files(self.folder):
            path.unlink(missing_ok=True)

    def close(self, *, remove: bool) -> None:
        """Give the folder up; with `remove`, take it away too if nothing else lies in it."""
        if self._fd is None:
            return
        if remove:
            # While still locked: an opener that waits on this inode sees that its path is gone.
            (self.folder / LOCK_NAME).unlink(missing_ok=True)
            _remove_if_empty(self.folder)
        os.close(self._fd)
        self._fd = None


def lock_folder(folder: Path) -> FolderLock:
    """Make `folder` (mode 0700) where it is missing and take its lock.

    Raises:
        ConfigError: another process holds the lock (names it), or the folder is not safely ours.
    """
    for _ in range(_LOCK_TRIES):
        _make_folder(folder)
        fd = _open_lock(folder)
        if fd is not None:
            return FolderLock(folder, fd)
    raise ConfigError(f"segment folder {folder} keeps being removed by another process")


def segment_files(folder: Path) -> list[Path]:
    """The data and table files in a folder, of any incarnation; none when it cannot be read."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name.startswith(SEGMENT_PREFIXES)]


def find_leftovers(folder: Path) -> list[Path]:
    """Folders beside this one that hold segment files while no process holds their lock."""
    try:
        beside = sorted(os.listdir(folder.parent))
    except OSError:
        return []
    others = [folder.parent / name for name in beside if name != folder.name]
    return [other for other in others if segment_files(other) and not _is_locked(other)]


def check_space(folder: Path, needed_bytes: int) -> None:
    """Check that the filesystem of `folder` can hold a segment. Creates nothing.

    What earlier runs left in the folder counts as free: it is discarded before the new one is made.

    Raises:
        ConfigError: it cannot; names the path and both sizes.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    room = os.statvfs(existing)
    free_bytes = room.f_bavail * room.f_frsize + sum(map(_resident_bytes, segment_files(folder)))
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{folder} cannot hold {needed_bytes} bytes ({format_size(needed_bytes)}) of host "
            f"memory: its filesystem has {free_bytes} bytes ({format_size(free_bytes)}) free"
        )


def _make_folder(folder: Path) -> None:
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise ConfigError(f"cannot make segment folder {folder}: {exc}") from exc
    # /dev/shm is writable by everybody: a folder that another user prepared must not be trusted.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"segment folder {folder} must be a directory of user {os.geteuid()} with mode 0700, "
            f"it is of user {found.st_uid} with mode {stat.filemode(found.st_mode)}"
        )


def _open_lock(folder: Path) -> int | None:
    """The locked descriptor, or None when the lock file was removed meanwhile."""
    path = folder / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError(f"cannot open {path}: {exc}") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink == 0:
            os.close(fd)
            return None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as exc:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        if isinstance(exc, BlockingIOError):
            raise ConfigError(
                f"segment folder {folder} is in use by process {holder or 'unknown'}"
            ) from exc
        raise ConfigError(f"cannot lock {path}: {exc}") from exc
    return fd


def _is_locked(folder: Path) -> bool:
    """Whether some process holds the folder's lock, judged without touching the lock.

    Taking it even for a moment would make a daemon that starts just then refuse to.
    """
    path = folder / LOCK_NAME
    try:
        found = path.stat()
        holder = path.read_text(encoding="ascii", errors="replace").strip()
        held = Path("/proc/locks").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    except OSError:
        return True
    # Some filesystems show another device number there: then the recorded process must do.
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    listed = any("FLOCK" in line and f" {device} " in line for line in held.splitlines())
    return listed or (holder.isdecimal() and Path("/proc", holder).exists())


def _resident_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return  # Somebody keeps other files there; the folder is then theirs to remove.
