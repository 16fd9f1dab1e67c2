"""The remote carrier: a zmq ROUTER on tcp, one frame a part, loopback only for now.

Owns the socket and its peers, one a routing identity. zmq signals readiness once (edge-triggered),
so the loop drains the socket every turn.
"""

import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

import zmq

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.counters import Counters
from nexuskv.control.events import endpoint_of
from nexuskv.control.loop import READ, Loop
from nexuskv.control.peer import Credentials, Peer
from nexuskv.control.sessions import Session
from nexuskv.errors import ConfigError, translating

_MESSAGES_A_TURN = 64  # then local peers have their turn

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
        check_loopback(url)
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
        self.socket.setsockopt(zmq.IPV6, int("[" in url))
        try:
            with translating({zmq.ZMQError: ConfigError}):
                self.socket.bind(url)
        except ConfigError:
            self._context.destroy()
            raise
        self.url = endpoint_of(self.socket)
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
        """When the longest silent session is to be dropped."""
        if not self._peers:
            return None
        return min(p.last_seen_s for p in self._peers.values()) + self._config.session_idle_s

    def tick(self, now_s: float) -> None:
        """Drop sessions that have been silent for session_idle_s."""
        for peer in list(self._peers.values()):
            if peer.last_seen_s + self._config.session_idle_s <= now_s:
                peer.close()

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
        self.socket.close()
        self._context.destroy()

    def _peer(self, identity: bytes) -> "RemotePeer | None":
        peer = self._peers.get(identity)
        if peer is None:
            if len(self._peers) >= self._config.sessions_max:
                self._counters.add("sessions_refused")
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
        try:
            self._carrier.socket.send_multipart([self._identity, payload], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.close()

    def close(self) -> None:
        """End the session; zmq keeps the connection, a later hello starts anew. Idempotent."""
        self._carrier.forget(self._identity)
        session, self.session = self.session, None
        if session is not None:
            session.end()


def check_loopback(url: str) -> None:
    """Refuse to listen where other machines could connect.

    Raises:
        ConfigError: not tcp://HOST:PORT with a loopback host.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise ConfigError(f"cannot listen on {url!r}: {exc}") from exc
    if parts.scheme != "tcp" or not host or port is None:
        raise ConfigError(f"cannot listen on {url!r}: want tcp://127.0.0.1:PORT")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(f"cannot listen on {url!r}: only loopback addresses, as nothing encrypts")
