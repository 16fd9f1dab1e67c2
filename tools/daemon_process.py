"""A daemon as a child process: started, watched, stopped, killed, frozen; for demo, bench, tests.

Owns the child, its log and, through `scratch_folder`, everything it puts on disk. A daemon is ready
when its `nexuskv: ready URL …` line has come. One thread a child drains its stderr, so that a full
pipe never stalls it. Methods are called from one thread.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from nexuskv.config import MIB
from nexuskv.errors import ConfigError, DaemonUnreachable

READY_PREFIX: Final = "nexuskv: ready "
START_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 20.0
LOG_LINES_MAX: Final = 4096
ROOM_LEAST_BYTES: Final = 512 * MIB  # containers often have 64 MiB of shared memory
_LAST_WORDS_S: Final = 1.0  # between the ends of a child and of its stderr, whichever is first
_SHARED_MEMORY: Final = Path("/dev/shm")


@contextlib.contextmanager
def scratch_folder(purpose: str) -> Generator[Path, None, None]:
    """A private folder for one daemon's socket and segments, removed at the end.

    It lies in shared memory where there is enough: pages on a disk would be written out.
    """
    place = _SHARED_MEMORY if _has_room(_SHARED_MEMORY) else None
    folder = Path(tempfile.mkdtemp(prefix=f"nexuskv-{purpose}-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def disk_folder(purpose: str) -> Generator[Path, None, None]:
    """A private folder for pages on disk, where TMPDIR says; removed at the end."""
    with tempfile.TemporaryDirectory(prefix=f"nexuskv-{purpose}-") as folder:
        yield Path(folder)


def _has_room(folder: Path) -> bool:
    if not os.access(folder, os.W_OK):
        return False
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize >= ROOM_LEAST_BYTES


def interrupt_on_sigterm() -> None:
    """End as Ctrl-C does, so that a terminated command stops its daemon and removes its files."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


class DaemonProcess:
    """One `nexuskv serve` child on paths in `folder`: a unix socket and segments.

    `flags` are fields of `Config`; `listen` is added to the socket, which is always there. Nothing
    runs before `start`. As a context manager it starts, and closes at the end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        flags: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/daemon.sock"
        self.urls: tuple[str, ...] = ()
        self._flags = dict(flags or {})
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._ready = threading.Event()
        self._lines: deque[str] = deque(maxlen=LOG_LINES_MAX)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def segment_folder(self) -> Path:
        """Where the daemon keeps its segments."""
        return self.folder / "segments"

    @property
    def pid(self) -> int:
        """The process id of the daemon that was started last."""
        return self._child().pid

    @property
    def running(self) -> bool:
        """Whether the child was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def url_of(self, scheme: str) -> str:
        """The first address of a scheme (`unix`, `tcp`) that the ready line named."""
        for url in self.urls:
            if url.startswith(scheme + "://"):
                return url
        raise ConfigError(f"the daemon has no {scheme} address, it has {' '.join(self.urls)}")

    def log(self) -> str:
        """What all children have written to stderr, the last `LOG_LINES_MAX` lines."""
        return "\n".join(self._lines)

    def command(self) -> list[str]:
        """The command line of the child."""
        listen = ",".join(filter(None, (self.url, str(self._flags.get("listen", "")))))
        fields = {"segment_dir": self.segment_folder, **self._flags, "listen": listen}
        return [sys.executable, "-m", "nexuskv.tools", "serve", *flags_of(fields)]

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the child and wait until it is ready.

        Raises:
            DaemonUnreachable: it ended or said nothing within the time; the message has its log.
        """
        self.launch()
        self._ready.wait(timeout_s)
        if not self.urls:
            failed = self._ended_with()
            self.close()
            what = f"is not ready after {timeout_s} s" if failed is None else f"ended with {failed}"
            raise DaemonUnreachable(f"the daemon {what}; it said:\n{self.log()}")

    def set_flag(self, name: str, value: object) -> None:
        """Give a config field another value from the next start on."""
        self._flags[name] = value

    def launch(self) -> None:
        """Start the child without waiting for anything: for what must fail, or be timed."""
        if self.running:
            raise ConfigError(f"the daemon runs already, process {self.pid}")
        self._finish_reader()
        self._ready.clear()
        self.urls = ()
        # Its own process group: Ctrl-C at the terminal reaches the owner, who stops it in order.
        self._process = subprocess.Popen(
            self.command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
            env=None if self._environment is None else dict(self._environment),
        )
        self._reader = threading.Thread(
            target=self._read, args=(self._process,), name="daemon-log", daemon=True
        )
        self._reader.start()

    def wait(self, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the child's end; its exit status, or minus the signal that ended it."""
        code = self._child().wait(timeout_s)
        self._finish_reader()
        return code

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Ask for a clean stop (SIGTERM) and wait; the exit status."""
        self._signal(signal.SIGTERM)
        return self.wait(timeout_s=timeout_s)

    def kill(self) -> None:
        """End the child at once (SIGKILL) and reap it; its files stay."""
        self._signal(signal.SIGKILL)
        self.wait()

    def restart(self) -> None:
        """Start again on the same paths, after a clean stop if it still runs."""
        if self.running:
            self.stop()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: the child keeps everything and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def leftovers(self) -> list[Path]:
        """Files in the folder that a clean stop should have removed; the lock may stay."""
        found = [path for path in self.folder.rglob("*") if not path.is_dir()]
        return sorted(path for path in found if path.name != "lock")

    def close(self) -> None:
        """End the child, cleanly if it still can. Idempotent."""
        if self.running:
            self.thaw()
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
        self._finish_reader()

    def _ended_with(self) -> int | None:
        """The exit status of a child that said nothing more; None when it still runs."""
        try:
            return self._child().wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return None

    def _child(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise ConfigError("the daemon was never started")
        return self._process

    def _signal(self, number: signal.Signals) -> None:
        self._child().send_signal(number)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))
                if line.startswith(READY_PREFIX):
                    self.urls = tuple(line.removeprefix(READY_PREFIX).split())
                    self._ready.set()
        # The end wakes a waiting start as well: there is nothing left to wait for. It comes late if
        # something that the child started kept its stderr; by then there may be another child.
        if process is self._process:
            self._ready.set()

    def _finish_reader(self) -> None:
        if self._reader is not None:
            self._reader.join(_LAST_WORDS_S)


def flags_of(fields: Mapping[str, object]) -> Sequence[str]:
    """Command-line flags of config fields: `{"host_memory": "1GiB"}` → `--host-memory=1GiB`."""
    flags: list[str] = []
    for name, value in fields.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    return flags
