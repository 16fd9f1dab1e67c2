"""Segments for the tests of the data plane, in plain memory and in files, by the same rules."""

import mmap
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import pytest

from nexuskv.dataplane import _native, fallback
from nexuskv.dataplane.batch import Pages, Segment, SlotTable
from nexuskv.dataplane.checksum import page_checksum
from nexuskv.dataplane.shm import SegmentMap, SegmentSpec
from nexuskv.types import Descriptor

CHUNK_BYTES = 1 << 20
HEADER_BYTES = 4096
RECORD_BYTES = 256
GENERATION_OFFSET = 40
SEGMENT_ID = 7
NAMESPACE_ID = bytes(range(16))
GENERATION = 2**40 + 3


@pytest.fixture(params=[_native, fallback], ids=["native", "fallback"])
def moving(request: pytest.FixtureRequest) -> ModuleType:
    """The module that moves bytes: every test that asks for it holds for both."""
    module = request.param
    assert isinstance(module, ModuleType)
    return module


@dataclass
class Arena:
    """`page_count` slots of one page size in a segment, filled with random committed pages."""

    data: mmap.mmap
    table: mmap.mmap
    page_bytes: int
    key_bytes: int
    payloads: list[bytes] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    descriptors: list[Descriptor] = field(default_factory=list)

    @property
    def slot_bytes(self) -> int:
        return -(-self.page_bytes // 4096) * 4096

    def fill(self, page_count: int, seed: int = 1) -> None:
        rng = random.Random(seed)
        for at in range(page_count):
            self.keys.append(rng.randbytes(self.key_bytes))
            self.payloads.append(rng.randbytes(self.page_bytes))
            self.descriptors.append(self._commit(at, self.payloads[at], self.keys[at]))

    def _commit(self, at: int, payload: bytes, key: bytes) -> Descriptor:
        chunk, index = divmod(at, CHUNK_BYTES // self.slot_bytes)
        offset = chunk * CHUNK_BYTES + index * self.slot_bytes
        self.data[offset : offset + len(payload)] = payload
        checksum = page_checksum(payload, NAMESPACE_ID, key)
        descriptor = Descriptor(SEGMENT_ID, offset, len(payload), checksum, GENERATION + at)
        self.set_generation(descriptor, GENERATION + at)
        return descriptor

    def set_generation(self, descriptor: Descriptor, generation: int) -> None:
        chunk, inside = divmod(descriptor.offset_bytes, CHUNK_BYTES)
        slot = chunk * (CHUNK_BYTES // 4096) + inside // self.slot_bytes
        place = HEADER_BYTES + slot * RECORD_BYTES + GENERATION_OFFSET
        struct.pack_into("<Q", self.table, place, generation)

    def flip(self, at: int, byte: int = 0) -> None:
        """Flip one bit of a resident page."""
        self.data[self.descriptors[at].offset_bytes + byte] ^= 1

    def segment(self, module: ModuleType) -> Segment:
        return Segment(SEGMENT_ID, module.address_of(self.data), len(self.data))

    def slots(self, module: ModuleType) -> SlotTable:
        address = module.address_of(self.table)
        geometry = (CHUNK_BYTES, HEADER_BYTES, RECORD_BYTES, GENERATION_OFFSET)
        return SlotTable(address, len(self.table), *geometry)

    def pages(self, descriptors: Sequence[Descriptor | None] | None = None) -> Pages:
        """The batch of all pages, or of these in place of them; None names no page."""
        chosen = self.descriptors if descriptors is None else descriptors
        joined = b"".join(d.encode() if d else bytes(32) for d in chosen)
        return Pages(joined, b"".join(self.keys[: len(chosen)]), self.key_bytes, NAMESPACE_ID)

    def buffers(self) -> list[bytearray]:
        """A destination for each page."""
        return [bytearray(self.page_bytes) for _ in self.descriptors]

    def other(self, at: int, **changes: int) -> Descriptor:
        """Page `at`'s descriptor with fields changed."""
        return replace(self.descriptors[at], **changes)


MakeArena = Callable[..., Arena]


@pytest.fixture
def make_arena() -> MakeArena:
    """Make an arena: `make_arena(page_bytes, page_count, key_bytes=32)`."""

    def make(page_bytes: int = 8192, page_count: int = 4, key_bytes: int = 32) -> Arena:
        slots_a_chunk = CHUNK_BYTES // (-(-page_bytes // 4096) * 4096)
        chunks = max(1, -(-page_count // slots_a_chunk))
        table_bytes = HEADER_BYTES + chunks * (CHUNK_BYTES // 4096) * RECORD_BYTES
        arena = Arena(
            mmap.mmap(-1, chunks * CHUNK_BYTES), mmap.mmap(-1, table_bytes), page_bytes, key_bytes
        )
        arena.fill(page_count)
        return arena

    return make


@dataclass
class SegmentFiles:
    """An arena in two files, and the spec that a daemon would tell a client."""

    spec: SegmentSpec
    arena: Arena

    def open(self, *, writable: bool = False) -> SegmentMap:
        return SegmentMap.open(self.spec, writable=writable)


MakeFiles = Callable[..., SegmentFiles]


@pytest.fixture
def make_files(shm_dir: Path) -> Iterator[MakeFiles]:
    """Make segment files: `make_files(page_bytes, page_count)`; closed and gone afterwards."""
    opened: list[mmap.mmap] = []

    def create(path: Path, size_bytes: int) -> mmap.mmap:
        path.write_bytes(b"")
        os.truncate(path, size_bytes)
        with path.open("r+b") as file:
            opened.append(mmap.mmap(file.fileno(), size_bytes))
        return opened[-1]

    def make(page_bytes: int = 8192, page_count: int = 4, key_bytes: int = 32) -> SegmentFiles:
        slots_a_chunk = CHUNK_BYTES // (-(-page_bytes // 4096) * 4096)
        chunks = max(1, -(-page_count // slots_a_chunk))
        table_bytes = HEADER_BYTES + chunks * (CHUNK_BYTES // 4096) * RECORD_BYTES
        spec = SegmentSpec(
            segment_id=SEGMENT_ID,
            data_path=str(shm_dir / "data"),
            table_path=str(shm_dir / "table"),
            capacity_bytes=chunks * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            header_bytes=HEADER_BYTES,
            record_bytes=RECORD_BYTES,
            generation_offset=GENERATION_OFFSET,
            table_bytes=table_bytes,
        )
        data = create(Path(spec.data_path), spec.capacity_bytes)
        arena = Arena(data, create(Path(spec.table_path), table_bytes), page_bytes, key_bytes)
        arena.fill(page_count)
        return SegmentFiles(spec, arena)

    yield make
    for mapping in opened:
        mapping.close()
