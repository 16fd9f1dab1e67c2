"""A follower keeps the exact set, whatever events it loses."""

from collections.abc import Iterator

import msgpack
import pytest
import zmq

from nexuskv.client.follower import Change, Follower
from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.errors import Unavailable
from nexuskv.namespace import namespace_id
from nexuskv.protocol import EVENT_TOPIC, REPLY, VERSION, Event, Frame, Type, encode
from tests.client.conftest import keys_of, page, until
from tests.client.fake_daemon import FakeDaemon


class Publisher:
    """The fake daemon's events: a PUB socket, and the answers that belong to it."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.sequence = 0
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("tcp://127.0.0.1:0")
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        daemon.script[Type.SUBSCRIBE] = self.subscribe
        daemon.script[Type.INSPECT] = self.inspect

    def subscribe(self, frame: Frame) -> list[bytes]:
        body = (self.address, self.daemon.incarnation, self.sequence)
        return [encode(frame.type + REPLY, frame.request_id, body)]

    def inspect(self, frame: Frame) -> list[bytes]:
        what, _, cursor, _ = frame.body
        spaces = [self.identity(n) for n in range(len(self.daemon.namespaces))]
        rows = [list(pair) for pair in spaces]
        if what == "pages":
            rows = [[key] for _, key in sorted(self.daemon.pages)]
        start = int(cursor or b"0")  # type: ignore[call-overload]  # bytes on the wire
        after = str(start + 2).encode() if start + 2 < len(rows) else b""
        body = (rows[start : start + 2], after, self.daemon.incarnation, self.sequence)
        return [encode(frame.type + REPLY, frame.request_id, body)]

    def identity(self, number: int) -> tuple[bytes, bytes]:
        record = self.daemon.namespaces[number].encode()
        return namespace_id(record), record

    def await_follower(self) -> None:
        """Until a follower's subscription has come."""
        assert self.socket.poll(5000)
        self.socket.recv()

    def tell(self, event: Event, *body: object, lose: bool = False) -> None:
        self.sequence += 1
        space = self.identity(0)[0]
        message = (VERSION, self.daemon.incarnation, self.sequence, int(event), space, body)
        if not lose:
            self.socket.send_multipart([EVENT_TOPIC, msgpack.packb(message)])


@pytest.fixture
def publisher(daemon: FakeDaemon) -> Iterator[Publisher]:
    opened = Publisher(daemon)
    yield opened
    opened.socket.close()
    opened.context.term()


@pytest.fixture
def follower(store: Store, publisher: Publisher, space: Space) -> Iterator[Follower]:
    space.put(keys_of(5), from_=[page(n) for n in range(5)])
    with store.follow() as opened:
        assert opened.changes(timeout_s=0) == [Change(None)]
        publisher.await_follower()
        yield opened


def test_it_begins_with_all_pages(follower: Follower, space: Space) -> None:
    assert follower.pages == {space.id: set(keys_of(5))}


def test_events_change_the_set(follower: Follower, publisher: Publisher, space: Space) -> None:
    new = b"".join(keys_of(2, 10))
    publisher.tell(Event.STORED, 0, b"", new)
    stored = Change(Event.STORED, space.id, tuple(keys_of(2, 10)))
    assert follower.changes(timeout_s=5) == [stored]
    publisher.tell(Event.REMOVED, keys_of(1)[0])
    assert follower.changes(timeout_s=5) == [Change(Event.REMOVED, space.id, (keys_of(1)[0],))]
    assert follower.pages[space.id] == {*keys_of(4, 1), *keys_of(2, 10)}
    publisher.tell(Event.CLEARED, 1)
    follower.changes(timeout_s=5)
    assert follower.pages[space.id] == set()


def test_a_hole_in_the_numbers_rebuilds_the_set(
    follower: Follower, publisher: Publisher, daemon: FakeDaemon, space: Space
) -> None:
    daemon.pages.pop((0, keys_of(1)[0]))
    publisher.tell(Event.REMOVED, keys_of(1)[0], lose=True)
    daemon.pages.pop((0, keys_of(2)[1]))
    publisher.tell(Event.REMOVED, keys_of(2)[1])
    assert follower.changes(timeout_s=5) == [Change(None)]
    assert follower.pages[space.id] == set(keys_of(3, 2))


def test_lost_events_followed_by_silence_are_noticed(
    follower: Follower, publisher: Publisher, daemon: FakeDaemon, space: Space
) -> None:
    daemon.pages.pop((0, keys_of(1)[0]))
    publisher.tell(Event.REMOVED, keys_of(1)[0], lose=True)
    assert follower.changes(timeout_s=0) == [Change(None)]
    assert follower.pages[space.id] == set(keys_of(4, 1))


def test_another_run_rebuilds_the_set(
    follower: Follower, publisher: Publisher, daemon: FakeDaemon, space: Space, store: Store
) -> None:
    daemon.stop()
    with pytest.raises(Unavailable):
        follower.changes(timeout_s=0)
    daemon.incarnation = b"next-run"
    daemon.pages.clear()
    publisher.sequence = 0
    daemon.listen()
    until(lambda: store.connected)
    assert follower.changes(timeout_s=0) == [Change(None)]
    assert follower.pages[space.id] == set()


def test_a_daemon_without_events_cannot_be_followed(store: Store, daemon: FakeDaemon) -> None:
    daemon.script[Type.SUBSCRIBE] = lambda frame: [
        encode(frame.type + REPLY, frame.request_id, ("", daemon.incarnation, 0))
    ]
    with store.follow() as follower, pytest.raises(Unavailable, match="publishes no events"):
        follower.changes(timeout_s=0)
