"""Bare exchanges with a daemon or an echo: one frame out, one frame in, nothing of the client.

Two carriers with one small interface, so that a round trip and the bare echo it is measured against
are taken by the same code.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, Self

import zmq

from nexuskv.config import Config
from nexuskv.dataplane import native
from nexuskv.errors import DaemonUnreachable, TransferTimeout
from nexuskv.namespace import NamespaceRecord
from nexuskv.protocol import ERROR, LENGTH, Frame, Type, decode_error, decode_reply, encode

TIMEOUT_S: Final = 10.0
MESSAGE_BYTES_MAX: Final = 64 * 1024**2
SPIN_S: Final = Config().exchange_spin_s  # as clients do


class Wire(Protocol):
    """One connection."""

    def exchange(self, payload: bytes) -> bytes:
        """Send one frame and receive one."""
        ...

    def close(self) -> None:
        """Close the connection. Idempotent."""
        ...


class UnixWire:
    """A unix socket and the native exchange, as the client uses it."""

    def __init__(self, url: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(url.removeprefix("unix://"))
        except OSError as exc:
            self._socket.close()
            raise DaemonUnreachable(f"nothing answers at {url}: {exc}") from exc

    def exchange(self, payload: bytes) -> bytes:
        """One GIL-free call."""
        return native.exchange(
            self._socket.fileno(),
            LENGTH.pack(len(payload)) + payload,
            message_bytes_max=MESSAGE_BYTES_MAX,
            timeout_s=TIMEOUT_S,
            spin_s=SPIN_S,
        )

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class ZmqWire:
    """A DEALER socket: send, blocking receive."""

    def __init__(self, url: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
        self._socket.connect(url)

    def exchange(self, payload: bytes) -> bytes:
        """Two calls that give up the GIL."""
        self._socket.send(payload)
        try:
            return self._socket.recv()
        except zmq.Again as exc:
            raise TransferTimeout(f"no answer within {TIMEOUT_S} s") from exc

    def close(self) -> None:
        """Close the socket and its context."""
        self._context.destroy(linger=0)


def open_wire(url: str) -> Wire:
    """A connection to `unix:///path` or `tcp://host:port`."""
    return UnixWire(url) if url.startswith("unix://") else ZmqWire(url)


class Session:
    """A session with a daemon on a wire: hello is said, one namespace is open."""

    def __init__(self, url: str, record: NamespaceRecord) -> None:
        self.wire = open_wire(url)
        self.ask(Type.HELLO, ("bench", os.getpid(), record.tenant, b"", ["shm"]))
        self.namespace = self.ask(Type.OPEN_NAMESPACE, (record.encode(),)).body[0]

    def ask(self, kind: Type, body: tuple[object, ...]) -> Frame:
        """One request and its reply.

        Raises:
            NexusError: the error that the daemon answered.
        """
        reply = decode_reply(self.wire.exchange(encode(kind, 1, body)))
        if reply.type == ERROR:
            raise decode_error(reply.body)
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()


@contextmanager
def echo(scheme: str, folder: Path) -> Generator[Wire, None, None]:
    """A connection to an echo process on the same carrier; send it `echo_request`."""
    url = f"unix://{folder}/echo.sock" if scheme == "unix" else "tcp://127.0.0.1:0"
    command = (sys.executable, "-m", "nexuskv.tools.bench.echo", url)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            wire = open_wire(process.stdout.readline().strip())
            try:
                yield wire
            finally:
                wire.close()
        finally:
            process.kill()


def echo_request(request_bytes: int, reply_bytes: int) -> bytes:
    """A request of so many bytes that an echo answers with so many."""
    return LENGTH.pack(reply_bytes) + bytes(request_bytes - LENGTH.size)
