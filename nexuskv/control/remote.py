"""The remote carrier: a zmq ROUTER on tcp, one frame a part, loopback only for now.

Owns the socket and its peers, one a routing identity. zmq signals readiness once (edge-triggered),
so the loop drains the socket every turn.
"""

from collections.abc import Callable
from typing import Final

import zmq

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.counters import Counters
from nexuskv.control.endpoint import bind
from nexuskv.control.loop import READ, Loop
from nexuskv.control.peer import Credentials, Peer
from nexuskv.control.sessions import Session
from nexuskv.errors import ConfigError, OutOfSpace
from nexuskv.protocol import encode_error

_MESSAGES_A_TURN: Final = 64  # then local peers have their turn
_RECEIVED_MAX: Final = 64  # messages of one peer that zmq keeps for us, each message_bytes_max
_LINGER_MS_MAX: Final = 1000  # for last replies: that waiting acquires are aborted

Handler = Callable[[Peer, memoryview], None]


class RemoteCarrier:
    """Listens on one tcp address."""

    def __init__(
        self,
        *,
        url: str,
        loop: Loop,
        clock: Clock,
        config: Config,
        counters: Counters,
        handle: Handler,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._config = config
        self._counters = counters
        self._handle = handle
        self._peers: dict[bytes, RemotePeer] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, config.message_bytes_max)
        self.socket.setsockopt(zmq.RCVHWM, _RECEIVED_MAX)
        try:
            self.url = bind(self.socket, url)
        except ConfigError:
            self._context.destroy()
            raise
        self._sweep_s = clock.now()
        self._fd = int(self.socket.getsockopt(zmq.FD))
        loop.watch(self._fd, READ, lambda _events: None)
        loop.add_drain(self.drain)
        loop.add_ticker(self)

    def drain(self) -> None:
        """Handle what has arrived, some messages a turn."""
        if self.socket.closed or not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        for _ in range(_MESSAGES_A_TURN):
            try:
                identity, *parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for part in parts:
                peer = self._peer(identity)
                if peer is None:
                    break
                self._handle(peer, memoryview(part))
        self._loop.wake()

    def next_due(self) -> float | None:
        """When to look for silent sessions again: looking at all of them each turn costs much."""
        return self._sweep_s if self._peers else None

    def tick(self, now_s: float) -> None:
        """Drop sessions that have been silent for session_idle_s."""
        idle_s = self._config.session_idle_s
        for peer in list(self._peers.values()):
            if peer.last_seen_s + idle_s <= now_s:
                peer.close()
        self._sweep_s = now_s + idle_s / 8

    def send(self, identity: bytes, payload: bytes) -> bool:
        """Send one frame; False when the peer is gone or does not take its replies."""
        try:
            self.socket.send_multipart([identity, payload], zmq.NOBLOCK)
        except zmq.Again:
            self._counters.add("sessions_overflowed")
            return False
        except zmq.ZMQError:
            return False
        return True

    def forget(self, identity: bytes) -> None:
        """A peer has closed."""
        self._peers.pop(identity, None)

    def close(self) -> None:
        """Close the socket and all sessions. Idempotent."""
        if self.socket.closed:
            return
        self._loop.forget(self._fd)
        for peer in list(self._peers.values()):
            peer.close()
        linger_s = min(_LINGER_MS_MAX / 1000, self._config.stop_timeout_s / 2)
        self._context.destroy(linger=int(linger_s * 1000))

    def _peer(self, identity: bytes) -> "RemotePeer | None":
        peer = self._peers.get(identity)
        if peer is None:
            if len(self._peers) >= self._config.sessions_max:
                self._counters.add("sessions_refused")
                most = self._config.sessions_max
                error = OutOfSpace(f"{most} sessions are open (sessions_max)")
                self.send(identity, encode_error(0, error))
                return None
            peer = self._peers[identity] = RemotePeer(identity, self)
        peer.last_seen_s = self._clock.now()
        return peer


class RemotePeer:
    """One remote client."""

    def __init__(self, identity: bytes, carrier: RemoteCarrier) -> None:
        self.session: Session | None = None
        self.last_seen_s = 0.0
        self._identity = identity
        self._carrier = carrier

    @property
    def credentials(self) -> Credentials | None:
        """A remote peer proves nothing."""
        return None

    def send(self, payload: bytes) -> None:
        """Send one frame, or close a peer that is gone or does not take its replies."""
        if not self._carrier.send(self._identity, payload):
            self.close()

    def close(self) -> None:
        """End the session; zmq keeps the connection, a later hello starts anew. Idempotent."""
        self._carrier.forget(self._identity)
        session, self.session = self.session, None
        if session is not None:
            session.end()
