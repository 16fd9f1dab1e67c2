"""A control plane in a thread of the test, and clients that speak its protocol byte by byte.

Time stands still unless a test moves it. `Rig.close` fails when something of a session was left.
"""

import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import zmq

from nexuskv.clock import ManualClock
from nexuskv.config import load_config
from nexuskv.control.control import Control
from nexuskv.errors import NexusError, OutOfSpace
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
from nexuskv.tiers.host import HostTier
from nexuskv.tiers.usage import ChunkRow, ChunkSlots
from nexuskv.types import DESCRIPTOR_BYTES, DESCRIPTOR_FORMAT, Descriptor, PageStatus
from nexuskv.worker.host import HostTools
from nexuskv.worker.worker import Worker

KIB = 1024
MIB = 1024 * KIB
PAGE_BYTES = 64 * KIB
PATIENCE_S = 30.0
INCARNATION = bytes(range(8))

T = TypeVar("T")

SMALL: dict[str, object] = {
    "host_memory": 4 * MIB,
    "chunk_bytes": MIB,
    "message_bytes_max": MIB,
    "send_backlog_bytes": MIB,
    "lease_margin_s": 0.5,
}


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
    ) -> "Group":
        """The first reply to an acquire of one chain."""
        body = self.call(Type.ACQUIRE, [[space, b"".join(keys)]], request, lease, ttl_ms, wait_ms)
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


class Tools(HostTools):
    """The worker's hands, on a filesystem that may be full from some chunk on."""

    chunks_to_be_had: int | None = None

    def populate_chunk(self, chunk_index: int) -> None:
        if self.chunks_to_be_had is not None and chunk_index >= self.chunks_to_be_had:
            raise OutOfSpace("the filesystem is full")
        super().populate_chunk(chunk_index)


class Rig:
    """One control plane on a folder, its loop in a thread. `close` stops it."""

    def __init__(self, folder: Path, **settings: object) -> None:
        chunks_to_be_had = settings.pop("chunks_to_be_had", None)
        assert chunks_to_be_had is None or isinstance(chunks_to_be_had, int)
        listen = f"unix://{folder}/d.sock,tcp://127.0.0.1:0"
        flags = {**SMALL, "listen": listen, "segment_dir": folder / "s", **settings}
        flags["segment_dir"] = str(flags["segment_dir"])
        self.config = load_config(env={}, flags=flags).config
        self.clock = ManualClock(1000.0)
        self._stack = ExitStack()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._clients: list[Raw] = []
        with ExitStack() as stack:
            self.tier = HostTier.open(
                folder=Path(self.config.segment_dir),
                capacity_bytes=self.config.host_memory,
                chunk_bytes=self.config.chunk_bytes,
                huge_pages=False,
                incarnation=INCARNATION,
            )
            stack.callback(self.tier.close, unlink=True)
            tools = Tools.open(self.tier)
            tools.chunks_to_be_had = chunks_to_be_had
            stack.callback(tools.close)
            self.worker = Worker(queue_max=self.config.worker_queue_max, run=tools)
            stack.callback(self.worker.close, PATIENCE_S)
            self.control = Control(
                config=self.config,
                clock=self.clock,
                tier=self.tier,
                worker=self.worker,
                incarnation=INCARNATION,
                native=tools.native,
            )
            stack.callback(self.control.close)
            self.worker.start()
            self.control.open(on_ready=lambda: None)
            self._thread = threading.Thread(target=self.control.run, name="control")
            self._thread.start()
            stack.callback(self.stop)
            self.until(lambda: self.tier.chunk_to_populate() is None)
            self._stack = stack.pop_all()

    # --- clients

    def local(self, *, tenant: str | None = "default") -> RawLocal:
        """A local client, greeted unless `tenant` is None."""
        client = RawLocal(self.control.urls[0].removeprefix("unix://"))
        self._clients.append(client)
        if tenant is not None:
            client.hello(tenant=tenant)
        return client

    def remote(self, *, tenant: str | None = "default") -> RawRemote:
        """A remote client, greeted unless `tenant` is None."""
        if self._context is None:
            self._context = zmq.Context(1)
        client = RawRemote(self.control.urls[1], self._context)
        self._clients.append(client)
        if tenant is not None:
            client.hello(tenant=tenant)
        return client

    def any(self, carrier: str, *, tenant: str | None = "default") -> Raw:
        """A client over the carrier of this name."""
        return self.local(tenant=tenant) if carrier == "local" else self.remote(tenant=tenant)

    # --- the daemon from within

    def run(self, function: Callable[[], T]) -> T:
        """Run a function on the loop."""
        return self.control.loop.call(function, timeout_s=PATIENCE_S)

    def turn(self) -> None:
        """Let the loop turn, with everything that is due."""
        self.run(lambda: None)
        self.run(lambda: None)

    def until(self, condition: Callable[[], bool]) -> None:
        """Turn the loop until something is so; it must become so."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.run(condition):
            assert time.monotonic() < deadline_s, "it never came to be"

    def advance(self, duration_s: float) -> None:
        """Move the clock and let what is due happen."""
        self.clock.advance(duration_s)
        self.turn()

    @contextmanager
    def blocked(self) -> Generator[None]:
        """The loop does not turn inside this block."""
        entered, leave = threading.Event(), threading.Event()

        def block() -> None:
            entered.set()
            leave.wait(PATIENCE_S)

        waiting = threading.Thread(target=lambda: self.run(block))
        waiting.start()
        entered.wait(PATIENCE_S)
        try:
            yield
        finally:
            leave.set()
            waiting.join()

    def gauges(self) -> dict[str, int]:
        return self.run(self.control.metrics.gauges)

    def counter(self, name: str) -> int:
        return self.run(lambda: self.control.counters.snapshot()[name])

    def stop(self) -> None:
        """End the loop; the control plane stays open."""
        self.control.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """Close the clients, see that nothing of them is left, and stop."""
        for client in self._clients:
            client.close()
        try:
            if self._thread.is_alive():
                self.check_accounts()
                assert self.counter("internal_errors") == 0
        finally:
            self._stack.close()
            if self._context is not None:
                self._context.term()

    def _look_at_all(self) -> tuple[dict[str, int], list[ChunkRow], list[ChunkSlots]]:
        """In one turn of the loop: closing clients change the accounts between turns."""
        chunks = self.tier.chunks()
        slots = [self.tier.slots_of_chunk(chunk.chunk_index) for chunk in chunks]
        return self.control.metrics.gauges(), chunks, slots

    def check_accounts(self) -> None:
        """What the gauges say is what a recount of every slot says."""
        gauges, chunks, slots = self.run(self._look_at_all)
        sizes = {c.chunk_index: c.slot_bytes for c in chunks}
        for name in ("used", "writing", "quarantined", "unlinked"):
            counted = sum(getattr(c, name) * sizes[c.chunk_index] for c in chunks)
            assert gauges[f"{name}_bytes"] == counted, name
        taken = sum(len(each.slots) for each in slots)
        assert taken == sum(c.used + c.writing + c.quarantined + c.unlinked for c in chunks)
        assert gauges["pages"] == sum(c.used for c in chunks)
        assert gauges["unlinked_slots"] == sum(c.unlinked for c in chunks)


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
