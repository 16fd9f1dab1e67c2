"""A small scripted daemon on a real unix socket: speaks the protocol, keeps pages in real files.

It evicts nothing and expires nothing. Pages whose keys are in `far` are not in host memory until an
acquire loads them: they come in groups of `group_pages`, `ahead` groups before one is given back.
`script[kind]` replaces an answer: it gets the request and
returns the frames to send, without their lengths; None means the honest answer.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nexuskv.errors import LeaseExpired, NexusError
from nexuskv.namespace import NamespaceRecord, namespace_id
from nexuskv.protocol import (
    LENGTH,
    REPLY,
    AcquireState,
    Frame,
    Type,
    decode_request,
    encode,
    encode_error,
    prefixed,
)
from nexuskv.types import DESCRIPTOR_FORMAT, PageStatus

CHUNK_BYTES = 1 << 20
CAPACITY_BYTES = 4 << 20
HEADER_BYTES = 4096
RECORD_BYTES = 256
GENERATION_OFFSET = 64
TABLE_BYTES = HEADER_BYTES + CAPACITY_BYTES // 4096 * RECORD_BYTES
EMPTY = bytes(DESCRIPTOR_FORMAT.size)

Answer = Callable[[Frame], list[bytes] | None]


class Hang(Exception):
    """Raised by a script: say nothing, keep the connection."""


class HangUp(Exception):
    """Raised by a script: send these bytes, then close the connection."""

    def __init__(self, last: bytes = b"") -> None:
        super().__init__(last)
        self.last = last


@dataclass
class Page:
    slot: int
    size_bytes: int
    checksum: int
    generation: int


@dataclass
class FakeDaemon:
    """Listens at `folder/daemon.sock`; every connection has a thread that ends with it."""

    folder: Path
    incarnation: bytes = b"fake-run"
    lock: threading.RLock = field(default_factory=threading.RLock)
    script: dict[Type, Answer] = field(default_factory=dict)
    seen: list[tuple[Type, int, list[object]]] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    writable: bool = True
    version: int = 0
    far: set[bytes] = field(default_factory=set)
    group_pages: int = 2
    ahead: int = 1000

    def __post_init__(self) -> None:
        self.path = self.folder / "daemon.sock"
        self.url = f"unix://{self.path}"
        self.data, self.table = self.folder / "data", self.folder / "table"
        self.data.write_bytes(bytes(CAPACITY_BYTES))
        self.table.write_bytes(bytes(TABLE_BYTES))
        self.namespaces: list[NamespaceRecord] = []
        self.pages: dict[tuple[int, bytes], Page] = {}
        self.reservations: dict[int, tuple[int, bytes, list[int]]] = {}
        self.leases: dict[bytes, int] = {}
        self.next_slot = 0
        self.connections: list[socket.socket] = []
        self.streams: dict[socket.socket, list[bytes]] = {}  # groups that are still to be sent
        self.accepted = 0
        self.listen()

    def listen(self) -> None:
        self.path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen()
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def stop(self) -> None:
        """Vanish: no listener, every connection closed."""
        with contextlib.suppress(OSError):  # stopped before
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.path.unlink(missing_ok=True)
        with self.lock:
            connections, self.connections = self.connections, []
        for connection in connections:
            with contextlib.suppress(OSError):  # the client was first
                connection.shutdown(socket.SHUT_RDWR)

    def count(self, kind: Type) -> int:
        with self.lock:
            return sum(1 for seen, _, _ in self.seen if seen is kind)

    def kinds(self) -> list[Type]:
        with self.lock:
            return [kind for kind, _, _ in self.seen]

    def flip(self, key: bytes) -> None:
        """Change one byte of a stored page."""
        (page,) = [page for (_, held), page in self.pages.items() if held == key]
        with self.data.open("r+b") as file:
            file.seek(self._offset(page) + 5)
            (byte,) = file.read(1)
            file.seek(self._offset(page) + 5)
            file.write(bytes([byte ^ 1]))

    def reuse(self, key: bytes) -> None:
        """Give a page's slot to somebody else."""
        (page,) = [page for (_, held), page in self.pages.items() if held == key]
        self._write_generation(page.slot, page.size_bytes, page.generation + 1)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self.lock:
                self.connections.append(connection)
                self.accepted += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while True:
                    head = _receive(connection, LENGTH.size)
                    payload = _receive(connection, LENGTH.unpack(head)[0])
                    self._answer(connection, decode_request(payload))
            except HangUp as exc:
                connection.sendall(exc.last)
            except OSError:
                return

    def _answer(self, connection: socket.socket, frame: Frame) -> None:
        kind = Type(frame.type)
        with self.lock:
            self.seen.append((kind, frame.request_id, frame.body))
            scripted = self.script.get(kind)
        try:
            frames = scripted(frame) if scripted else None
        except Hang:
            return
        if frames is None:
            frames = [self.reply(frame)]
            frames = [*frames, *self._groups(connection, frame)]
        if not frame.request_id:
            frames = frames[1:]  # groups that a release made room for
        connection.sendall(b"".join(map(prefixed, frames)))

    def reply(self, frame: Frame) -> bytes:
        """What an honest daemon answers."""
        handler: Callable[..., list[object]] = getattr(self, "_" + Type(frame.type).name.lower())
        try:
            with self.lock:
                return encode(frame.type + REPLY, frame.request_id, handler(*frame.body))
        except NexusError as exc:
            return encode_error(frame.request_id, exc)

    def _hello(self, *_: object) -> list[object]:
        segment = [
            7,
            str(self.data),
            str(self.table),
            CAPACITY_BYTES,
            CHUNK_BYTES,
            TABLE_BYTES,
            HEADER_BYTES,
            RECORD_BYTES,
            GENERATION_OFFSET,
            b"i" * 16,
        ]
        return [self.incarnation, 1, "fake", self.limits, [segment], "shm", self.writable]

    def _open_namespace(self, record: bytes) -> list[object]:
        decoded = NamespaceRecord.decode(record)
        if decoded not in self.namespaces:
            self.namespaces.append(decoded)
        return [self.namespaces.index(decoded), namespace_id(record), 0]

    def _split(self, number: int, keys: bytes) -> list[bytes]:
        size = self.namespaces[number].key_bytes
        return [keys[at : at + size] for at in range(0, len(keys), size)]

    def _matched(self, number: int, keys: bytes) -> int:
        count = 0
        for key in self._split(number, keys):
            if (number, key) not in self.pages:
                break
            count += 1
        return count

    def _match(self, chains: list[tuple[int, bytes]]) -> list[object]:
        counts = [self._matched(number, keys) for number, keys in chains]
        tokens = [
            count * self.namespaces[number].page_tokens
            for count, (number, _) in zip(counts, chains, strict=True)
        ]
        rows = []
        for count, (number, keys) in zip(counts, chains, strict=True):
            far = sum(key in self.far for key in self._split(number, keys)[:count])
            rows.append([count, [count - far, far], 1000])
        return [min(tokens, default=0), rows]

    def _ping(self, payload: bytes) -> list[object]:
        return [payload]

    def descriptors(self, number: int, keys: bytes) -> bytes:
        found = [
            None if key in self.far else self.pages.get((number, key))
            for key in self._split(number, keys)
        ]
        return b"".join(EMPTY if page is None else self._descriptor(page) for page in found)

    def _acquire(
        self,
        chains: list[tuple[int, bytes]],
        request: bytes,
        lease: int,
        ttl: int,
        wait: int,
        load: int,
    ) -> list[object]:
        if lease and lease not in self.leases.values():
            raise LeaseExpired(f"lease {lease} is unknown")
        number = self.leases.setdefault(request, len(self.leases) + 1)
        tokens, matches = self._match(chains)
        runs = [
            [index, 0, self.descriptors(ns, keys), b""] for index, (ns, keys) in enumerate(chains)
        ]
        far = [key for ns, keys in chains for key in self._split(ns, keys) if key in self.far]
        state = AcquireState.COMPLETE
        if far:
            state = AcquireState.MORE if load else AcquireState.DEADLINE
        if not load and not self._near(chains):
            del self.leases[request]
            number = 0
        return [number, int(state), tokens, matches, runs]

    def _near(self, chains: list[tuple[int, bytes]]) -> bool:
        """Whether any page of some chains is in host memory."""
        return any(self.descriptors(*chain).strip(b"\0") for chain in chains)

    def _groups(self, connection: socket.socket, frame: Frame) -> list[bytes]:
        """Groups of loaded pages to send now: those of an acquire, or after a part came back."""
        with self.lock:
            waiting = self.streams.setdefault(connection, [])
            if frame.type == Type.RELEASE:
                return [waiting.pop(0)] if frame.body[1] and waiting else []
            if frame.type != Type.ACQUIRE or not frame.body[5] or frame.body[1] not in self.leases:
                return []
            waiting[:] = self._loaded(frame)
            return [waiting.pop(0) for _ in range(min(self.ahead, len(waiting)))]

    def _loaded(self, frame: Frame) -> list[bytes]:
        """Replies that bring the far pages of an acquire of one chain."""
        chains = frame.body[0]
        assert isinstance(chains, list)
        ((number, blob),) = chains
        keys = self._split(number, blob)
        places = [
            at for at, key in enumerate(keys) if key in self.far and (number, key) in self.pages
        ]
        lease = self.leases[frame.body[1]]  # type: ignore[index]  # bytes
        groups = [
            places[at : at + self.group_pages] for at in range(0, len(places), self.group_pages)
        ]
        self.far -= {keys[at] for at in places}
        return [
            encode(
                frame.type + REPLY,
                frame.request_id,
                (
                    lease,
                    int(AcquireState.COMPLETE if group is groups[-1] else AcquireState.MORE),
                    0,
                    (),
                    [(0, at, self.descriptors(number, keys[at]), b"") for at in group],
                ),
            )
            for group in groups
        ]

    def _renew(self, lease: int, ttl_ms: int) -> list[object]:
        if lease not in self.leases.values():
            raise LeaseExpired(f"lease {lease} is unknown")
        return [ttl_ms]

    def _release(self, leases: list[int], pages: object, corrupt: object) -> list[object]:
        self.leases = {r: n for r, n in self.leases.items() if n not in leases}
        return [len(leases)]

    def _reserve(self, number: int, keys: bytes) -> list[object]:
        size_bytes = self.namespaces[number].page_bytes
        statuses, rows, slots = bytearray(), [], []
        for key in self._split(number, keys):
            if (number, key) in self.pages:
                statuses.append(PageStatus.EXISTS)
                rows.append(EMPTY)
                slots.append(-1)
                continue
            page = Page(self.next_slot, size_bytes, 0, 1)
            if self._offset(page) + size_bytes > CAPACITY_BYTES:
                statuses.append(PageStatus.NO_SPACE)
                rows.append(EMPTY)
                slots.append(-1)
                continue
            self.next_slot += 1
            statuses.append(PageStatus.MISS)
            rows.append(self._descriptor(page))
            slots.append(page.slot)
        reservation = len(self.reservations) + 1 if any(s >= 0 for s in slots) else 0
        if reservation:
            self.reservations[reservation] = (number, keys, slots)
        return [reservation, bytes(statuses), b"".join(rows)]

    def _commit(
        self, reservation: int, state: int, parent: bytes, done: bytes, checksums: bytes
    ) -> list[object]:
        number, keys, slots = self.reservations.pop(reservation)
        size_bytes = self.namespaces[number].page_bytes
        statuses = bytearray()
        for index, key in enumerate(self._split(number, keys)):
            if not done[index]:
                statuses.append(PageStatus.DROPPED)
                continue
            (checksum,) = struct.unpack_from("<Q", checksums, 8 * index)
            page = Page(slots[index], size_bytes, checksum, 1)
            self._write_generation(page.slot, size_bytes, 1)
            self.pages[number, key] = page
            statuses.append(PageStatus.STORED)
        return [bytes(statuses)]

    def _abort(self, reservation: int) -> list[object]:
        return [1 if self.reservations.pop(reservation, None) else 0]

    def _pin(self, number: int, keys: bytes, ttl_ms: int) -> list[object]:
        return [sum((number, key) in self.pages for key in self._split(number, keys))]

    def _remove(self, number: int, keys: bytes) -> list[object]:
        found = [self.pages.pop((number, key), None) for key in self._split(number, keys)]
        return [sum(page is not None for page in found)]

    def _stats(self) -> list[object]:
        return [{"pages": len(self.pages)}]

    def _inspect(self, what: str, space: bytes, cursor: bytes, limit: int) -> list[object]:
        rows = [[key, page.slot] for (_, key), page in sorted(self.pages.items())]
        start = int(cursor or b"0")
        after = str(start + 2).encode() if start + 2 < len(rows) else b""
        return [rows[start : start + 2], after, self.incarnation, 0]

    def _offset(self, page: Page) -> int:
        slot_bytes = -(-page.size_bytes // 4096) * 4096
        per_chunk = CHUNK_BYTES // slot_bytes
        return page.slot // per_chunk * CHUNK_BYTES + page.slot % per_chunk * slot_bytes

    def _descriptor(self, page: Page) -> bytes:
        return DESCRIPTOR_FORMAT.pack(
            7, page.size_bytes, self._offset(page), page.checksum, page.generation
        )

    def _write_generation(self, slot: int, size_bytes: int, generation: int) -> None:
        slot_bytes = -(-size_bytes // 4096) * 4096
        per_chunk = CHUNK_BYTES // slot_bytes
        record = slot // per_chunk * (CHUNK_BYTES // 4096) + slot % per_chunk
        with self.table.open("r+b") as file:
            file.seek(HEADER_BYTES + record * RECORD_BYTES + GENERATION_OFFSET)
            file.write(struct.pack("<Q", generation))


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < size_bytes:
        part = connection.recv(size_bytes - len(parts))
        if not part:
            raise ConnectionError("closed")
        parts += part
    return bytes(parts)


def fd_count() -> int:
    return len(os.listdir("/proc/self/fd"))
