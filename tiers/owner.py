"""Who owns a folder: the processes that its lock file names, and the end of one left behind.

A lock file reads `control PID START` and, once there is one, `worker PID START`, START in clock
ticks since boot. The lock itself is inherited by the worker, so it outlives control when that is
killed; then the worker serves nobody, and whoever wants the folder ends it first.
"""

import contextlib
import os
import select
import signal
from pathlib import Path
from typing import Final, NamedTuple, Self

_ROLES: Final = ("control", "worker")
_BYTES_MAX: Final = 256
_GONE: Final = (b"Z", b"X")  # states of a process that runs no more, though nobody has reaped it


class Process(NamedTuple):
    """One process of this boot, whatever becomes of its number."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process that has this number now; None: none has."""
        stat = _stat(pid)
        return None if stat is None else cls(pid, int(stat[19]))

    @property
    def running(self) -> bool:
        """Whether it still runs, as far as can be seen from here."""
        stat = _stat(self.pid)
        return stat is not None and int(stat[19]) == self.start_time and stat[0] not in _GONE

    def end(self, timeout_s: float) -> bool:
        """SIGKILL it and wait until it is gone; whether it is, within the time."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.running:
                return True  # looked at after the number was pinned: nobody else is hit
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return bool(select.select([pidfd], [], [], timeout_s)[0])
        finally:
            os.close(pidfd)


class Owners(NamedTuple):
    """What a lock file says."""

    control: Process | None = None
    worker: Process | None = None

    def write(self, fd: int) -> None:
        """Make the open lock file say this."""
        lines = [
            f"{role} {process.pid} {process.start_time}\n"
            for role, process in zip(_ROLES, self, strict=True)
            if process is not None
        ]
        raw = "".join(lines).encode()
        os.pwrite(fd, raw, 0)
        os.ftruncate(fd, len(raw))

    @classmethod
    def read(cls, fd: int) -> Self:
        """What an open lock file says; nobody where it says nothing readable."""
        found: dict[str, Process] = {}
        for line in os.pread(fd, _BYTES_MAX, 0).decode("ascii", "replace").splitlines():
            match line.split():
                case [("control" | "worker") as role, pid, start] if pid.isdecimal():
                    found[role] = Process(int(pid), int(start) if start.isdecimal() else 0)
                case _:
                    continue
        return cls(found.get("control"), found.get("worker"))


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on (field 3); None: no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return stat[stat.rindex(b")") + 2 :].split()
