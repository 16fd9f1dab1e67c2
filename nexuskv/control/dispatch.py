"""The one dispatcher: a frame of any carrier → a handler → a reply or the one error reply.

One of the four outer edges: an unexpected fault here is logged, counted, answered as unavailable
and ends that session, never the daemon.
"""

import logging
from collections.abc import Callable

from nexuskv.control.admin import Admin
from nexuskv.control.counters import Counters
from nexuskv.control.durable import Durable
from nexuskv.control.greeting import Greeting
from nexuskv.control.later import Later
from nexuskv.control.peer import Peer
from nexuskv.control.reading import Reading
from nexuskv.control.sessions import Session
from nexuskv.control.verify import Verify
from nexuskv.control.writing import Writing
from nexuskv.errors import NexusError, ProtocolError, Unavailable
from nexuskv.protocol import (
    REPLY,
    Frame,
    Type,
    decode_request,
    encode,
    encode_error,
    request_id_of,
)

_LOG = logging.getLogger("nexuskv.control")

Body = list[object]
Reply = tuple[object, ...]


class Dispatcher:
    """Routes requests to handlers."""

    def __init__(
        self,
        *,
        greeting: Greeting,
        reading: Reading,
        writing: Writing,
        admin: Admin,
        durable: Durable,
        verify: Verify,
        counters: Counters,
    ) -> None:
        self._greeting = greeting
        self._reading = reading
        self._counters = counters
        self._handlers: dict[int, Callable[[Session, Body], Reply]] = {
            Type.OPEN_NAMESPACE: greeting.open_namespace,
            Type.MATCH: reading.match,
            Type.PING: admin.ping,
            Type.RENEW: reading.renew,
            Type.RELEASE: reading.release,
            Type.RESERVE: writing.reserve,
            Type.COMMIT: writing.commit,
            Type.ABORT: writing.abort,
            Type.PIN: admin.pin,
            Type.UNPIN: admin.unpin,
            Type.STATS: admin.stats,
            Type.INSPECT: admin.inspect,
            Type.SUBSCRIBE: admin.subscribe,
        }
        # These answer by themselves, now or when the data plane has done its part.
        self._later: dict[int, Callable[[Session, Body, Later], None]] = {
            Type.REMOVE: durable.remove,
            Type.CLEAR: durable.clear,
            Type.VERIFY: verify.verify,
        }

    def handle(self, peer: Peer, payload: memoryview) -> None:
        """Answer one frame. Never raises."""
        try:
            frame = decode_request(payload)
        except ProtocolError as exc:
            self._counters.add("protocol_errors")
            peer.send(encode_error(request_id_of(payload), exc))
            peer.close()
            return
        self._counters.add("requests")
        try:
            reply = self._answer(peer, frame)
            if reply is not None and frame.request_id:
                peer.send(encode(frame.type + REPLY, frame.request_id, reply))
        except NexusError as exc:
            self._refuse(peer, frame, exc)
        except Exception:  # noqa: BLE001  # the edge of a request
            _LOG.exception("request of type %d failed", frame.type)
            self._counters.add("internal_errors")
            self._refuse(peer, frame, Unavailable("the daemon failed to handle this request"))
            peer.close()

    def _answer(self, peer: Peer, frame: Frame) -> Reply | None:
        """The reply's fields; None when the handler answers by itself."""
        session = peer.session
        if session is None:
            if frame.type != Type.HELLO:
                raise ProtocolError("a session starts with hello")
            return self._greeting.hello(peer, frame.body)
        handler = self._handlers.get(frame.type)
        if handler is not None:
            return handler(session, frame.body)
        if frame.type == Type.ACQUIRE:
            return self._reading.acquire(session, frame.body, peer, frame.request_id)
        later = self._later.get(frame.type)
        if later is not None:
            right = Later(peer, kind=frame.type, frame_id=frame.request_id, counters=self._counters)
            later(session, frame.body, right)
            return None
        raise ProtocolError("this session has said hello already")

    def _refuse(self, peer: Peer, frame: Frame, error: NexusError) -> None:
        self._counters.add("errors")
        if frame.request_id:
            peer.send(encode_error(frame.request_id, error))
        if isinstance(error, ProtocolError):
            self._counters.add("protocol_errors")
            peer.close()
