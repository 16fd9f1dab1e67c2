"""Bytes that are no request: one error, that session closed, nobody else disturbed, no leaks."""

import contextlib
import gc
import os
import resource
import socket

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexuskv.errors import ConfigError, NexusError, ProtocolError
from nexuskv.protocol import (
    ERROR,
    SHAPES,
    VERSION,
    Type,
    decode_reply,
    decode_request,
    encode,
    request_id_of,
)
from tests.control.conftest import StartRig
from tests.control.raw import KIB, Closed, Raw, RawLocal, chain, length_of, refusal
from tests.control.rig import Rig

CARRIERS = pytest.mark.parametrize("carrier", ["local", "remote"])


def packed(value: object) -> bytes:
    raw: bytes = msgpack.packb(value)
    return raw


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


BAD_FRAMES = {
    "empty": b"",
    "no array": packed({"a": 1}),
    "cut short": encode(Type.PING, 1, (b"payload",))[:-3],
    "trailing bytes": encode(Type.PING, 1, (b"payload",)) + b"\0",
    "another version": packed([VERSION + 1, int(Type.PING), 1, [b""]]),
    "version is true": packed([False, int(Type.PING), 1, [b""]]),
    "version is nested": b"\x94" + nested(900) + packed(4) + packed(1) + packed([b""]),
    "unknown type": packed([VERSION, 99, 1, []]),
    "a reply": packed([VERSION, int(Type.PING) + 128, 1, [b""]]),
    "an error": packed([VERSION, ERROR, 1, [1, "x"]]),
    "type is text": packed([VERSION, "4", 1, [b""]]),
    "id is negative": packed([VERSION, int(Type.PING), -1, [b""]]),
    "id is a float": packed([VERSION, int(Type.PING), 1.0, [b""]]),
    "body is a map": packed([VERSION, int(Type.PING), 1, {}]),
    "a field too few": packed([VERSION, int(Type.PING), 1, []]),
    "a field too many": packed([VERSION, int(Type.PING), 1, [b"", b""]]),
    "text for bytes": packed([VERSION, int(Type.PING), 1, ["x"]]),
    "nesting bomb": nested(100_000),
    "nested to the limit": b"\x94\x00\x04\x01" + b"\x91" + nested(1000),
    "array of 2^32-1 items": b"\xdd\xff\xff\xff\xff",
    "map of 2^32-1 items": b"\xdf\xff\xff\xff\xff",
    "bytes of 2^32-1": b"\xc6\xff\xff\xff\xff",
    "arrays that each announce much": b"\xdd\x00\x01\x00\x01" * 1000 + bytes(70_000),
    "invalid text": packed([VERSION, int(Type.INSPECT), 1, []])[:-1] + b"\x91\xa2\xff\xfe",
    "extension type": b"\x94\x00\x04\x01\x91\xc7\x01\x05x",
    "timestamp of nonsense": b"\xc7\x0c\xff" + b"\xff" * 12,
}


@CARRIERS
@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_a_malformed_frame_gets_one_error_and_ends_its_session(
    rig: Rig, carrier: str, frame: bytes
) -> None:
    bystander = rig.local()
    client = rig.any(carrier)
    client.send_frame(frame)
    answer = decode_reply(client.receive_frame())
    assert answer.type == ERROR
    assert answer.request_id == request_id_of(frame)
    assert answer.body[0] == 7
    if isinstance(client, RawLocal):
        assert client.at_end()
    assert rig.gauges()["sessions"] == 1
    assert bystander.call(Type.PING, b"on") == [b"on"]


@CARRIERS
def test_a_malformed_frame_loses_its_session_what_it_reserved_and_no_lease(
    rig: Rig, carrier: str
) -> None:
    client = rig.any(carrier)
    space = client.open()
    writer = rig.local()
    writer.put(writer.open(), chain("a", 4))
    client.acquire(space, chain("a", 4))
    if carrier == "local":
        client.reserve(space, chain("b", 4))
    client.send_frame(b"\xff")
    assert isinstance(refusal(client.receive), ProtocolError)
    rig.advance(10_000 / 1000 + rig.config.lease_margin_s)
    gauges = rig.gauges()
    assert (gauges["leases"], gauges["leased_slots"], gauges["writing_bytes"]) == (0, 0, 0)


@CARRIERS
def test_random_bytes_never_disturb_the_daemon(rig: Rig, carrier: str) -> None:
    bystander = rig.local()
    known = encode(Type.ACQUIRE, 9, ([[0, b"k" * 64]], b"r", 0, 1000, 0, 0))

    @given(
        st.one_of(
            st.binary(max_size=64),
            st.tuples(st.integers(0, len(known) - 1), st.integers(0, 255)).map(
                lambda at: known[: at[0]] + bytes([at[1]]) + known[at[0] + 1 :]
            ),
            st.sampled_from(list(Type)).flatmap(
                lambda kind: st.lists(ANY, min_size=len(SHAPES[kind].request)).map(
                    lambda body: encode(kind, 1, tuple(body[: len(SHAPES[kind].request)]))
                )
            ),
        )
    )
    @settings(max_examples=60, deadline=None)
    def check(frame: bytes) -> None:
        client = rig.any(carrier)
        client.open()
        client.send_frame(frame)
        if request_id_of(frame) or not _is_well_formed(frame):
            decode_reply(client.receive_frame())
        client.close()
        assert bystander.call(Type.PING, b"on") == [b"on"]

    check()
    assert rig.counter("internal_errors") == 0


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=40)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


def _is_well_formed(frame: bytes) -> bool:
    try:
        decode_request(frame)
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize("kind", [kind for kind in Type if kind is not Type.HELLO])
def test_fields_of_right_types_and_wrong_meaning_never_fault(rig: Rig, kind: Type) -> None:
    words = {
        "u64": st.integers(0, 2**64 - 1) | st.integers(0, 3),
        "bytes": st.binary(max_size=70) | st.just(bytes(64)),
        "text": st.sampled_from(["pages", "leases", "chunks", "sessions", "namespaces", ""]),
        "list": st.lists(ANY | st.tuples(st.just(0), st.binary(max_size=64)), max_size=4)
        | st.lists(st.tuples(st.integers(0, 5), st.just(0), st.just(bytes(32))), max_size=2),
    }
    body = st.tuples(*(words[word] for _name, word in SHAPES[kind].request))
    client = rig.local()
    client.open()
    client.put(0, [bytes(32)])

    @given(body)
    @settings(max_examples=30, deadline=None)
    def check(fields: tuple[object, ...]) -> None:
        try:
            client.call(kind, *fields)
        except ProtocolError:
            raise
        except NexusError:
            return

    check()
    assert rig.counter("internal_errors") == 0


def test_a_local_message_over_the_limit_is_refused_before_it_is_read(rig: Rig) -> None:
    client = rig.local()
    client.socket.sendall(length_of(rig.config.message_bytes_max + 1))
    error = refusal(client.receive)
    assert isinstance(error, ProtocolError)
    assert str(rig.config.message_bytes_max) in str(error)
    assert client.at_end()


def test_a_local_message_of_the_limit_is_taken(rig: Rig) -> None:
    client = rig.local()
    overhead = len(encode(Type.PING, 1, (b"",))) + 3  # a longer msgpack length
    payload = bytes(rig.config.message_bytes_max - overhead)
    assert client.call(Type.PING, payload) == [payload]


def test_a_remote_message_over_the_limit_drops_the_connection_and_nobody_else(rig: Rig) -> None:
    bystander, client = rig.remote(), rig.remote()
    client.send(Type.PING, bytes(rig.config.message_bytes_max + 1))
    assert bystander.call(Type.PING, b"on") == [b"on"]
    # zmq connects anew, as somebody the daemon has not met.
    with pytest.raises(ProtocolError, match="hello"):
        client.call(Type.PING, b"")
    rig.advance(rig.config.session_idle_s * 0.9)
    bystander.call(Type.PING, b"on")
    rig.advance(rig.config.session_idle_s * 0.3)
    assert rig.gauges()["sessions"] == 1


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 60_000])
def test_a_frame_in_pieces_is_one_frame(rig: Rig, cut: int) -> None:
    client = rig.local()
    payload = os.urandom(100_000)
    frame = encode(Type.PING, 5, (payload,))
    whole = length_of(len(frame)) + frame
    client.socket.sendall(whole[:cut])
    rig.turn()
    client.socket.sendall(whole[cut:] + whole)
    assert client.receive().body == [payload]
    assert client.receive().body == [payload]


def test_a_connection_that_ends_inside_a_frame_leaves_nothing(rig: Rig) -> None:
    client = rig.local()
    client.socket.sendall(length_of(1000) + b"x" * 10)
    client.close()
    rig.until(lambda: rig.control.metrics.gauges()["sessions"] == 0)


def test_frames_in_one_remote_message_are_answered_each(rig: Rig) -> None:
    client = rig.remote()
    client.socket.send_multipart([encode(Type.PING, n, (b"%d" % n,)) for n in (1, 2, 3)])
    assert [client.receive().body for _ in range(3)] == [[b"1"], [b"2"], [b"3"]]


@CARRIERS
def test_request_id_0_gets_no_answer_not_even_an_error(rig: Rig, carrier: str) -> None:
    client = rig.any(carrier)
    client.send_frame(encode(Type.RENEW, 0, (77, 1000)))
    client.send_frame(encode(Type.PING, 0, (b"quiet",)))
    assert client.call(Type.PING, b"loud") == [b"loud"]


def test_an_acquire_with_request_id_0_does_not_wait(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    client.send_frame(
        encode(Type.ACQUIRE, 0, ([[space, chain("a", 1)[0]]], b"r", 0, 1000, 60_000, 0))
    )
    assert client.gauge("acquires_waiting") == 0


def test_refused_requests_leave_no_garbage_for_the_collector_that_is_off(rig: Rig) -> None:
    client = rig.local()
    space = client.open()

    def refuse_many() -> None:
        for _ in range(50):
            refusal(lambda: client.call(Type.RENEW, 5, 1000))
            refusal(lambda: client.call(Type.MATCH, [[space, b"odd"]]))
            refusal(lambda: client.call(Type.OPEN_NAMESPACE, b"\1junk"))
            stranger = rig.local(tenant=None)
            stranger.send_frame(b"\xc1")
            refusal(stranger.receive)
            stranger.close()

    rig.run(gc.disable)
    try:
        refuse_many()
        rig.run(gc.collect)
        before = rig.run(lambda: len(gc.get_objects()))
        refuse_many()
        after = rig.run(lambda: len(gc.get_objects()))
        rig.run(gc.collect)
        kept = after - rig.run(lambda: len(gc.get_objects()))
    finally:
        gc.enable()
    assert kept < 200, f"{kept} objects of {before} wait for a collection"


def test_numbers_of_a_reply_never_outgrow_the_wire(rig: Rig) -> None:
    client = rig.local()
    with pytest.raises(ConfigError, match="page_tokens"):
        client.open(page_tokens=2**62)
    space = client.open(page_tokens=2**31 - 1)
    client.put(space, chain("a", 60))
    assert client.match(space, chain("a", 60)) == 60


def test_a_client_that_connects_and_goes_leaves_no_descriptor(rig: Rig) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        client = socket.socket(socket.AF_UNIX)
        client.connect(rig.control.urls[0].removeprefix("unix://"))
        client.close()
    rig.turn()
    rig.until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_daemon_out_of_descriptors_turns_new_connections_away(start_rig: StartRig) -> None:
    rig = start_rig()
    client = rig.local()
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    fillers: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        for stranger in strangers:
            stranger.settimeout(30)
            stranger.connect(rig.control.urls[0].removeprefix("unix://"))
            assert stranger.recv(1) == b""
        assert client.call(Type.PING, b"on") == [b"on"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
        for stranger in strangers:
            stranger.close()
    assert rig.local().call(Type.PING, b"new") == [b"new"]


def test_a_rest_of_a_refused_burst_is_not_answered(rig: Rig) -> None:
    client = rig.local()
    good = encode(Type.PING, 3, (b"",))
    client.socket.sendall(length_of(1) + b"\xc1" + length_of(len(good)) + good)
    assert isinstance(refusal(client.receive), ProtocolError)
    with pytest.raises(Closed):
        client.receive()


def test_a_reply_fits_the_kilobytes_a_request_of_50_000_keys_needs(start_rig: StartRig) -> None:
    client: Raw = start_rig(message_bytes_max=16 * KIB * KIB).local()
    keys = chain("a", 50_000)
    space = client.open()
    client.put(space, keys[:50])
    assert client.match(space, keys) == 50
