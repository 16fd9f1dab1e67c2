"""The instance folder: who owns it, the lock that says so, and files that earlier runs left.

A folder belongs to the process that holds an exclusive `flock` on its `lock` file, and to the
worker that inherits it (`nexuskv.tiers.owner`). Whoever holds the lock may unlink segment files in
the folder; nobody truncates one, because a client may still map it.
Control thread only.
"""

import fcntl
import os
import select
import stat
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from nexuskv.config import format_size
from nexuskv.errors import ConfigError
from nexuskv.tiers.owner import Owners, Process

LOCK_NAME: Final = "lock"
DATA_PREFIX: Final = "data-"
TABLE_PREFIX: Final = "table-"
SEGMENT_PREFIXES: Final = (DATA_PREFIX, TABLE_PREFIX)
NAMESPACES_NAME: Final = "namespaces"

_NAME: Final = "segment folder"
_FOLDER_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_LOCK_TRIES: Final = 16  # each retry means that another owner removed the folder in between
_REAP_S: Final = 5.0
_LOOK_S: Final = 0.01  # between looks at a lock whose holder cannot be waited for


class FolderLock:
    """An instance folder held exclusively. Made by `lock_folder`; `close` is idempotent."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self._fd: int | None = fd

    def fileno(self) -> int:
        """The locked descriptor; a process that inherits it holds the folder too.

        Raises:
            ConfigError: the lock is closed.
        """
        if self._fd is None:
            raise ConfigError(f"the lock of {self.folder} is closed")
        return self._fd

    def record_worker(self, pid: int) -> None:
        """Name the process that inherited the lock, for whoever finds it held without us."""
        Owners(Process.of(os.getpid()), Process.of(pid)).write(self.fileno())

    def discard_segments(self, *, but: Collection[Path] = ()) -> None:
        """Unlink the segment files in the folder. Processes that map one keep their mapping.

        Without any left to keep (`but`), the names of their namespaces go too.
        """
        for path in segment_files(self.folder):
            if path not in but:
                path.unlink(missing_ok=True)
        if not but:
            (self.folder / NAMESPACES_NAME).unlink(missing_ok=True)

    def close(self, *, remove: bool) -> None:
        """Give the folder up; with `remove`, take it away too if nothing else lies in it."""
        if self._fd is None:
            return
        if remove:
            (self.folder / NAMESPACES_NAME).unlink(missing_ok=True)
            # While still locked: an opener that waits on this inode sees that its path is gone.
            (self.folder / LOCK_NAME).unlink(missing_ok=True)
            _remove_if_empty(self.folder)
        os.close(self._fd)
        self._fd = None


def lock_folder(
    folder: Path, *, reap_s: float = _REAP_S, name: str = _NAME, private: bool = True
) -> FolderLock:
    """Make `folder` (mode 0700) where it is missing and take its lock.

    A worker that outlived its daemon and still holds the lock is killed first.

    Args:
        folder: the instance's own.
        reap_s: how long to wait until such a worker is gone.
        name: what errors call the folder.
        private: nobody else may even look into it; else nobody else may write.

    Raises:
        ConfigError: another process holds the lock (names it), or the folder is not safely ours.
    """
    for _ in range(_LOCK_TRIES):
        _make_folder(folder, name, private=private)
        fd = _open_lock(folder, reap_s, name)
        if fd is not None:
            return FolderLock(folder, fd)
    raise ConfigError(f"{name} {folder} keeps being removed by another process")


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


def _make_folder(folder: Path, name: str, *, private: bool) -> None:
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise ConfigError(f"cannot make {name} {folder}: {exc}") from exc
    # /dev/shm is writable by everybody: a folder that another user prepared must not be trusted.
    forbidden = 0o077 if private else 0o022
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & forbidden:
        raise ConfigError(
            f"{name} {folder} must be a directory of user {os.geteuid()} with mode "
            f"{'0700' if private else '0755 or less'}, "
            f"it is of user {found.st_uid} with mode {stat.filemode(found.st_mode)}"
        )


def _open_lock(folder: Path, reap_s: float, name: str) -> int | None:
    """The locked descriptor, or None when the lock file was removed meanwhile."""
    path = folder / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError(f"cannot open {path}: {exc}") from exc
    try:
        _take_lock(fd, f"{name} {folder}", reap_s)
        if os.fstat(fd).st_nlink == 0:
            os.close(fd)
            return None
        Owners(Process.of(os.getpid())).write(fd)
    except OSError as exc:
        os.close(fd)
        raise ConfigError(f"cannot lock {path}: {exc}") from exc
    except ConfigError:
        os.close(fd)
        raise
    return fd


def _take_lock(fd: int, folder: str, reap_s: float) -> None:
    """Lock an open lock file, past a worker that its daemon left behind.

    Raises:
        ConfigError: somebody else holds it.
    """
    deadline_s = time.monotonic() + reap_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            _end_stale(folder, Owners.read(fd), deadline_s, exc)
        else:
            return


def _end_stale(folder: str, owners: Owners, deadline_s: float, cause: OSError) -> None:
    """Bring a held lock nearer to its release, or say who keeps it."""
    control, worker = owners
    name = control.pid if control is not None else "unknown"
    if control is None or control.running:
        raise ConfigError(f"{folder} is in use by process {name}") from cause
    left_s = deadline_s - time.monotonic()
    if worker is not None and worker.running:
        if not worker.end(max(0.0, left_s)):
            raise ConfigError(
                f"{folder} is still in use by process {worker.pid}, the worker of "
                f"daemon {name}, which is gone: it was killed and does not end"
            ) from cause
    elif left_s <= 0:
        raise ConfigError(
            f"{folder} is in use by a process that cannot be seen from here; "
            f"daemon {name}, which took it, is gone"
        ) from cause
    else:
        # A worker that was not recorded yet ends by itself; nothing else says when.
        select.select([], [], [], min(_LOOK_S, left_s))


def _is_locked(folder: Path) -> bool:
    """Whether some process holds the folder's lock, judged without touching the lock.

    Taking it even for a moment would make a daemon that starts just then refuse to.
    """
    path = folder / LOCK_NAME
    try:
        found = path.stat()
        with path.open("rb") as file:
            owners = Owners.read(file.fileno())
        held = Path("/proc/locks").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    except OSError:
        return True
    # Some filesystems show another device number there: then the recorded process must do.
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    listed = any("FLOCK" in line and f" {device} " in line for line in held.splitlines())
    return listed or any(process is not None and process.running for process in owners)


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
