"""The stream of events: what was stored, removed and cleared, in order.

Every event takes the next number whether anybody listens or not, so that a follower sees a gap.
The zmq socket is opened only when an address is configured.
"""

from typing import TYPE_CHECKING

import msgpack

from nexuskv.control.counters import Counters
from nexuskv.control.endpoint import bind
from nexuskv.errors import ConfigError
from nexuskv.protocol import EVENT_TOPIC, VERSION, Event, ParentState

if TYPE_CHECKING:
    import zmq


class EventStream:
    """Numbers events and publishes them on a zmq PUB socket."""

    def __init__(self, *, incarnation: bytes, counters: Counters) -> None:
        self.sequence = 0
        self.address = ""
        self._incarnation = incarnation
        self._counters = counters
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    def open(self, url: str, *, backlog_max: int) -> None:
        """Publish on `url` (a port of 0 picks one; `address` tells which).

        Raises:
            ConfigError: no loopback address, or one that cannot be bound.
        """
        import zmq

        # A context of its own ends with it: the shared one would outlive the daemon's run.
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, backlog_max)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self.address = bind(self._socket, url)
        except ConfigError:
            self.close()
            raise

    def stored(
        self, namespace_id: bytes, *, parent_state: ParentState, parent: bytes, keys: bytes
    ) -> None:
        """Pages became readable, in chain order under `parent`."""
        self._publish(Event.STORED, namespace_id, (int(parent_state), parent, keys))

    def removed(self, namespace_id: bytes, keys: bytes) -> None:
        """Pages are readable no more."""
        self._publish(Event.REMOVED, namespace_id, (keys,))

    def cleared(self, namespace_id: bytes, epoch: int) -> None:
        """All pages of a namespace are gone."""
        self._publish(Event.CLEARED, namespace_id, (epoch,))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._context is not None and self._socket is not None:
            self._socket.close()
            self._context.term()
            self._context = self._socket = None

    def _publish(self, event: Event, namespace_id: bytes, body: tuple[object, ...]) -> None:
        self.sequence += 1
        if self._socket is None:
            return
        message = (VERSION, self._incarnation, self.sequence, int(event), namespace_id, body)
        self._socket.send_multipart([EVENT_TOPIC, msgpack.packb(message)])
        self._counters.add("events_sent")
