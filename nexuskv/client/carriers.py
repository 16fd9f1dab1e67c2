"""How control messages travel: frames out, one frame back, over a unix socket or zmq.

A carrier owns one connection and is used by one thread at a time; handing it on needs a lock in
between, which the pool's is. Bounds: every call ends within `timeout_s`. zmq is imported only when
a `tcp://` address is opened.
"""

import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from nexuskv.client.network import Network
from nexuskv.dataplane import native
from nexuskv.errors import (
    ConfigError,
    DaemonUnreachable,
    OutOfSpace,
    ProtocolError,
    TransferFailed,
    TransferTimeout,
)
from nexuskv.protocol import LENGTH, prefixed

LOCAL: Final = "unix://"
REMOTE: Final = "tcp://"

ARRIVED_BYTES_MAX: Final = 256 * 1024
"""What is looked at for frames that have come already: descriptors of thousands of pages."""


class Carrier(Protocol):
    """One connection to a daemon."""

    remote: bool  # whether the daemon drops the session when it hears nothing for long

    def exchange(self, frames: Sequence[bytes], *, timeout_s: float) -> bytes:
        """Send `frames` (none: send nothing) and receive one frame.

        Raises:
            TransferTimeout: no whole reply within `timeout_s`; the connection is of no more use.
            TransferFailed: the connection broke.
            ProtocolError: the reply is longer than a message may be.
        """
        ...

    def arrived(self) -> list[bytes]:
        """Frames that have come already, whole ones alone. Waits for nothing, never raises."""
        ...

    def tell(self, frame: bytes) -> None:
        """Send one frame that wants no reply if that can be done at once. Never raises."""
        ...

    def close(self) -> None:
        """Close the connection. Idempotent; sends nothing."""
        ...


def check_url(url: str) -> str:
    """Return `url` unchanged when it is an address a client can reach.

    Raises:
        ConfigError: neither `unix:///path` nor `tcp://host:port`.
    """
    if url.startswith(LOCAL + "/") or (
        url.startswith(REMOTE) and url.removeprefix(REMOTE).rpartition(":")[2].isdigit()
    ):
        return url
    raise ConfigError(f"daemon address {url!r} is neither unix:///path nor tcp://host:port")


def open_carrier(
    url: str, *, message_bytes_max: int, timeout_s: float, spin_s: float, network: Network
) -> Carrier:
    """Open a connection; on `tcp://` nothing is sent until the first exchange.

    Raises:
        DaemonUnreachable: nothing listens there, or it did not accept within `timeout_s`.
        OutOfSpace: this process can open no more sockets.
    """
    if url.startswith(LOCAL):
        return LocalCarrier(
            url.removeprefix(LOCAL),
            message_bytes_max=message_bytes_max,
            timeout_s=timeout_s,
            spin_s=spin_s,
        )
    return RemoteCarrier(url, message_bytes_max=message_bytes_max, network=network)


class LocalCarrier:
    """A unix stream socket; an exchange is one native call that gives the GIL up once."""

    remote = False

    def __init__(
        self, path: str, *, message_bytes_max: int, timeout_s: float, spin_s: float
    ) -> None:
        self._message_bytes_max = message_bytes_max
        self._spin_s = spin_s
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError as exc:
            raise OutOfSpace(f"this process can open no socket: {exc}") from exc
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
            self._socket.setblocking(False)
        except OSError as exc:
            self._socket.close()
            raise DaemonUnreachable(f"no daemon answers at {path}: {exc}") from exc

    def exchange(self, frames: Sequence[bytes], *, timeout_s: float) -> bytes:
        """See `Carrier.exchange`."""
        request = b"".join([part for frame in frames for part in (LENGTH.pack(len(frame)), frame)])
        try:
            return native.exchange(
                self._socket.fileno(),
                request,
                message_bytes_max=self._message_bytes_max,
                timeout_s=timeout_s,
                spin_s=self._spin_s,
            )
        except TimeoutError as exc:
            raise TransferTimeout(f"the daemon did not answer within {timeout_s:.3g} s") from exc
        except OSError as exc:
            raise TransferFailed(f"the connection to the daemon broke: {exc}") from exc
        except ValueError as exc:
            raise ProtocolError(str(exc)) from exc

    def arrived(self) -> list[bytes]:
        """See `Carrier.arrived`."""
        try:
            seen = self._socket.recv(ARRIVED_BYTES_MAX, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            frames, size_bytes = _whole_frames(seen)
            if size_bytes:
                self._socket.recv(size_bytes, socket.MSG_DONTWAIT)  # as many as were just seen
        except OSError:
            return []  # nothing has come, or the next exchange says what is wrong
        return frames

    def tell(self, frame: bytes) -> None:
        """See `Carrier.tell`."""
        with suppress(OSError):
            self._socket.send(prefixed(frame), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """See `Carrier.close`."""
        self._socket.close()


class RemoteCarrier:
    """A zmq DEALER; frames of one exchange leave as the parts of one message."""

    remote = True

    def __init__(self, url: str, *, message_bytes_max: int, network: Network) -> None:
        import zmq

        self._network = network
        self._received: deque[bytes] = deque()
        self._socket = network.lend(zmq.DEALER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)
        try:
            self._socket.connect(url)
        except zmq.ZMQError as exc:
            self.close()
            raise DaemonUnreachable(f"cannot connect to {url}: {exc}") from exc

    def exchange(self, frames: Sequence[bytes], *, timeout_s: float) -> bytes:
        """See `Carrier.exchange`."""
        import zmq

        try:
            if frames:
                self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
            if not self._received:
                self._socket.setsockopt(zmq.RCVTIMEO, max(1, int(timeout_s * 1000)))
                self._received.extend(self._socket.recv_multipart())
        except zmq.Again as exc:
            raise TransferTimeout(f"the daemon did not answer within {timeout_s:.3g} s") from exc
        except zmq.ZMQError as exc:
            raise TransferFailed(f"the connection to the daemon broke: {exc}") from exc
        return self._received.popleft()

    def arrived(self) -> list[bytes]:
        """See `Carrier.arrived`."""
        import zmq

        with suppress(zmq.ZMQError):
            while True:
                self._received.extend(self._socket.recv_multipart(flags=zmq.NOBLOCK))
        frames = list(self._received)
        self._received.clear()
        return frames

    def tell(self, frame: bytes) -> None:
        """See `Carrier.tell`."""
        import zmq

        with suppress(zmq.ZMQError):
            self._socket.send(frame, flags=zmq.NOBLOCK)

    def close(self) -> None:
        """See `Carrier.close`."""
        self._network.give_back(self._socket)


def _whole_frames(data: bytes) -> tuple[list[bytes], int]:
    """The frames that are whole in `data`, and the bytes they take with their lengths."""
    frames: list[bytes] = []
    end = 0
    while len(data) - end >= LENGTH.size:
        start = end + LENGTH.size
        (size_bytes,) = LENGTH.unpack_from(data, end)
        if start + size_bytes > len(data):
            break
        frames.append(data[start : start + size_bytes])
        end = start + size_bytes
    return frames, end
