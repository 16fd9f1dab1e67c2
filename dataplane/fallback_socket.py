"""`exchange` of the pure-Python twin: socket calls that never block, and poll for the rest.

The socket's own blocking mode is neither used nor changed: other threads may share the socket.
"""

import math
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from nexuskv.dataplane.batch import Buffer

_PREFIX: Final = struct.Struct("<I")
_SEND_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_VECTORS_A_CALL: Final = 1024
_WAIT_MAX_S: Final = 3600.0


def exchange(
    fd: int,
    request: Buffer | Sequence[Buffer],
    *,
    message_bytes_max: int,
    timeout_s: float,
    spin_s: float = 0.0,
) -> bytes:
    """See `nexuskv.dataplane.native`. Never spins: that would hold the GIL."""
    if message_bytes_max < 0 or math.isnan(timeout_s) or math.isnan(spin_s):
        raise ValueError("message_bytes_max is negative or a time no number")
    deadline_s = time.monotonic() + timeout_s
    parts = _as_views(request)
    stream = socket.socket(fileno=fd)
    try:
        hung_up = _send_all(stream, parts, deadline_s)
        return _receive_frame(stream, message_bytes_max, deadline_s, hung_up)
    finally:
        stream.detach()  # the descriptor is the caller's


def _as_views(request: Buffer | Sequence[Buffer]) -> list[memoryview]:
    if isinstance(request, list | tuple):
        views = [memoryview(part).cast("B") for part in request]
    else:
        views = [memoryview(request).cast("B")]  # type: ignore[arg-type,unused-ignore]  # what is no list or tuple is a buffer
    return [view for view in views if len(view)]


def _send_all(
    stream: socket.socket, parts: list[memoryview], deadline_s: float
) -> ConnectionError | None:
    """Send everything; a peer that hung up is returned: its last frame may still be readable."""
    while parts:
        try:
            sent = stream.sendmsg(parts[:_VECTORS_A_CALL], (), _SEND_FLAGS)
        except BlockingIOError:
            _wait(stream, select.POLLOUT, deadline_s)
            continue
        except (BrokenPipeError, ConnectionResetError) as exc:
            return exc
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][sent:]
    return None


def _receive_frame(
    stream: socket.socket, bytes_max: int, deadline_s: float, hung_up: ConnectionError | None
) -> bytes:
    try:
        (length,) = _PREFIX.unpack(_receive(stream, _PREFIX.size, deadline_s))
        if length > bytes_max:
            raise ValueError(f"the peer announces a message of {length} bytes, at most {bytes_max}")
        return _receive(stream, length, deadline_s, before=_PREFIX.size)
    except ConnectionError as exc:
        raise (hung_up or exc) from exc


def _receive(stream: socket.socket, length: int, deadline_s: float, *, before: int = 0) -> bytes:
    data = bytearray(length)
    got = 0
    while got < length:
        try:
            piece = stream.recv_into(memoryview(data)[got:], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            _wait(stream, select.POLLIN, deadline_s)
            continue
        if piece == 0:
            raise ConnectionError(f"the peer closed the connection after {before + got} bytes")
        got += piece
    return bytes(data)


def _wait(stream: socket.socket, events: int, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no whole reply within the time given")
    poll = select.poll()
    poll.register(stream.fileno(), events)
    poll.poll(min(left_s, _WAIT_MAX_S) * 1000)
