"""Starts and steers the client processes of tests/e2e/child.py."""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
END_TIMEOUT_S = 30.0
_PIDFD_GETFD = 438  # the same number on every architecture


class Child:
    """One client process."""

    def __init__(self, action: str, url: str, **options: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.child", action, url, json.dumps(options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def read(self) -> str:
        """The next line it says; empty when it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def fileno(self) -> int:
        """What `select` waits on for its next line, or its end."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def has_spoken(self) -> bool:
        """Whether it has said something that was not read yet."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def outcome(self) -> object:
        """The next line it says, as JSON."""
        line = self.read()
        assert line, "the child ended without an outcome"
        return json.loads(line)

    def go(self) -> None:
        """Let it do the next thing."""
        self.say("")

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def hang_up(self) -> None:
        """Shut its unix sockets down from outside, whatever it is doing."""
        pidfd = os.pidfd_open(self.pid)
        try:
            for fd in map(int, os.listdir(f"/proc/{self.pid}/fd")):
                if os.readlink(f"/proc/{self.pid}/fd/{fd}").startswith("socket:"):
                    with socket.socket(fileno=_fd_of(pidfd, fd)) as sock, suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
        finally:
            os.close(pidfd)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self._process.kill()
        self._process.wait(END_TIMEOUT_S)

    def end(self) -> None:
        """Let it end by itself, and reap."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)

    def close(self) -> None:
        """End it in any case."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(END_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


def _fd_of(pidfd: int, fd: int) -> int:
    """A copy of another process's descriptor (pidfd_getfd, Linux 5.6)."""
    copied: int = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if copied < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return copied


@contextmanager
def child(action: str, url: str, **options: object) -> Generator[Child]:
    """A child that is gone at the end of the block."""
    process = Child(action, url, **options)
    try:
        yield process
    finally:
        process.close()
