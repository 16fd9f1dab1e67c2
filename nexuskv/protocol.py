"""The wire messages: types, field tables, encoding and checking. docs/protocol.md is the page.

Pure functions over bytes. Everything a peer sends is checked here before a handler sees it.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import msgpack

from nexuskv.errors import (
    ConfigError,
    EpochChanged,
    LeaseExpired,
    NexusError,
    OutOfSpace,
    ProtocolError,
    Refused,
    Unavailable,
)

VERSION: Final = 0
REPLY: Final = 128  # added to a request's type
ERROR: Final = 127
LENGTH: Final = struct.Struct("<I")
INCARNATION_BYTES: Final = 8
REQUEST_ID_BYTES_MAX: Final = 64
ALL_RESERVATIONS: Final = 0  # of the session that aborts; no reservation has this id
EVENT_TOPIC: Final = b"nexuskv"
ITEMS_MAX: Final = 4096  # of one array in a request: its memory is taken before it is read


class Type(IntEnum):
    """Message types."""

    HELLO = 1
    OPEN_NAMESPACE = 2
    MATCH = 3
    PING = 4
    ACQUIRE = 5
    RENEW = 6
    RELEASE = 7
    RESERVE = 8
    COMMIT = 9
    ABORT = 10
    PIN = 11
    UNPIN = 12
    REMOVE = 13
    CLEAR = 14
    STATS = 15
    INSPECT = 16
    SUBSCRIBE = 17
    VERIFY = 18


class ParentState(IntEnum):
    """What a chain's first page hangs under."""

    ROOT = 0
    KEY = 1
    UNKNOWN = 2


class AcquireState(IntEnum):
    """How an acquire stands after a reply."""

    MORE = 0
    COMPLETE = 1
    DEADLINE = 2
    ABORTED = 3


class Event(IntEnum):
    """Kinds of events."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


class Code(IntEnum):
    """Error codes."""

    CONFIG = 1
    UNAVAILABLE = 2
    REFUSED = 3
    OUT_OF_SPACE = 4
    LEASE_EXPIRED = 5
    EPOCH_CHANGED = 6
    PROTOCOL = 7


ERROR_CLASSES: Final[tuple[tuple[Code, type[NexusError]], ...]] = (
    (Code.CONFIG, ConfigError),
    (Code.OUT_OF_SPACE, OutOfSpace),
    (Code.LEASE_EXPIRED, LeaseExpired),
    (Code.EPOCH_CHANGED, EpochChanged),
    (Code.REFUSED, Refused),
    (Code.UNAVAILABLE, Unavailable),
    (Code.PROTOCOL, ProtocolError),
)


def _is_u64(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _is_class(wanted: type) -> Callable[[object], bool]:
    return lambda value: type(value) is wanted


WORDS: Final[dict[str, Callable[[object], bool]]] = {
    "u64": _is_u64,
    "text": _is_class(str),
    "bytes": _is_class(bytes),
    "bool": _is_class(bool),
    "list": _is_class(list),
    "map": _is_class(dict),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Field names and words of a message's request and reply, in order."""

    request: tuple[tuple[str, str], ...]
    reply: tuple[tuple[str, str], ...]


def _fields(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.split(":") for part in text.split()]
    return tuple((name, word) for name, word in pairs)


SHAPES: Final[dict[Type, Shape]] = {
    kind: Shape(_fields(request), _fields(reply))
    for kind, request, reply in (
        (
            Type.HELLO,
            "client:text pid:u64 tenant:text token:bytes transports:list",
            "incarnation:bytes session:u64 server:text limits:map segments:list transport:text"
            " writable:bool",
        ),
        (Type.OPEN_NAMESPACE, "record:bytes", "namespace:u64 namespace_id:bytes epoch:u64"),
        (Type.MATCH, "chains:list", "tokens:u64 matches:list"),
        (Type.PING, "payload:bytes", "payload:bytes"),
        (
            Type.ACQUIRE,
            "chains:list request:bytes lease:u64 ttl_ms:u64 wait_ms:u64 load_ms:u64",
            "lease:u64 state:u64 tokens:u64 matches:list runs:list",
        ),
        (Type.RENEW, "lease:u64 ttl_ms:u64", "ttl_ms:u64"),
        (Type.RELEASE, "leases:list pages:list corrupt:list", "count:u64"),
        (
            Type.RESERVE,
            "namespace:u64 keys:bytes",
            "reservation:u64 statuses:bytes descriptors:bytes",
        ),
        (
            Type.COMMIT,
            "reservation:u64 parent_state:u64 parent:bytes done:bytes checksums:bytes",
            "statuses:bytes",
        ),
        (Type.ABORT, "reservation:u64", "count:u64"),
        (Type.PIN, "namespace:u64 keys:bytes ttl_ms:u64", "count:u64"),
        (Type.UNPIN, "namespace:u64 keys:bytes", "count:u64"),
        (Type.REMOVE, "namespace:u64 keys:bytes", "count:u64"),
        (Type.CLEAR, "namespace:u64", "count:u64 epoch:u64"),
        (Type.STATS, "", "stats:map"),
        (
            Type.INSPECT,
            "what:text namespace_id:bytes cursor:bytes limit:u64",
            "rows:list cursor:bytes incarnation:bytes sequence:u64",
        ),
        (Type.SUBSCRIBE, "", "address:text incarnation:bytes sequence:u64"),
        (Type.VERIFY, "namespace_id:bytes keys:bytes tier:text", "statuses:bytes"),
    )
}

_Checks = tuple[tuple[str, Callable[[object], bool]], ...]
_REQUEST_CHECKS: Final[dict[int, _Checks]] = {
    int(kind): tuple((name, WORDS[word]) for name, word in shape.request)
    for kind, shape in SHAPES.items()
}
_REPLY_CHECKS: Final[dict[int, _Checks]] = {
    ERROR: (("code", WORDS["u64"]), ("message", WORDS["text"])),
    **{
        int(kind) + REPLY: tuple((name, WORDS[word]) for name, word in shape.reply)
        for kind, shape in SHAPES.items()
    },
}


class Frame(NamedTuple):
    """One decoded frame. `body` has the fields of the type's table, in order, already checked."""

    type: int
    request_id: int
    body: list[object]


def encode(kind: int, request_id: int, body: list[object] | tuple[object, ...]) -> bytes:
    """One frame's bytes, without a length prefix."""
    packed: bytes = msgpack.packb((VERSION, kind, request_id, body))
    return packed


def encode_error(request_id: int, error: NexusError) -> bytes:
    """The one error reply for `error`; unlisted classes travel as their nearest listed base."""
    code = next((c for c, cls in ERROR_CLASSES if isinstance(error, cls)), Code.UNAVAILABLE)
    return encode(ERROR, request_id, (int(code), str(error)))


def decode_error(body: list[object]) -> NexusError:
    """The error that an error reply carries."""
    code, message = body
    cls = next((cls for c, cls in ERROR_CLASSES if c == code), Unavailable)
    return cls(str(message))


def prefixed(payload: bytes) -> bytes:
    """A frame as the local carrier sends it: its u32 length, then its bytes."""
    return LENGTH.pack(len(payload)) + payload


def decode_request(payload: bytes | memoryview) -> Frame:
    """Read a request frame.

    Raises:
        ProtocolError: not a frame, another version, an unknown type, or wrong fields.
    """
    return _decode(payload, _REQUEST_CHECKS, ITEMS_MAX)


def decode_reply(payload: bytes | memoryview) -> Frame:
    """Read a reply frame; an error reply is returned as a frame of type `ERROR`.

    Raises:
        ProtocolError: as `decode_request`.
    """
    return _decode(payload, _REPLY_CHECKS, len(payload))


class EventFrame(NamedTuple):
    """One decoded event. `body` has the fields of its kind, in order, already checked."""

    incarnation: bytes
    sequence: int
    event: Event
    namespace_id: bytes
    body: list[object]


EVENT_SHAPES: Final[dict[Event, tuple[str, ...]]] = {
    Event.STORED: ("u64", "bytes", "bytes"),  # parent state, parent, keys
    Event.REMOVED: ("bytes",),  # keys
    Event.CLEARED: ("u64",),  # epoch
}


def decode_event(payload: bytes | memoryview) -> EventFrame:
    """Read the second part of an event.

    Raises:
        ProtocolError: no event, another version, an unknown kind, or wrong fields.
    """
    frame = _unpack(payload, len(payload))
    if type(frame) is not list or len(frame) != 6:
        raise ProtocolError(
            "an event is [version, incarnation, sequence, event, namespace_id, body]"
        )
    version, incarnation, sequence, number, namespace_id, body = frame
    try:
        words = EVENT_SHAPES[Event(number)]
        good = len(body) == len(words) and all(
            WORDS[word](value) for word, value in zip(words, body, strict=True)
        )
    except (ValueError, TypeError, KeyError) as exc:
        raise ProtocolError(f"{len(payload)} bytes that are no event: {exc}") from exc
    if version != VERSION or not good or not _is_u64(sequence):
        raise ProtocolError("an event of another version or with other fields")
    if type(incarnation) is not bytes or type(namespace_id) is not bytes:
        raise ProtocolError("an event names the daemon's run and a namespace by bytes")
    return EventFrame(incarnation, sequence, Event(number), namespace_id, body)


def request_id_of(payload: bytes | memoryview) -> int:
    """The request id of a frame that may be malformed otherwise, or 0."""
    try:
        frame = _unpack(payload, ITEMS_MAX)
    except ProtocolError:
        return 0
    if type(frame) is list and len(frame) > 2 and _is_u64(frame[2]):
        number: int = frame[2]
        return number
    return 0


def _unpack(payload: bytes | memoryview, items_max: int) -> object:
    """The msgpack value in some bytes; no array in it has more than `items_max` items."""
    try:
        value: object = msgpack.unpackb(payload, max_array_len=items_max)
    except (ValueError, TypeError, MemoryError, msgpack.UnpackException) as exc:
        raise ProtocolError(f"{len(payload)} bytes that are no message: {exc}") from exc
    return value


def _decode(payload: bytes | memoryview, tables: dict[int, _Checks], items_max: int) -> Frame:
    frame = _unpack(payload, items_max)
    if type(frame) is not list or len(frame) != 4:
        raise ProtocolError("a frame is [version, type, request_id, body]")
    version, kind, request_id, body = frame
    if type(version) is not int:
        raise ProtocolError("a frame is [version, type, request_id, body]")
    if version != VERSION:
        raise ProtocolError(f"protocol version {version}, this side speaks {VERSION}")
    if type(kind) is not int or not _is_u64(request_id) or type(body) is not list:
        raise ProtocolError("a frame is [version, type, request_id, body]")
    checks = tables.get(kind)
    if checks is None:
        raise ProtocolError(f"unknown message type {kind}")
    if len(body) != len(checks):
        raise ProtocolError(f"message type {kind} has {len(checks)} fields, got {len(body)}")
    for (name, good), value in zip(checks, body, strict=True):
        if not good(value):
            raise ProtocolError(f"field {name} of message type {kind} is a {type(value).__name__}")
    return Frame(kind, request_id, body)
