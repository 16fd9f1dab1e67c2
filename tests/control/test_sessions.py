"""Who may say what: hello, tenants, limits, ids of another run."""

import contextlib
import os

import pytest

from nexuskv.errors import (
    ConfigError,
    LeaseExpired,
    OutOfSpace,
    ProtocolError,
    Refused,
)
from nexuskv.protocol import Type
from nexuskv.types import PageStatus
from tests.control.conftest import StartRig
from tests.control.raw import MIB, Closed, chain, is_status, record, refusal
from tests.control.rig import Rig

CARRIERS = pytest.mark.parametrize("carrier", ["local", "remote"])


@CARRIERS
def test_a_session_that_does_not_start_with_hello_is_a_protocol_error(
    rig: Rig, carrier: str
) -> None:
    client = rig.any(carrier, tenant=None)
    with pytest.raises(ProtocolError, match="hello"):
        client.call(Type.PING, b"x")


@CARRIERS
def test_a_second_hello_ends_the_session(rig: Rig, carrier: str) -> None:
    client = rig.any(carrier)
    with pytest.raises(ProtocolError, match="already"):
        client.hello()
    assert rig.gauges()["sessions"] == 0


def test_a_local_peer_cannot_lie_about_its_process(rig: Rig) -> None:
    client = rig.local(tenant=None)
    with pytest.raises(ProtocolError, match="kernel"):
        client.hello(pid=os.getppid())
    assert client.at_end()


def test_hello_tells_the_segment_and_that_a_local_session_may_write(rig: Rig) -> None:
    *_, segments, transport, writable = rig.local(tenant=None).hello()
    assert os.path.exists(segments[0][1])
    assert (transport, writable) == ("shm", True)


def test_a_hello_refused_for_its_tenant_may_be_said_again(rig: Rig) -> None:
    client = rig.local(tenant=None)
    with pytest.raises(ConfigError, match="tenant"):
        client.hello(tenant="t" * 257)
    client.hello()
    assert client.call(Type.PING, b"x") == [b"x"]


@CARRIERS
def test_sessions_beyond_the_limit_are_refused_with_the_limit_named(
    start_rig: StartRig, carrier: str
) -> None:
    rig = start_rig(sessions_max=2)
    for _ in range(2):
        rig.any(carrier)
    late = rig.any(carrier, tenant=None)
    with pytest.raises(OutOfSpace, match="sessions_max"):
        late.hello()


def test_a_refused_hello_does_not_close_descriptors_of_others(start_rig: StartRig) -> None:
    rig = start_rig(sessions_max=3)
    remote = [rig.remote() for _ in range(3)]
    late = [rig.local(tenant=None) for _ in range(2)]
    for client in late:
        assert isinstance(refusal(client.hello), OutOfSpace)
        assert isinstance(refusal(client.hello), OutOfSpace)
    remote[0].send_frame(b"")  # a malformed frame ends that session
    assert isinstance(refusal(remote[0].receive), ProtocolError)
    late[0].hello()
    late[1].close()
    rig.until(lambda: True)
    space = late[0].open()
    assert is_status(late[0].put(space, chain("a", 2)), PageStatus.STORED)


def test_a_closed_session_makes_room_for_another(start_rig: StartRig) -> None:
    rig = start_rig(sessions_max=1)
    first = rig.local()
    first.close()
    rig.until(lambda: rig.control.metrics.gauges()["sessions"] == 0)
    assert rig.local().call(Type.PING, b"") == [b""]


def test_namespaces_beyond_the_limit_are_refused(start_rig: StartRig) -> None:
    client = start_rig(namespaces_max=2).local()
    client.open(model="a")
    client.open(model="b")
    with pytest.raises(OutOfSpace, match="namespaces_max"):
        client.open(model="c")


def test_an_idle_empty_namespace_gives_its_place_to_a_new_one(start_rig: StartRig) -> None:
    rig = start_rig(namespaces_max=1)
    first = rig.local()
    first.open(model="a")
    first.close()
    rig.until(lambda: rig.control.metrics.gauges()["sessions"] == 0)
    rig.local().open(model="b")
    assert len(rig.local().inspect("namespaces")) == 1


def test_a_namespace_with_pages_keeps_its_place(start_rig: StartRig) -> None:
    rig = start_rig(namespaces_max=1)
    first = rig.local()
    first.put(first.open(model="a"), chain("a", 1))
    first.close()
    with pytest.raises(OutOfSpace, match="namespaces_max"):
        rig.local().open(model="b")


def test_a_session_opens_no_more_namespaces_than_allowed(start_rig: StartRig) -> None:
    client = start_rig(session_namespaces_max=1).local()
    client.open(model="a")
    assert client.open(model="a") == 0
    with pytest.raises(OutOfSpace, match="session_namespaces_max"):
        client.open(model="b")


def test_another_tenants_namespace_is_refused(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="tenant"):
        rig.local(tenant="red").open(tenant="blue")


@pytest.mark.parametrize("number", [1, 2**63, -1, "0", None, [[[]]], True], ids=repr)
def test_a_namespace_number_never_given_out_is_refused(rig: Rig, number: object) -> None:
    client = rig.local()
    client.open()
    with pytest.raises(ConfigError, match="opened 1 namespaces"):
        client.call(Type.MATCH, [[number, b""]])
    assert client.call(Type.PING, b"on") == [b"on"]


def test_the_same_record_is_the_same_namespace_for_every_session(rig: Rig) -> None:
    one, two = rig.local(), rig.remote()
    keys = chain("a", 3)
    one.put(one.open(), keys)
    assert two.match(two.open(), keys) == 3


@pytest.mark.parametrize(
    "fields",
    [{"page_bytes": MIB + 1}, {"page_bytes": 2**32 - 1}],
    ids=["chunk+1", "4GiB"],
)
def test_pages_larger_than_a_chunk_are_refused_when_opened(
    rig: Rig, fields: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="chunk"):
        rig.local().open(**fields)


def test_a_record_of_pages_of_no_bytes_is_refused(rig: Rig) -> None:
    raw = record(page_bytes=54321).encode()
    size = (54321).to_bytes(8, "little")
    assert raw.count(size) == 1
    with pytest.raises(ConfigError, match="page_bytes"):
        rig.local().call(Type.OPEN_NAMESPACE, raw.replace(size, bytes(8)))


@CARRIERS
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Type.COMMIT, (2**60, 0, b"", b"\1", bytes(8))),
        (Type.ABORT, (2**60,)),
        (Type.RENEW, (2**60, 1000)),
    ],
    ids=["commit", "abort", "renew"],
)
def test_ids_of_another_run_of_the_daemon_are_refused(
    rig: Rig, carrier: str, kind: Type, body: tuple[object, ...]
) -> None:
    with pytest.raises(LeaseExpired):
        rig.any(carrier).call(kind, *body)


def test_releasing_a_lease_of_another_run_is_harmless(rig: Rig) -> None:
    client = rig.local()
    assert client.release(2**60, 1) == 0
    assert client.release_pages(2**60, client.open(), chain("a", 2)) == 0


def test_ids_of_two_runs_are_never_the_same(start_rig: StartRig) -> None:
    given: list[set[int]] = []
    for _ in range(2):
        client = start_rig().local()
        space = client.open()
        client.put(space, chain("a", 1))
        given.append({client.acquire(space, chain("a", 1)).lease})
        given[-1] |= {client.reserve(space, chain(str(at), 1))[0] for at in range(20)}
    assert not given[0] & given[1]


def test_a_remote_session_may_not_reserve(rig: Rig) -> None:
    client = rig.remote()
    with pytest.raises(Refused, match="local"):
        client.reserve(client.open(), chain("a", 1))


def test_a_silent_remote_session_is_dropped(start_rig: StartRig) -> None:
    rig = start_rig(session_idle_s=10.0)
    client, lively = rig.remote(), rig.remote()
    for _ in range(4):
        rig.advance(4.0)
        lively.call(Type.PING, b"")
    assert rig.gauges()["sessions"] == 1
    with pytest.raises(ProtocolError, match="hello"):
        client.call(Type.PING, b"")


def test_a_silent_local_session_is_kept(start_rig: StartRig) -> None:
    rig = start_rig(session_idle_s=10.0)
    client = rig.local()
    rig.advance(1000.0)
    assert client.call(Type.PING, b"x") == [b"x"]


def test_a_local_client_that_takes_no_replies_is_closed_at_its_bound(start_rig: StartRig) -> None:
    rig = start_rig(send_backlog_bytes="256KiB")
    client = rig.local()
    client.socket.setblocking(False)
    with contextlib.suppress(Closed, BlockingIOError):  # closed, or its own buffers are full
        for _ in range(1000):
            client.send(Type.PING, bytes(64 * 1024))
            rig.turn()
    rig.until(lambda: rig.control.counters.snapshot()["sessions_overflowed"] == 1)
    assert rig.gauges()["sessions"] == 0


def test_a_large_reply_reaches_a_client_that_reads_late(rig: Rig) -> None:
    client = rig.local()
    payload = os.urandom(900 * 1024)
    client.send(Type.PING, payload)
    rig.turn()
    other = rig.local()
    assert other.call(Type.PING, b"x") == [b"x"]
    assert client.receive().body == [payload]
