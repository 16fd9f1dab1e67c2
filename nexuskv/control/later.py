"""A request that is answered when the data plane has done its part."""

from nexuskv.control.counters import Counters
from nexuskv.control.peer import Peer
from nexuskv.errors import NexusError, OutOfSpace, ProtocolError
from nexuskv.protocol import REPLY, encode, encode_error


class Later:
    """The right to answer one request, once. The session may be gone by then: that is no error."""

    __slots__ = ("_counters", "_frame_id", "_is_open", "_kind", "_peer")

    def __init__(self, peer: Peer, *, kind: int, frame_id: int, counters: Counters) -> None:
        self._peer = peer
        self._kind = kind
        self._frame_id = frame_id
        self._counters = counters
        self._is_open = True

    def reply(self, *body: object) -> None:
        """Answer it."""
        assert self._is_open, "answered twice"
        self._is_open = False
        if self._frame_id:
            self._peer.send(encode(self._kind + REPLY, self._frame_id, body))

    def refuse(self, error: NexusError) -> None:
        """Answer it with an error."""
        assert self._is_open, "answered twice"
        self._is_open = False
        self._counters.add("errors")
        if self._frame_id:
            self._peer.send(encode_error(self._frame_id, error))
        if isinstance(error, ProtocolError):
            self._peer.close()


class Under:
    """Counts requests that are to be answered later; bounded."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self.count = 0

    def enter(self) -> None:
        """One more.

        Raises:
            OutOfSpace: as many as there may be are under way.
        """
        if self.count >= self._limit:
            raise OutOfSpace(f"{self._limit} requests of this kind are under way ({self._name})")
        self.count += 1

    def leave(self) -> None:
        """One less."""
        self.count -= 1
