"""Real daemons for whole-system tests. Every one is stopped, and nothing of it may be left."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nexuskv.tools.daemon_process import DaemonProcess, scratch_folder

StartDaemon = Callable[..., DaemonProcess]


SMALL = {"host_memory": "256MiB", "chunk_bytes": "16MiB", "keep_pages": False}


@pytest.fixture
def daemon_folder() -> Iterator[Path]:
    """A private folder in shared memory, short enough for a socket's path."""
    with scratch_folder(f"test-{os.getpid()}") as folder:
        yield folder


@pytest.fixture
def start_daemon(daemon_folder: Path) -> Iterator[StartDaemon]:
    """Start daemons: `start_daemon(host_memory="256MiB", listen="tcp://127.0.0.1:0")`.

    Flags are config fields; 256 MiB of pages unless said. Each gets a folder of its own. A test
    that kills its daemon answers for what that left; all others must leave nothing behind, and
    begin with nothing, unless they ask for `keep_pages`.
    """
    started: list[tuple[DaemonProcess, bool]] = []

    def start(**flags: object) -> DaemonProcess:
        folder = daemon_folder / str(len(started))
        folder.mkdir()
        daemon = DaemonProcess(folder, flags={**SMALL, **flags})
        started.append((daemon, bool(flags.get("keep_pages"))))
        daemon.start()
        return daemon

    yield start
    codes = [_end(daemon, keeps=keeps) for daemon, keeps in started]
    assert not any(codes), "a daemon failed:\n" + "\n".join(each.log() for each, _ in started)


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    """One running daemon with small defaults."""
    return start_daemon()


def _end(daemon: DaemonProcess, *, keeps: bool) -> int:
    """Stop a daemon that still runs; 0 or the exit status of a failed stop."""
    if not daemon.running:
        daemon.close()
        return 0
    daemon.thaw()
    code = daemon.stop()
    assert keeps or daemon.leftovers() == [], "a clean stop left files behind"
    return code
