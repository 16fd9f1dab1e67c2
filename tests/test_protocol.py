"""Frames: what is encoded is read back; what is no frame is one clear error."""

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexuskv.errors import (
    ConfigError,
    CorruptPage,
    DaemonUnreachable,
    EpochChanged,
    LeaseExpired,
    NexusError,
    OutOfSpace,
    ProtocolError,
    Refused,
    TransferTimeout,
    Unavailable,
)
from nexuskv.protocol import (
    ERROR,
    EVENT_SHAPES,
    ITEMS_MAX,
    LENGTH,
    REPLY,
    SHAPES,
    VERSION,
    WORDS,
    Event,
    Type,
    decode_error,
    decode_event,
    decode_reply,
    decode_request,
    encode,
    encode_error,
    prefixed,
    request_id_of,
)

U64 = st.integers(0, 2**64 - 1)
LEAF = st.none() | st.booleans() | U64 | st.binary(max_size=40) | st.text(max_size=10)
WORD: dict[str, st.SearchStrategy[object]] = {
    "u64": U64,
    "text": st.text(max_size=20),
    "bytes": st.binary(max_size=70),
    "bool": st.booleans(),
    "list": st.lists(LEAF | st.lists(LEAF, max_size=3), max_size=4),
    "map": st.dictionaries(st.text(max_size=8), LEAF, max_size=4),
}
ALL = pytest.mark.parametrize("kind", Type, ids=lambda kind: kind.name.lower())


def values(fields: tuple[tuple[str, str], ...]) -> st.SearchStrategy[list[object]]:
    return st.tuples(*(WORD[word] for _name, word in fields)).map(list)


def packed(value: object) -> bytes:
    raw: bytes = msgpack.packb(value)
    return raw


@ALL
@settings(max_examples=20)
@given(data=st.data(), request_id=U64)
def test_a_request_is_read_back_as_it_was(kind: Type, data: st.DataObject, request_id: int) -> None:
    body = data.draw(values(SHAPES[kind].request))
    frame = decode_request(encode(kind, request_id, body))
    assert (frame.type, frame.request_id, frame.body) == (kind, request_id, body)


@ALL
@settings(max_examples=20)
@given(data=st.data(), request_id=U64)
def test_a_reply_is_read_back_as_it_was(kind: Type, data: st.DataObject, request_id: int) -> None:
    body = data.draw(values(SHAPES[kind].reply))
    frame = decode_reply(memoryview(encode(kind + REPLY, request_id, body)))
    assert (frame.type, frame.request_id, frame.body) == (kind + REPLY, request_id, body)


@ALL
def test_a_field_too_many_or_too_few_is_refused(kind: Type) -> None:
    count = len(SHAPES[kind].request)
    for wrong in (count - 1, count + 1):
        if wrong >= 0:
            with pytest.raises(ProtocolError, match=f"has {count} fields"):
                decode_request(encode(kind, 1, (b"",) * wrong))


EXAMPLES: dict[str, object] = {
    "u64": 1, "text": "x", "bytes": b"x", "bool": True, "list": [], "map": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "place", "wrong"),
    [
        (kind, place, other)
        for kind, shape in SHAPES.items()
        for place, (_, word) in enumerate(shape.request)
        for other in EXAMPLES
        if other != word
    ],
)
def test_a_field_of_another_word_is_refused_by_name(kind: Type, place: int, wrong: str) -> None:
    fields = SHAPES[kind].request
    body = [EXAMPLES[word] for _, word in fields]
    body[place] = EXAMPLES[wrong]
    with pytest.raises(ProtocolError, match=f"field {fields[place][0]} "):
        decode_request(encode(kind, 1, body))


@pytest.mark.parametrize(("number", "good"), [(0, True), (2**64 - 1, True), (-1, False)])
def test_numbers_are_u64(number: int, good: bool) -> None:
    assert WORDS["u64"](number) is good


@pytest.mark.parametrize("word", [True, 1.0, None, "1"])
def test_what_only_equals_a_number_is_none(word: object) -> None:
    assert not WORDS["u64"](word)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ([VERSION + 1, 4, 1, [b""]], "version 1"),
        ([True, 4, 1, [b""]], "a frame is"),
        ([VERSION, 4, 1], "a frame is"),
        ([VERSION, 4, 1, [b""], 0], "a frame is"),
        ([VERSION, "4", 1, [b""]], "a frame is"),
        ([VERSION, 4, -1, [b""]], "a frame is"),
        ([VERSION, 4, 1, {"payload": b""}], "a frame is"),
        ([VERSION, 0, 1, []], "type 0"),
        ([VERSION, 18, 1, []], "type 18"),
        ([VERSION, ERROR, 1, [1, ""]], "type 127"),
        ([VERSION, 4 + REPLY, 1, [b""]], "type 132"),
        ("text", "a frame is"),
        (None, "a frame is"),
    ],
)
def test_what_is_no_request_is_refused(frame: object, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        decode_request(packed(frame))


@given(st.binary(max_size=200))
def test_random_bytes_are_a_frame_or_a_protocol_error(raw: bytes) -> None:
    assert 0 <= request_id_of(raw) < 2**64
    for read in (decode_request, decode_reply, decode_event):
        try:
            read(raw)
        except ProtocolError:
            continue


@pytest.mark.parametrize(
    "raw",
    [
        b"\x91" * 2000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        (b"\xdd\x00\x01\x00\x00" * 900) + bytes(70_000),
        b"\x94" + b"\x91" * 900 + b"\xc0\x04\x01\x90",
    ],
    ids=["nesting", "array", "map", "bytes", "arrays in arrays", "nested version"],
)
def test_bytes_that_announce_more_than_they_are_cost_nothing(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_request(raw)
    assert request_id_of(raw) in (0, 1)


def test_an_array_of_a_request_has_a_bound_and_one_of_a_reply_only_its_message() -> None:
    many = [0] * (ITEMS_MAX + 1)
    assert decode_request(encode(Type.RELEASE, 1, [many[1:], [], []])).body[0] == many[1:]
    with pytest.raises(ProtocolError):
        decode_request(encode(Type.RELEASE, 1, [many, [], []]))
    reply = encode(Type.INSPECT + REPLY, 1, [many, b"", b"", 0])
    assert decode_reply(reply).body[0] == many


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        (ConfigError("a"), ConfigError),
        (Unavailable("a"), Unavailable),
        (Refused("a"), Refused),
        (OutOfSpace("a"), OutOfSpace),
        (LeaseExpired("a"), LeaseExpired),
        (EpochChanged("a"), EpochChanged),
        (ProtocolError("a"), ProtocolError),
        (TransferTimeout("a"), Unavailable),
        (DaemonUnreachable("a"), Unavailable),
        (CorruptPage("a"), Unavailable),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, NexusError) else "",
)
def test_an_error_travels_as_its_class_or_its_nearest_base(
    error: NexusError, cls: type[NexusError]
) -> None:
    frame = decode_reply(encode_error(7, error))
    assert (frame.type, frame.request_id) == (ERROR, 7)
    read = decode_error(frame.body)
    assert (type(read), str(read)) == (cls, "a")


def test_an_error_code_of_a_later_version_is_unavailable() -> None:
    assert type(decode_error([99, "new"])) is Unavailable


def test_a_local_frame_has_its_length_in_front() -> None:
    assert prefixed(b"abc") == LENGTH.pack(3) + b"abc" == b"\3\0\0\0abc"


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name.lower())
@settings(max_examples=20)
@given(data=st.data(), sequence=U64)
def test_an_event_is_read_back_as_it_was(event: Event, data: st.DataObject, sequence: int) -> None:
    body = [data.draw(WORD[word]) for word in EVENT_SHAPES[event]]
    frame = decode_event(packed([VERSION, bytes(8), sequence, int(event), bytes(16), body]))
    assert frame == (bytes(8), sequence, event, bytes(16), body)


@pytest.mark.parametrize(
    "frame",
    [
        [VERSION + 1, bytes(8), 1, 3, bytes(16), [1]],
        [VERSION, "x", 1, 3, bytes(16), [1]],
        [VERSION, bytes(8), -1, 3, bytes(16), [1]],
        [VERSION, bytes(8), 1, 9, bytes(16), [1]],
        [VERSION, bytes(8), 1, 3, bytes(16), []],
        [VERSION, bytes(8), 1, 3, bytes(16), [b""]],
        [VERSION, bytes(8), 1, 3, bytes(16), 7],
        [VERSION, bytes(8), 1, [], bytes(16), [1]],
        [VERSION, bytes(8), 1],
        7,
    ],
)
def test_what_is_no_event_is_refused(frame: object) -> None:
    with pytest.raises(ProtocolError):
        decode_event(packed(frame))
