"""ping, pin, unpin, stats, inspect, subscribe: what operators and routers ask."""

from collections.abc import Callable

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.control.events import EventStream
from nexuskv.control.inspection import Inspection
from nexuskv.control.namespaces import Namespace
from nexuskv.control.sessions import Session
from nexuskv.errors import ConfigError

Reply = tuple[object, ...]


class Admin:
    """Handlers of the messages that are not part of a get or a put."""

    def __init__(
        self,
        *,
        config: Config,
        clock: Clock,
        incarnation: bytes,
        events: EventStream,
        inspection: Inspection,
        stats: Callable[[], dict[str, object]],
    ) -> None:
        self._config = config
        self._clock = clock
        self._incarnation = incarnation
        self._events = events
        self._inspection = inspection
        self._stats = stats

    def ping(self, _session: Session, body: list[object]) -> Reply:
        """Echo the payload."""
        return (body[0],)

    def pin(self, session: Session, body: list[object]) -> Reply:
        """Evict these pages only when nothing else can be."""
        number, keys, ttl_ms = body
        assert isinstance(ttl_ms, int)
        namespace, blob = self._pages_of(session, number, keys)
        if not 1 <= ttl_ms <= self._config.pin_ttl_max_s * 1000:
            raise ConfigError(
                f"a pin of {ttl_ms} ms, at least 1 ms and at most {self._config.pin_ttl_max_s} s "
                "(pin_ttl_max_s)"
            )
        now_s = self._clock.now()
        return (namespace.tree.pin(blob, until=now_s + ttl_ms / 1000),)

    def unpin(self, session: Session, body: list[object]) -> Reply:
        """Undo `pin`."""
        namespace, blob = self._pages_of(session, body[0], body[1])
        return (namespace.tree.unpin(blob),)

    def stats(self, _session: Session, _body: list[object]) -> Reply:
        """Counters and usage."""
        return (self._stats(),)

    def inspect(self, _session: Session, body: list[object]) -> Reply:
        """One page of a listing."""
        what, namespace_id, cursor, limit = body
        assert isinstance(what, str)
        assert isinstance(namespace_id, bytes)
        assert isinstance(cursor, bytes)
        assert isinstance(limit, int)
        if not 1 <= limit <= self._config.inspect_rows_max:
            raise ConfigError(
                f"{limit} rows asked for, at least 1 and at most {self._config.inspect_rows_max} "
                "(inspect_rows_max)"
            )
        rows, following = self._inspection.page(
            what, namespace_id=namespace_id, cursor=cursor, limit=limit
        )
        return rows, following, self._incarnation, self._events.sequence

    def subscribe(self, _session: Session, _body: list[object]) -> Reply:
        """Where events can be had."""
        return self._events.address, self._incarnation, self._events.sequence

    def _pages_of(self, session: Session, number: object, keys: object) -> tuple[Namespace, bytes]:
        assert isinstance(keys, bytes)
        namespace = session.namespace(number)
        namespace.key_count(keys, pages_max=self._config.batch_pages_max)
        return namespace, keys
