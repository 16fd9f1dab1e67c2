"""Frames over a non-blocking stream socket, with bounds both ways. Control thread only."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Final

from nexuskv.errors import ProtocolError
from nexuskv.worker.codec import LENGTH

_READ_BYTES: Final = 256 * 1024


class Channel:
    """Control's end of the socket to one worker; the socket stays its owner's."""

    def __init__(self, end: socket.socket, *, bytes_max: int) -> None:
        """Take at most `bytes_max` unsent bytes, and frames of at most that many."""
        self._end = end
        self._bytes_max = bytes_max
        self._unsent = bytearray()
        self._received = bytearray()
        self.ended = False
        """Whether the other side has closed its end; nothing more comes."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait until the socket takes them."""
        return len(self._unsent)

    def send(self, frame: bytes) -> bool:
        """Send a frame, or queue what the socket does not take; False when it is too much."""
        if len(self._unsent) + len(frame) > self._bytes_max:
            return False
        self._unsent += frame
        if len(self._unsent) == len(frame):
            self.flush()
        return True

    def flush(self) -> None:
        """Send what the socket takes now. A broken one takes nothing: its process is ending."""
        with contextlib.suppress(OSError):
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent)]

    def receive(self, *, reads_max: int) -> Iterator[bytes]:
        """The payloads of the frames that have come, after at most `reads_max` reads.

        Raises:
            ProtocolError: a frame is too long.
        """
        for _ in range(reads_max):
            try:
                piece = self._end.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            if not piece:
                self.ended = True
                return
            self._received += piece
            yield from self._frames()

    def _frames(self) -> Iterator[bytes]:
        """Cut whole frames off what was received."""
        buffer, start = self._received, 0
        while len(buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, start)
            if length > self._bytes_max:
                raise ProtocolError(f"a message of {length} bytes")
            end = start + LENGTH.size + length
            if len(buffer) < end:
                break
            payload = bytes(buffer[start + LENGTH.size : end])
            start = end
            yield payload
        del buffer[:start]
