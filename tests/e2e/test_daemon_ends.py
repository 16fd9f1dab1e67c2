"""How a daemon starts, stops and is refused, seen from outside and by the raw protocol."""

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nexuskv.protocol import AcquireState, Type
from nexuskv.tools.daemon_process import START_TIMEOUT_S, DaemonProcess
from tests.control.raw import RawLocal, chain

pytestmark = pytest.mark.e2e

StartDaemon = Callable[..., DaemonProcess]


@pytest.fixture
def connect() -> Iterator[Callable[[DaemonProcess], RawLocal]]:
    """Raw local clients, greeted, closed at the end."""
    made: list[RawLocal] = []

    def make(daemon: DaemonProcess) -> RawLocal:
        client = RawLocal(daemon.url.removeprefix("unix://"))
        made.append(client)
        client.hello()
        return client

    yield make
    for client in made:
        client.close()


def test_sigterm_answers_waiting_acquires_and_leaves_nothing(
    start_daemon: StartDaemon, connect: Callable[[DaemonProcess], RawLocal]
) -> None:
    daemon = start_daemon(stop_timeout_s=5.0)
    client, idle = connect(daemon), connect(daemon)
    space = client.open()
    client.put(space, chain("a", 4))
    client.acquire(space, chain("a", 8), wait_ms=60_000)
    idle.reserve(idle.open(), chain("b", 4))
    assert daemon.stop(timeout_s=10.0) == 0
    assert client.group().state is AcquireState.ABORTED
    assert daemon.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_two_signals_stop_it_clean(start_daemon: StartDaemon, number: signal.Signals) -> None:
    daemon = start_daemon()
    os.kill(daemon.pid, number)
    os.kill(daemon.pid, number)
    assert daemon.wait() == 0
    assert daemon.leftovers() == []


def test_a_second_daemon_on_the_same_instance_is_refused_in_one_line(
    start_daemon: StartDaemon, connect: Callable[[DaemonProcess], RawLocal]
) -> None:
    first = start_daemon()
    client = connect(first)
    done = run_serve(
        f"--segment-dir={first.segment_folder}", f"--listen=unix://{first.folder}/other.sock"
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(first.pid) in done.stderr
    assert client.call(Type.PING, b"on") == [b"on"]


def test_a_second_daemon_on_the_same_socket_is_refused_in_one_line(
    start_daemon: StartDaemon, connect: Callable[[DaemonProcess], RawLocal], daemon_folder: Path
) -> None:
    first = start_daemon()
    client = connect(first)
    done = run_serve(f"--segment-dir={daemon_folder}/two", f"--listen={first.url}")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "another process listens" in done.stderr
    assert client.call(Type.PING, b"on") == [b"on"]
    assert not (daemon_folder / "two").exists()


def test_the_socket_of_a_dead_daemon_is_replaced(
    start_daemon: StartDaemon, connect: Callable[[DaemonProcess], RawLocal]
) -> None:
    daemon = start_daemon()
    daemon.kill()
    assert Path(daemon.url.removeprefix("unix://")).is_socket()
    daemon.start()
    assert connect(daemon).call(Type.PING, b"on") == [b"on"]


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("unix://relative.sock", "want unix:///PATH"),
        ("ftp://127.0.0.1:1", "want unix:///PATH"),
        ("unix:///proc/no/such/daemon.sock", "/proc/no/such"),
        ("unix:///dev/shm/" + "x" * 200, "xxx"),
        ("tcp://127.0.0.1:1,tcp://0.0.0.0:1", "tcp://"),
        ("tcp://192.0.2.1:80", "loopback"),
    ],
)
def test_an_address_that_cannot_be_bound_is_wrong_usage_in_one_line(
    daemon_folder: Path, listen: str, words: str
) -> None:
    done = run_serve(f"--segment-dir={daemon_folder}/s", f"--listen={listen}")
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr
    assert not (daemon_folder / "s").exists()


def test_a_taken_port_is_wrong_usage_in_one_line(daemon_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = run_serve(f"--segment-dir={daemon_folder}/s", f"--listen={url}")
    assert done.returncode == 2
    assert url in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_frozen_daemon_is_unhealthy_and_a_thawed_one_healthy(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(http="127.0.0.1:0")
    client = RawLocal(daemon.url.removeprefix("unix://"))
    client.hello()
    address = client.stats()["http"]
    client.close()
    assert health(address) == 200
    daemon.freeze()
    with pytest.raises(TimeoutError):
        health(address, timeout_s=0.5)
    daemon.thaw()
    assert health(address) == 200


def health(address: str, *, timeout_s: float = 30.0) -> int:
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    finally:
        connection.close()


def run_serve(*flags: str) -> subprocess.CompletedProcess[str]:
    """A daemon that must not come up."""
    command = [sys.executable, "-m", "nexuskv.tools", "serve", "--host-memory=64MiB"]
    return subprocess.run(
        [*command, "--chunk-bytes=16MiB", *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_TIMEOUT_S,
    )
