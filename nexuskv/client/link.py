"""One connection to the daemon: one session, the namespaces opened on it, one request at a time.

A link is used by one thread at a time (the pool hands it out). A request that did not get its own
reply leaves the stream out of step: the link is `broken` and is closed, never reused.
"""

from collections.abc import Sequence
from typing import Final

from nexuskv.client.carriers import Carrier, open_carrier
from nexuskv.client.hostmap import HostMap, HostMaps
from nexuskv.client.network import Network
from nexuskv.client.session import Session, hello_body, read_hello
from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.errors import (
    ConfigError,
    NexusError,
    ProtocolError,
    Refused,
    TransferFailed,
    TransferTimeout,
    Unavailable,
)
from nexuskv.protocol import ERROR, REPLY, Type, decode_error, decode_reply, encode

PATIENCE: Final = 0.5
"""Silence for this share of the shorter of both timeouts means that the daemon is away."""

_FAST: Final = frozenset({Type.MATCH, Type.ACQUIRE})


class Link:
    """An open session. `away` after a failure says that the daemon itself seems to be gone."""

    def __init__(self, carrier: Carrier, config: Config, clock: Clock) -> None:
        self._carrier = carrier
        self._config = config
        self._clock = clock
        self._patience_s = PATIENCE * min(config.request_timeout_s, config.transfer_timeout_s)
        self._message_bytes_max = config.message_bytes_max
        self._last_id = 0
        self._numbers: dict[bytes, int] = {}
        self.broken = False
        self.away = False
        self.era = 0  # of the pool that lends it
        self.used_s = clock.now()
        self.session: Session
        self.host: HostMap | None = None

    @classmethod
    def open(
        cls, url: str, config: Config, clock: Clock, *, maps: HostMaps, network: Network
    ) -> "Link":
        """Connect, say hello, map the segments.

        Raises:
            Unavailable: nobody answers within `connect_timeout_s`.
            ProtocolError: the other side speaks another version.
            Refused: the daemon takes no more sessions, or this process can open no more.
        """
        deadline_s = clock.now() + config.connect_timeout_s
        carrier = open_carrier(
            url,
            message_bytes_max=config.message_bytes_max,
            timeout_s=config.connect_timeout_s,
            spin_s=config.exchange_spin_s,
            network=network,
        )
        link = cls(carrier, config, clock)
        opened = False
        try:
            body = link.call(Type.HELLO, hello_body(config), deadline_s=deadline_s)
            link.session = read_hello(body, config)
            link._message_bytes_max = link.session.limits.message_bytes_max
            if link.session.transport:
                link.host = _attach(maps, link.session)
            opened = True
        finally:
            if not opened:
                link.close()
        return link

    @property
    def remote(self) -> bool:
        """Whether the daemon must hear from this session now and then."""
        return self._carrier.remote

    @property
    def incarnation(self) -> bytes:
        """The daemon's run that this session belongs to."""
        return self.session.incarnation

    def call(
        self,
        kind: Type,
        body: Sequence[object],
        *,
        deadline_s: float,
        riders: Sequence[bytes] = (),
        riders_first: bool = False,
        timeout_s: float | None = None,
    ) -> list[object]:
        """One request and its reply, in one exchange.

        Args:
            kind: message type.
            body: the request's fields.
            deadline_s: on the link's clock.
            riders: frames that want no reply and ride along: behind a match or an acquire, which
                should be answered fast, else in front, where what they give back may be needed.
            riders_first: in front in any case: for an acquire under an id whose lease they may end.
            timeout_s: of the exchange; None is `request_timeout_s`.

        Returns:
            The reply's fields, their types checked.

        Raises:
            NexusError: what the daemon answered; Unavailable when it did not.
        """
        self._last_id += 1
        frame = encode(kind, self._last_id, tuple(body))
        if len(frame) > self._message_bytes_max:
            raise ConfigError(
                f"a {kind.name.lower()} of {len(frame)} bytes, a message has at most "
                f"{self._message_bytes_max} (message_bytes_max)"
            )
        frames = [frame, *riders] if kind in _FAST and not riders_first else [*riders, frame]
        timeout_s = self._config.request_timeout_s if timeout_s is None else timeout_s
        return self._talk(kind, frames, deadline_s, timeout_s)

    def more(
        self, kind: Type, *, deadline_s: float, wait_s: float, riders: Sequence[bytes] = ()
    ) -> list[object]:
        """The next reply to the last request; it may take `wait_s` longer than an exchange."""
        return self._talk(kind, riders, deadline_s, wait_s + self._config.request_timeout_s)

    def arrived(self, kind: Type) -> list[list[object]]:
        """Further replies to the last request that have come already. Waits for nothing."""
        bodies: list[list[object]] = []
        for payload in self._carrier.arrived():
            self.broken = True
            bodies.append(self._read(kind, payload))
            self.broken = False
        return bodies

    def number_of(self, namespace_id: bytes, record: bytes, *, deadline_s: float) -> int:
        """The session's number of a namespace, asked for once.

        Raises:
            ConfigError: the daemon cannot serve such a namespace; its message names the limit.
            NexusError: as `call`.
        """
        known = self._numbers.get(namespace_id)
        if known is not None:
            return known
        number, answered, _epoch = self.call(Type.OPEN_NAMESPACE, (record,), deadline_s=deadline_s)
        assert isinstance(number, int)
        if answered != namespace_id:
            raise self._out_of_step("the daemon computes another id for this namespace")
        self._numbers[namespace_id] = number
        return number

    def known_number(self, namespace_id: bytes) -> int | None:
        """The session's number of a namespace if it was opened here before."""
        return self._numbers.get(namespace_id)

    def tell(self, kind: Type, body: Sequence[object]) -> None:
        """A last word on a link that may be broken: wants no reply and may be lost. Never raises.

        A frame that was cut off before makes nonsense of it, so it must be one that may be lost.
        """
        self._carrier.tell(encode(kind, 0, tuple(body)))

    def close(self) -> None:
        """Close the connection; the daemon sees it. Idempotent."""
        self.broken = True
        self._carrier.close()
        host, self.host = self.host, None
        if host is not None:
            host.release()

    def drop(self) -> None:
        """Close only this process's copy of the socket: after a fork it is the parent's session."""
        self.broken = True
        if not self._carrier.remote:  # zmq's sockets know the process they belong to
            self._carrier.close()

    def _talk(
        self, kind: Type, frames: Sequence[bytes], deadline_s: float, timeout_s: float
    ) -> list[object]:
        now_s = self._clock.now()
        left_s = deadline_s - now_s
        if left_s <= 0:
            # Nothing was sent: after a first reply there may be more to come, so out of step.
            self.broken = self.broken or not frames
            raise TransferTimeout("the call's time was over before the daemon was asked")
        self.used_s = now_s
        self.broken = True
        try:
            payload = self._carrier.exchange(frames, timeout_s=min(left_s, timeout_s))
        except TransferTimeout:
            # A call that had little time left says nothing about the daemon.
            self.away = min(left_s, timeout_s) >= self._patience_s
            raise
        except (TransferFailed, ProtocolError):
            self.away = True
            raise
        body = self._read(kind, payload)
        self.broken = False
        return body

    def _read(self, kind: Type, payload: bytes) -> list[object]:
        """The body of a reply that must be to the last request; leaves `broken` on any doubt."""
        try:
            frame = decode_reply(payload)
        except ProtocolError:
            self.away = True
            raise
        if frame.type == ERROR:
            error = decode_error(frame.body)
            if kind is Type.HELLO and isinstance(error, Refused):
                raise error  # a daemon that takes no more sessions says so before it reads
            if isinstance(error, ProtocolError) or frame.request_id != self._last_id:
                self.away = True
                raise ProtocolError(f"the daemon closes the session: {error}")
            self.broken = False
            raise error
        if frame.type != kind + REPLY or frame.request_id != self._last_id:
            raise self._out_of_step(
                f"reply of type {frame.type} to request {frame.request_id}, expected type "
                f"{kind + REPLY} to request {self._last_id}"
            )
        return frame.body

    def _out_of_step(self, message: str) -> NexusError:
        self.broken = self.away = True
        return ProtocolError(message)


def _attach(maps: HostMaps, session: Session) -> HostMap | None:
    """The session's mapped segments; None where they are not to be had: a daemon elsewhere."""
    try:
        return maps.attach(session)
    except (Unavailable, ProtocolError):
        return None
