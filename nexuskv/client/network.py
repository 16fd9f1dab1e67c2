"""The zmq context of one process: made at the first `tcp://` use, ended with the last socket.

Ending a context waits for its sockets, so `close` ends it only when none is open, and else leaves
that to the last `give_back`. zmq is imported on first use. Thread-safe.
"""

import threading
from typing import TYPE_CHECKING

from nexuskv.errors import OutOfSpace, translating

if TYPE_CHECKING:
    import zmq


class Network:
    """Lends zmq sockets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._lent_count = 0
        self._closed = False

    def lend(self, kind: int) -> "zmq.Socket[bytes]":
        """A new socket of a zmq type, without linger. `give_back` must follow.

        Raises:
            OutOfSpace: this process can open no more sockets.
        """
        import zmq

        with self._lock, translating({zmq.ZMQError: OutOfSpace}):
            if self._context is None:
                self._context = zmq.Context()
            socket = self._context.socket(kind)
            self._lent_count += 1
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def give_back(self, socket: "zmq.Socket[bytes]") -> None:
        """Close a lent socket. Idempotent."""
        with self._lock:
            if socket.closed:
                return
            socket.close()
            self._lent_count -= 1
        self._end_if_unused()

    def close(self) -> None:
        """End the context as soon as no socket is lent. Idempotent."""
        with self._lock:
            self._closed = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        with self._lock:
            if not self._closed or self._lent_count:
                return
            context, self._context = self._context, None
        if context is not None:
            context.term()
