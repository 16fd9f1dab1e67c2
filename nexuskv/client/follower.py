"""Following a daemon's events: the exact set of held pages, kept current.

docs/protocol.md has the stream. Events are numbered without holes. A hole, another run of the
daemon, or silence while the daemon's number went on means that events were lost; then the set is
rebuilt through `inspect`, from whose first page's number on events are applied again, in order: an
event that a later page showed already changes nothing. Used by one thread. zmq is imported on
opening.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from nexuskv.errors import ProtocolError, TransferFailed, Unavailable
from nexuskv.key import PageKey, split_keys
from nexuskv.namespace import NamespaceRecord
from nexuskv.protocol import EVENT_TOPIC, Event, EventFrame, decode_event

if TYPE_CHECKING:
    import zmq

    from nexuskv.client.store import Store

SETTLE_S: Final = 0.2
"""How much longer than asked to wait for events whose numbers the daemon has given out already."""


class Change(NamedTuple):
    """What one event says. `event` is None when the set was rebuilt: look at `pages` anew."""

    event: Event | None
    namespace_id: bytes = b""
    keys: tuple[PageKey, ...] = ()


class Follower:
    """The pages a daemon holds, by namespace id. A context manager; made by `Store.follow`."""

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._socket: zmq.Socket[bytes] | None = None
        self._network = store.process.network
        self._incarnation = b""
        self._sequence = 0
        self._key_bytes: dict[bytes, int] = {}
        self.pages: dict[bytes, set[PageKey]] = {}
        self.resyncs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def changes(self, *, timeout_s: float) -> list[Change]:
        """Apply the events that have come, or the first within `timeout_s`; what they changed.

        Returns an empty list when nothing happened. Afterwards `pages` is the exact set as of the
        last event applied.

        Raises:
            Unavailable: the daemon is away, or publishes no events; call again later.
            ProtocolError: something else publishes there.
        """
        if self._socket is None:
            self._open()
            return [self._resync()]
        found = [change for frame in self._drain(timeout_s) for change in self._apply(frame)]
        if not found and self._behind():
            found = [change for frame in self._drain(SETTLE_S) for change in self._apply(frame)]
            if self._behind():
                found.append(self._resync())
        return found

    def close(self) -> None:
        """Stop following. Idempotent."""
        socket, self._socket = self._socket, None
        if socket is not None:
            self._network.give_back(socket)

    def _open(self) -> None:
        import zmq

        address, _, _ = self._store.subscribe()
        if not address:
            raise Unavailable("this daemon publishes no events (events is not configured)")
        self._network = self._store.process.network
        socket = self._network.lend(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, self._store.config.events_backlog_max)
        socket.setsockopt(zmq.SUBSCRIBE, EVENT_TOPIC)
        try:
            socket.connect(address)
        except zmq.ZMQError as exc:
            self._network.give_back(socket)
            raise TransferFailed(f"cannot follow {address}: {exc}") from exc
        self._socket = socket

    def _drain(self, timeout_s: float) -> Iterator[EventFrame]:
        """Events in order: waits for the first, then takes what is there."""
        import zmq

        wait_ms = max(0, int(timeout_s * 1000))
        while self._socket is not None:
            self._socket.setsockopt(zmq.RCVTIMEO, wait_ms)
            try:
                parts = self._socket.recv_multipart()
            except zmq.Again:
                return
            if len(parts) != 2:
                raise ProtocolError(f"an event of {len(parts)} parts, not 2")
            yield decode_event(parts[1])
            wait_ms = 0

    def _apply(self, frame: EventFrame) -> list[Change]:
        if frame.incarnation != self._incarnation or frame.sequence > self._sequence + 1:
            change = self._resync()
            # The listing is newer than this event, unless something else publishes there.
            return [change]
        if frame.sequence <= self._sequence:
            return []
        self._sequence = frame.sequence
        held = self.pages.setdefault(frame.namespace_id, set())
        if frame.event is Event.CLEARED:
            keys = tuple(held)
            held.clear()
        else:
            blob = frame.body[-1]
            assert isinstance(blob, bytes)
            keys = tuple(split_keys(blob, self._key_bytes_of(frame.namespace_id)))
            if frame.event is Event.STORED:
                held.update(keys)
            else:
                held.difference_update(keys)
        return [Change(frame.event, frame.namespace_id, keys)]

    def _behind(self) -> bool:
        """Whether the daemon has numbered events that did not come."""
        _, incarnation, sequence = self._store.subscribe()
        return incarnation != self._incarnation or sequence > self._sequence

    def _resync(self) -> Change:
        """Rebuild the set from `inspect`; events after its first page are still to be applied."""
        spaces, incarnation, sequence = self._key_lengths()
        pages: dict[bytes, set[PageKey]] = {}
        for namespace_id in spaces:
            pages[namespace_id] = set()
            cursor = b""
            while True:
                rows, cursor, run, _ = self._store.inspect_page("pages", namespace_id, cursor)
                if run != incarnation:
                    raise Unavailable("the daemon was restarted while its pages were listed")
                pages[namespace_id].update(_key_of(row) for row in rows)
                if not cursor:
                    break
        if incarnation != self._incarnation and self._incarnation:
            self._reopen()
        self._key_bytes, self.pages = spaces, pages
        self._incarnation, self._sequence = incarnation, sequence
        self.resyncs += 1
        return Change(None)

    def _reopen(self) -> None:
        # Another run may publish at another address.
        self.close()
        self._open()

    def _key_lengths(self) -> tuple[dict[bytes, int], bytes, int]:
        """Key length by namespace, the daemon's run, and the number that the listing begins at."""
        found: dict[bytes, int] = {}
        first: tuple[bytes, int] | None = None
        cursor = b""
        while True:
            rows, cursor, run, sequence = self._store.inspect_page("namespaces", b"", cursor)
            first = first or (run, sequence)
            for row in rows:
                namespace_id, record = row[0], row[1]
                if not isinstance(namespace_id, bytes) or not isinstance(record, bytes):
                    raise ProtocolError("a namespace's row begins with its id and its record")
                found[namespace_id] = NamespaceRecord.decode(record).key_bytes
            if not cursor:
                return found, *first

    def _key_bytes_of(self, namespace_id: bytes) -> int:
        if namespace_id not in self._key_bytes:
            self._key_bytes.update(self._key_lengths()[0])
        if namespace_id not in self._key_bytes:
            raise ProtocolError(f"an event of namespace {namespace_id.hex()}, which is not listed")
        return self._key_bytes[namespace_id]


def _key_of(row: list[object]) -> PageKey:
    key = row[0] if row else None
    if not isinstance(key, bytes):
        raise ProtocolError("a page's row begins with its key")
    return key
