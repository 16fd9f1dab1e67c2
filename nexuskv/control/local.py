"""The local carrier: unix stream sockets, length-prefixed frames, peers proved by the kernel.

Owns the listener and its connections. A reply that does not fit the socket waits in a bounded
backlog; a peer that lets it overflow is closed. A peer that hangs up is read to its end first: its
last words may give slots back that nobody could free otherwise.
"""

import errno
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from nexuskv.config import Config
from nexuskv.control.counters import Counters
from nexuskv.control.loop import READ, WRITE, Loop
from nexuskv.control.peer import Credentials, Peer
from nexuskv.control.sessions import Session
from nexuskv.errors import ConfigError, OutOfSpace, ProtocolError
from nexuskv.protocol import LENGTH, encode_error, prefixed

_SO_PEERPIDFD: Final = 77  # Linux 6.5; not named by Python 3.11's socket module
_RECEIVE_BYTES: Final = 256 * 1024
_ACCEPT_BACKLOG: Final = 128
_FRAMES_A_TURN: Final = 8  # of one connection; then the others have their turn
_CREDENTIALS: Final = struct.Struct("3i")
_INT: Final = struct.Struct("i")

Handler = Callable[[Peer, memoryview], None]


class LocalCarrier:
    """Listens on one unix socket path and reads frames from its connections."""

    def __init__(
        self, *, path: Path, loop: Loop, config: Config, counters: Counters, handle: Handler
    ) -> None:
        self._path = path
        self._loop = loop
        self.config = config
        self.counters = counters
        self.handle = handle
        self.buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self.connections: set[LocalConnection] = set()
        try:
            self._listener = _listen(path)
        except OSError as exc:
            raise ConfigError(f"cannot listen on {path}: {exc}") from exc
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        loop.watch(self._listener.fileno(), READ, self._on_connect)

    @property
    def url(self) -> str:
        """The address clients use."""
        return f"unix://{self._path}"

    def close(self) -> None:
        """Close the listener, every connection and the socket's file. Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        os.close(self._spare_fd)
        for connection in list(self.connections):
            connection.close()
        with suppress(FileNotFoundError):
            self._path.unlink()

    def _on_connect(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as exc:
            self.counters.add("accept_failures")
            if exc.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        if len(self.connections) >= self.config.sessions_max:
            self.counters.add("sessions_refused")
            most = self.config.sessions_max
            error = OutOfSpace(f"{most} connections are open (sessions_max)")
            with suppress(OSError):
                sock.send(prefixed(encode_error(0, error)), socket.MSG_DONTWAIT)
            sock.close()
            return
        self.connections.add(LocalConnection(sock, self, self._loop))

    def _turn_away(self) -> None:
        """Out of descriptors: close one connection instead of being woken for it for ever."""
        os.close(self._spare_fd)
        with suppress(OSError):
            self._listener.accept()[0].close()
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class LocalConnection:
    """One local client."""

    def __init__(self, sock: socket.socket, carrier: LocalCarrier, loop: Loop) -> None:
        self.session: Session | None = None
        self._sock = sock
        self._fd = sock.fileno()
        self._carrier = carrier
        self._loop = loop
        self._received = bytearray()
        self._unsent = bytearray()
        self._put_off = False  # whole frames wait in `_received` for the next turn
        self._deaf = False  # it takes no more replies; what it said before is still to be read
        sock.setblocking(False)
        self._credentials = _credentials_of(sock)
        loop.watch(self._fd, READ, self._on_ready)

    @property
    def credentials(self) -> Credentials | None:
        """The kernel's word on the process at the other end."""
        return self._credentials

    def send(self, payload: bytes) -> None:
        """Send one frame now, or queue what the socket does not take."""
        if self._fd < 0 or self._deaf:
            return
        frame = prefixed(payload)
        sent = 0
        if not self._unsent:
            try:
                sent = self._sock.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._deaf = True
                return
            if sent == len(frame):
                return
        self._unsent += frame[sent:]
        if len(self._unsent) > self._carrier.config.send_backlog_bytes:
            self._carrier.counters.add("sessions_overflowed")
            self.close()
            return
        self._loop.change(self._fd, READ | WRITE)

    def close(self) -> None:
        """Close the socket and end the session. Idempotent."""
        if self._fd < 0:
            return
        self._loop.forget(self._fd)
        self._fd = -1
        self._sock.close()
        self._carrier.connections.discard(self)
        session, self.session = self.session, None
        if session is not None:
            session.end()
        elif self._credentials is not None:
            os.close(self._credentials.pidfd)

    def _on_ready(self, events: int) -> None:
        if events & WRITE and self._unsent:
            self._flush()
        if events & ~WRITE and self._fd >= 0:
            self._receive()

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self._deaf = True
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.change(self._fd, READ)

    def _receive(self) -> None:
        if self._put_off:
            return  # What is here comes first; meanwhile the socket fills, and the peer waits.
        buffer = self._carrier.buffer
        try:
            count = self._sock.recv_into(buffer)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.close()
            return
        if self._received:
            self._received += buffer[:count]
            self._go_on()
            return
        used = self._handle_frames(buffer[:count].toreadonly())
        if used < count and self._fd >= 0:
            self._received += buffer[used:count]
            self._put_off_rest()

    def _go_on(self) -> None:
        """Handle some of the frames that were received before."""
        self._put_off = False
        if self._fd < 0 or self._is_short():
            return
        with memoryview(bytes(self._received)) as data:
            used = self._handle_frames(data)
        del self._received[:used]
        if self._fd >= 0:
            self._put_off_rest()

    def _put_off_rest(self) -> None:
        """Let the others have their turn before the frames that are here already."""
        if not self._is_short():
            self._put_off = True
            self._loop.soon(self._go_on)

    def _is_short(self) -> bool:
        """Whether a frame of an acceptable length is still on its way."""
        if len(self._received) < LENGTH.size:
            return True
        size: int = LENGTH.unpack_from(self._received)[0]
        limit = self._carrier.config.message_bytes_max
        return len(self._received) < LENGTH.size + size <= LENGTH.size + limit

    def _handle_frames(self, data: memoryview) -> int:
        """Handle whole frames in `data`, a turn's worth; returns how many bytes they took."""
        used, limit = 0, self._carrier.config.message_bytes_max
        for _ in range(_FRAMES_A_TURN):
            if len(data) - used < LENGTH.size or self._fd < 0:
                break
            (size,) = LENGTH.unpack_from(data, used)
            if size > limit:
                error = ProtocolError(f"a message of {size} bytes, at most {limit} are taken")
                self.send(encode_error(0, error))
                self.close()
                break
            end = used + LENGTH.size + size
            if end > len(data):
                break
            self._carrier.handle(self, data[used + LENGTH.size : end])
            used = end
        return used


def _listen(path: Path) -> socket.socket:
    """A listening socket at `path`; a dead daemon's leftover file is replaced."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if path.is_socket():
            _refuse_if_alive(path)
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_ACCEPT_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _refuse_if_alive(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            pass
    raise ConfigError(f"another process listens on {path}")


def _credentials_of(sock: socket.socket) -> Credentials | None:
    """The peer's process, or None when this daemon cannot see it (another pid namespace)."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    if pid <= 0:
        return None
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _INT.size)
        return Credentials(pid, uid, _INT.unpack(raw)[0])
    except OSError:
        pass
    try:
        # An older kernel: the process may have been replaced since it connected; hello compares.
        return Credentials(pid, uid, os.pidfd_open(pid))
    except OSError:
        return None
