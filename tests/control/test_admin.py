"""remove, clear, stats, inspect, subscribe, and the events that tell of changes."""

import msgpack
import pytest
import zmq

from nexuskv.control.counters import COUNTERS
from nexuskv.errors import ConfigError, OutOfSpace
from nexuskv.namespace import namespace_id
from nexuskv.protocol import EVENT_TOPIC, VERSION, Event, ParentState, Type
from nexuskv.types import PageStatus
from tests.control.conftest import StartRig
from tests.control.raw import INCARNATION, PAGE_BYTES, PATIENCE_S, chain, is_status, record
from tests.control.rig import Rig

ID = namespace_id(record().encode())


class Follower:
    """A subscriber to a rig's events."""

    def __init__(self, rig: Rig) -> None:
        address = rig.local().call(Type.SUBSCRIBE)[0]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self._socket.setsockopt(zmq.SUBSCRIBE, EVENT_TOPIC)
        self._socket.connect(address)
        # zmq says nothing when a subscription has arrived: clear until one is heard of.
        prober = rig.local()
        space = prober.open(model="probe")
        self._socket.setsockopt(zmq.RCVTIMEO, 50)
        for _ in range(200):
            _, epoch = prober.call(Type.CLEAR, space)
            try:
                while self.next()[5] != [epoch]:
                    pass
            except zmq.Again:
                continue
            break
        self._socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))

    def next(self) -> list[object]:
        topic, payload = self._socket.recv_multipart()
        assert topic == EVENT_TOPIC
        event: list[object] = msgpack.unpackb(payload)
        return event

    def close(self) -> None:
        self._socket.close()
        self._context.term()


# --- remove


def test_remove_unlinks_pages_and_counts_those_that_were_held(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 4)
    client.put(space, keys)
    assert client.call(Type.REMOVE, space, b"".join([keys[3], keys[3], *chain("b", 1)])) == [1]
    assert client.match(space, keys) == 3
    assert rig.gauges()["used_bytes"] == 3 * PAGE_BYTES


def test_what_followed_a_removed_page_is_kept_as_a_fragment(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 5)
    client.put(space, keys)
    client.call(Type.REMOVE, space, keys[2])
    assert client.match(space, keys) == 2
    assert client.inspect("namespaces")[0][4] == 2
    client.put(space, [keys[2]], parent=keys[1])
    assert client.match(space, keys) == 5


# --- pins


def test_pins_beyond_the_limit_are_refused(start_rig: StartRig) -> None:
    client = start_rig(pins_max=2).local()
    space, keys = client.open(), chain("a", 3)
    client.put(space, keys)
    with pytest.raises(OutOfSpace, match="pins_max"):
        client.call(Type.PIN, space, b"".join(keys), 1000)


@pytest.mark.parametrize("ttl_ms", [0, 2**64 - 1])
def test_a_pin_time_out_of_bounds_is_refused(rig: Rig, ttl_ms: int) -> None:
    client = rig.local()
    with pytest.raises(ConfigError, match="pin_ttl_max_s"):
        client.call(Type.PIN, client.open(), b"", ttl_ms)


# --- stats


def test_stats_have_every_counter_and_count_what_happens(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    client.put(space, chain("a", 3))
    client.match(space, chain("a", 4))
    stats = client.stats()
    assert stats["counters"].keys() == COUNTERS.keys()
    counted = {name: stats["counters"][name] for name in ("match_pages", "match_hits")}
    assert counted == {"match_pages": 4, "match_hits": 3}
    assert stats["counters"]["committed_pages"] == 3
    assert stats["gauges"]["used_bytes"] == 3 * PAGE_BYTES
    assert stats["urls"] == rig.control.urls


# --- inspect


def test_inspect_pages_shows_parents_and_what_is_linked(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 3)
    client.put(space, keys[:2])
    client.put(space, chain("b", 2)[1:], unknown=True)
    rows = {row[0]: row for row in client.inspect("pages", ID)}
    assert rows[keys[0]][1:4] == [b"", ParentState.ROOT, True]
    assert rows[keys[1]][1:4] == [keys[0], ParentState.KEY, True]
    assert rows[chain("b", 2)[1]][1:4] == [b"", ParentState.UNKNOWN, False]


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_inspect_pages_shows_each_page_once_in_pieces_of_any_size(rig: Rig, limit: int) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 20)
    client.put(space, keys)
    shown = [row[0] for row in client.inspect("pages", ID, limit=limit)]
    assert sorted(shown) == sorted(keys)


def test_pages_that_stay_are_shown_although_others_come_and_go(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 20)
    client.put(space, keys)
    shown: list[bytes] = []
    cursor, turn = b"", 0
    while cursor or not turn:
        rows, cursor, _, _ = client.call(Type.INSPECT, "pages", ID, cursor, 2)
        shown += [row[0] for row in rows]
        client.put(space, chain(f"new {turn}", 2))
        client.call(Type.REMOVE, space, chain(f"new {turn - 1}", 1)[0])
        turn += 1
    assert set(keys) <= set(shown)
    assert len(shown) == len(set(shown))


def test_inspect_shows_sessions_leases_and_chunks(rig: Rig) -> None:
    client, other = rig.local(), rig.remote(tenant="other")
    space, keys = client.open(), chain("a", 3)
    client.put(space, keys)
    lease = client.acquire(space, keys).lease
    client.reserve(space, chain("b", 2))
    sessions = client.inspect("sessions", limit=1)
    assert sessions[0][4] is True
    assert [row[2] for row in sessions] == ["default", "other"]
    assert sessions[0][5:] == [1, 2 * PAGE_BYTES]
    leases = client.inspect("leases")
    assert [row[:4] for row in leases] == [[lease, "default", b"request", 3]]
    assert sorted(row[2] for row in client.inspect("chunks", limit=1)) == [0, 0, 0, 3]
    assert other.call(Type.PING, b"") == [b""]


def test_leases_are_listed_in_pieces(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    client.put(space, keys)
    taken = [client.acquire(space, keys, request=b"%d" % at).lease for at in range(7)]
    assert [row[0] for row in client.inspect("leases", limit=3)] == taken


@pytest.mark.parametrize(
    ("what", "cursor", "limit"),
    [
        ("nothing", b"", 1),
        ("pages", b"short", 1),
        ("pages", b"\xff" * 34, 1),
        ("pages", b"", 0),
        ("pages", b"", 2**63),
        ("leases", b"x", 1),
        ("sessions", bytes(9), 1),
        ("chunks", bytes(7), 1),
    ],
)
def test_a_listing_that_makes_no_sense_is_refused(
    rig: Rig, what: str, cursor: bytes, limit: int
) -> None:
    client = rig.local()
    client.put(client.open(), chain("a", 1))
    with pytest.raises(ConfigError):
        client.call(Type.INSPECT, what, ID, cursor, limit)


def test_pages_of_an_unknown_namespace_are_refused(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="known"):
        rig.local().inspect("pages", bytes(16))


# --- events


def test_every_change_takes_the_next_number_whether_or_not_anybody_listens(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 2)
    assert client.call(Type.SUBSCRIBE) == ["", INCARNATION, 0]
    client.put(space, keys)
    client.call(Type.REMOVE, space, keys[1])
    client.call(Type.CLEAR, space)
    assert client.call(Type.SUBSCRIBE)[2] == 3
    assert client.call(Type.INSPECT, "chunks", b"", b"", 1)[2:] == [INCARNATION, 3]


def test_a_follower_hears_of_stored_removed_and_cleared_pages(start_rig: StartRig) -> None:
    rig = start_rig(events="tcp://127.0.0.1:0")
    follower = Follower(rig)
    try:
        client = rig.local()
        space, keys = client.open(), chain("a", 3)
        start = client.call(Type.SUBSCRIBE)[2]
        client.put(space, keys[:2])
        client.put(space, keys[2:], parent=keys[1])
        client.call(Type.REMOVE, space, keys[2])
        client.call(Type.CLEAR, space)
        expected = [
            [Event.STORED, ID, [ParentState.ROOT, b"", b"".join(keys[:2])]],
            [Event.STORED, ID, [ParentState.KEY, keys[1], keys[2]]],
            [Event.REMOVED, ID, [keys[2]]],
            [Event.CLEARED, ID, [1]],
        ]
        for at, rest in enumerate(expected):
            assert follower.next() == [VERSION, INCARNATION, start + 1 + at, *rest]
    finally:
        follower.close()


def test_a_follower_hears_of_evicted_pages_and_never_of_lost_commits(start_rig: StartRig) -> None:
    rig = start_rig(events="tcp://127.0.0.1:0")
    follower = Follower(rig)
    try:
        client = rig.local()
        space = client.open()
        keys = {name: chain(name, 64) for name in "ab"}
        twice = [client.reserve(space, keys["a"][:1])[0] for _ in range(2)]
        for number in twice:
            client.commit(number, 1)
        client.put(space, keys["a"])
        client.put(space, keys["b"])
        held: set[bytes] = set()
        for _ in range(4):
            _, _, _, event, _, body = follower.next()
            assert isinstance(body, list)
            blob = body[-1]
            named = [blob[at : at + 32] for at in range(0, len(blob), 32)]
            if event == Event.STORED:
                assert not held & set(named)
                held |= set(named)
            else:
                held -= set(named)
        assert held == set(keys["b"])
    finally:
        follower.close()


@pytest.mark.parametrize(
    "url", ["tcp://0.0.0.0:0", "tcp://example.org:1", "udp://127.0.0.1:1", "tcp://127.0.0.1"]
)
@pytest.mark.parametrize("setting", ["events", "listen"])
def test_an_address_that_others_could_reach_is_refused(
    start_rig: StartRig, setting: str, url: str
) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        start_rig(**{setting: url})


def test_a_first_page_put_after_a_clear_is_found(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    client.put(space, chain("a", 2))
    client.call(Type.CLEAR, space)
    assert is_status(client.put(space, chain("a", 2)), PageStatus.STORED)
    assert client.match(space, chain("a", 2)) == 2
