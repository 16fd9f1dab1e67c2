"""One worker process as the operating system sees it: made, signalled, reaped.

Owns the process, a pidfd and control's end of the socket pair. Control thread only.
"""

import os
import signal
import socket
import subprocess
import sys
from typing import Final, Protocol, Self

# The worker finds the package where this process found it, wherever either was started.
_BOOT: Final = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from nexuskv.worker.__main__ import main; sys.exit(main())"
)


class WorkerHandle(Protocol):
    """What a supervisor needs of a worker process."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def pidfd(self) -> int:
        """Readable when it has ended."""
        ...

    @property
    def end(self) -> socket.socket:
        """Our end of the socket pair, non-blocking."""
        ...

    def kill(self) -> None:
        """SIGKILL. It has not ended before `reap` says so."""
        ...

    def reap(self) -> int | None:
        """The exit status, minus the signal that ended it; None while it is not gone."""
        ...

    def close(self) -> None:
        """Close our descriptors. Idempotent."""
        ...


class WorkerProcess:
    """A `WorkerHandle` on a real process. `start` makes one."""

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int, end: socket.socket) -> None:
        self._process = process
        self.pid = process.pid
        self.pidfd = pidfd
        self.end = end
        self._closed = False

    @classmethod
    def start(cls, *, executable: str, lock_fd: int) -> Self:
        """Start a worker in a session of its own, with the lock and its end of a socket pair.

        Raises:
            OSError: the process cannot be made.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                fds = (theirs.fileno(), lock_fd)
                arguments = [str(fd) for fd in fds]
                process = subprocess.Popen(
                    [executable, "-P", "-c", _BOOT, *arguments, *sys.path],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=fds,
                    start_new_session=True,  # Ctrl-C at a terminal is control's to handle
                )
            ours.setblocking(False)
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            ours.close()
            raise
        return cls(process, pidfd, ours)

    def kill(self) -> None:
        """SIGKILL. It has not ended before `reap` says so."""
        self._process.send_signal(signal.SIGKILL)

    def reap(self) -> int | None:
        """The exit status, minus the signal that ended it; None while it is not gone."""
        return self._process.poll()

    def close(self) -> None:
        """Close our descriptors. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self.pidfd)
            self.end.close()
