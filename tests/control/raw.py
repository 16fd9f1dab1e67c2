"""Raw clients of the control plane: frames over real sockets, nothing of the client library."""

import hashlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from nexuskv.errors import NexusError
from nexuskv.namespace import NamespaceRecord
from nexuskv.protocol import (
    ERROR,
    LENGTH,
    REPLY,
    AcquireState,
    Frame,
    Type,
    decode_error,
    decode_reply,
    encode,
    prefixed,
)
from nexuskv.types import DESCRIPTOR_BYTES, DESCRIPTOR_FORMAT, Descriptor, PageStatus

KIB = 1024
MIB = 1024 * KIB
PAGE_BYTES = 64 * KIB
PATIENCE_S = 30.0
INCARNATION = bytes(range(8))


def chain(name: str, count: int, *, key_bytes: int = 32) -> list[bytes]:
    """Keys of a chain: each commits to the name and all before it."""
    keys: list[bytes] = []
    last = name.encode()
    for _ in range(count):
        last = hashlib.blake2b(last, digest_size=key_bytes).digest()
        keys.append(last)
    return keys


class Closed(Exception):
    """The daemon closed the connection."""


class Raw:
    """A client that sends frames and reads replies; errors come back as exceptions."""

    def __init__(self) -> None:
        self.number = 0

    def send_frame(self, payload: bytes) -> None:
        raise NotImplementedError

    def receive_frame(self) -> bytes:
        """The next frame; `Closed` at the end of the connection."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def send(self, kind: int, *body: object) -> int:
        """Send a request; its id."""
        self.number += 1
        self.send_frame(encode(kind, self.number, body))
        return self.number

    def receive(self) -> Frame:
        """The next reply; an error reply is raised."""
        frame = decode_reply(self.receive_frame())
        if frame.type == ERROR:
            raise decode_error(frame.body)
        return frame

    def call(self, kind: Type, *body: object) -> list[Any]:
        """One request and its reply."""
        number = self.send(kind, *body)
        frame = self.receive()
        assert (frame.type, frame.request_id) == (kind + REPLY, number)
        return frame.body

    def hello(self, *, tenant: str = "default", pid: int | None = None) -> list[Any]:
        pid = os.getpid() if pid is None else pid
        return self.call(Type.HELLO, "raw", pid, tenant, b"", ["shm"])

    def open(self, **fields: object) -> int:
        """Open a namespace; its number."""
        number: int = self.call(Type.OPEN_NAMESPACE, record(**fields).encode())[0]
        return number

    # --- puts

    def reserve(self, space: int, keys: Sequence[bytes]) -> tuple[int, bytes, list[Descriptor]]:
        """Reservation, statuses, and descriptors without their offsets' check for none."""
        reservation, statuses, raw = self.call(Type.RESERVE, space, b"".join(keys))
        return reservation, statuses, descriptors(raw)

    def commit(
        self,
        reservation: int,
        count: int,
        *,
        parent: bytes | None = None,
        unknown: bool = False,
        done: bytes | None = None,
        checksums: bytes | None = None,
    ) -> bytes:
        """Commit with the parent given, by default a root; the statuses."""
        state = 2 if unknown else 0 if parent is None else 1
        (statuses,) = self.call(
            Type.COMMIT,
            reservation,
            state,
            parent or b"",
            b"\1" * count if done is None else done,
            b"\7" * (8 * count) if checksums is None else checksums,
        )
        assert isinstance(statuses, bytes)
        return statuses

    def put(
        self,
        space: int,
        keys: Sequence[bytes],
        *,
        parent: bytes | None = None,
        unknown: bool = False,
    ) -> bytes:
        """Reserve and commit; one status a key, of the commit where a slot was lent."""
        reservation, statuses, _ = self.reserve(space, keys)
        if not reservation:
            return statuses
        return self.commit(reservation, len(keys), parent=parent, unknown=unknown)

    # --- gets

    def match(self, space: int, keys: Sequence[bytes]) -> int:
        """Pages of the longest held prefix."""
        count: int = self.call(Type.MATCH, [[space, b"".join(keys)]])[1][0][0]
        return count

    def acquire(
        self,
        space: int,
        keys: Sequence[bytes],
        *,
        request: bytes = b"request",
        lease: int = 0,
        ttl_ms: int = 10_000,
        wait_ms: int = 0,
        load_ms: int = 0,
    ) -> "Group":
        """The first reply to an acquire of one chain."""
        chains = [[space, b"".join(keys)]]
        body = self.call(Type.ACQUIRE, chains, request, lease, ttl_ms, wait_ms, load_ms)
        return Group(body)

    def group(self) -> "Group":
        """A further reply to an acquire."""
        frame = self.receive()
        assert frame.type == Type.ACQUIRE + REPLY
        return Group(frame.body)

    def release(self, *leases: int) -> int:
        count: int = self.call(Type.RELEASE, list(leases), [], [])[0]
        return count

    def release_pages(self, lease: int, space: int, keys: Sequence[bytes]) -> int:
        count: int = self.call(Type.RELEASE, [], [[lease, space, b"".join(keys)]], [])[0]
        return count

    # --- looking

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.call(Type.STATS)[0]
        return stats

    def gauge(self, name: str) -> int:
        value: int = self.stats()["gauges"][name]
        return value

    def counter(self, name: str) -> int:
        value: int = self.stats()["counters"][name]
        return value

    def inspect(self, what: str, namespace_id: bytes = b"", *, limit: int = 100) -> list[Any]:
        """All rows of a listing."""
        rows: list[Any] = []
        cursor = b""
        while True:
            page, cursor, _, _ = self.call(Type.INSPECT, what, namespace_id, cursor, limit)
            rows += page
            if not cursor:
                return rows


class Group:
    """One reply to an acquire."""

    def __init__(self, body: list[Any]) -> None:
        self.lease: int = body[0]
        self.state = AcquireState(body[1])
        self.tokens: int = body[2]
        self.counts = [row[0] for row in body[3]]
        self.runs: list[tuple[int, int, bytes]] = [(c, first, raw) for c, first, raw, _ in body[4]]

    def pages(self, chain_index: int = 0) -> dict[int, Descriptor]:
        """The pages that came, by their place in the chain."""
        return {
            first + at: descriptor
            for index, first, raw in self.runs
            if index == chain_index
            for at, descriptor in enumerate(descriptors(raw))
            if descriptor.size_bytes
        }


class RawLocal(Raw):
    """Over the unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(path)

    def send_frame(self, payload: bytes) -> None:
        try:
            self.socket.sendall(prefixed(payload))
        except (BrokenPipeError, ConnectionResetError) as exc:
            raise Closed from exc

    def receive_frame(self) -> bytes:
        (size,) = LENGTH.unpack(self._receive(LENGTH.size))
        return self._receive(size)

    def at_end(self) -> bool:
        """Whether the daemon closes the connection without another word; waits for it."""
        try:
            self._receive(1)
        except Closed:
            return True
        return False

    def close(self) -> None:
        self.socket.close()

    def _receive(self, size_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < size_bytes:
            try:
                part = self.socket.recv(size_bytes - len(parts))
            except ConnectionResetError as exc:
                raise Closed from exc
            if not part:
                raise Closed
            parts += part
        return bytes(parts)


class RawRemote(Raw):
    """Over zmq."""

    def __init__(self, url: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        super().__init__()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self.socket.connect(url)

    def send_frame(self, payload: bytes) -> None:
        self.socket.send(payload)

    def receive_frame(self) -> bytes:
        payload = self.socket.recv()
        assert isinstance(payload, bytes)
        return payload

    def close(self) -> None:
        self.socket.close()


def record(**fields: object) -> NamespaceRecord:
    """A namespace record of small pages."""
    base: dict[str, object] = {
        "model": "m",
        "dtype": "bfloat16",
        "page_tokens": 16,
        "page_bytes": PAGE_BYTES,
    }
    return NamespaceRecord(**{**base, **fields})  # type: ignore[arg-type]  # plain keywords


def descriptors(raw: bytes) -> list[Descriptor]:
    """Descriptors of a reply; size 0 where there is no page."""
    assert len(raw) % DESCRIPTOR_BYTES == 0
    return [
        Descriptor.decode(raw[at : at + DESCRIPTOR_BYTES])
        for at in range(0, len(raw), DESCRIPTOR_BYTES)
    ]


def refusal(call: Callable[[], object]) -> NexusError:
    """The error that a call is answered with."""
    try:
        call()
    except NexusError as exc:
        return exc
    raise AssertionError("it was not refused")


def is_status(statuses: bytes, status: PageStatus) -> bool:
    """Whether every page has this status."""
    return set(statuses) == {int(status)}


def offsets(raw: bytes) -> list[int]:
    """Where the pages of some descriptors lie."""
    return [row[2] for row in DESCRIPTOR_FORMAT.iter_unpack(raw)]


def length_of(size_bytes: int) -> bytes:
    """A local frame's length prefix."""
    return struct.pack("<I", size_bytes)
