"""A control plane with both tiers: the data plane is a `FakeWorker`, pages have bytes that follow
from their keys."""

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path
from random import Random

from nexuskv.control.ssd import Ssd
from nexuskv.dataplane.checksum import page_checksum
from nexuskv.namespace import namespace_id
from nexuskv.protocol import AcquireState, Type, encode
from nexuskv.types import FAR_PLACES, Descriptor, PageStatus
from nexuskv.worker.commands import Command
from tests.control.fake_worker import Disk, FakeWorker
from tests.control.raw import KIB, MIB, PAGE_BYTES, Group, RawLocal, record
from tests.control.rig import Rig

SMALL_SSD: dict[str, object] = {
    "ssd_dir": "a dict of the fake worker",
    "ssd_capacity": 16 * MIB,
    "ssd_file_bytes": MIB,  # 15 slots of 64 KiB
    "copy_group_bytes": 512 * KIB,
    "acquire_group_bytes": 256 * KIB,
    "acquire_window_bytes": MIB,
    "load_inflight_bytes": 512 * KIB,
}
ID = namespace_id(record().encode())


class TwoTiers(Rig):
    """A `Rig` with an ssd tier. `disk` may be that of a rig before."""

    fake: FakeWorker

    def __init__(
        self,
        folder: Path,
        *,
        disk: Disk | None = None,
        rng: Random | None = None,
        **settings: object,
    ) -> None:
        self.disk = Disk() if disk is None else disk
        self._rng = rng
        super().__init__(folder, **{**SMALL_SSD, **settings})
        self.turn()

    def make_worker(self, stack: ExitStack, chunks_to_be_had: int | None) -> FakeWorker:
        self.fake = FakeWorker(self.tier, self.disk, rng=self._rng)
        stack.callback(self.fake.close)
        return self.fake

    @property
    def ssd(self) -> Ssd:
        ssd = self.control.ssd
        assert ssd is not None
        return ssd

    # --- pages with bytes

    def put(
        self,
        client: RawLocal,
        space: int,
        keys: list[bytes],
        *,
        parent: bytes | None = None,
        namespace_id: bytes = ID,
    ) -> bytes:
        """Store pages with the bytes that are theirs; a status each."""
        reservation, statuses, lent = client.reserve(space, keys)
        if not reservation:
            return statuses
        sums = b""
        with open(self.tier.segments()[0].data_path, "r+b") as data:
            for key, descriptor in zip(keys, lent, strict=True):
                page = page_of(key)
                if descriptor.size_bytes:
                    data.seek(descriptor.offset_bytes)
                    data.write(page)
                sums += page_checksum(page, namespace_id, key).to_bytes(8, "little")
        return client.commit(reservation, len(keys), parent=parent, checksums=sums)

    def read(self, descriptor: Descriptor) -> bytes:
        """The bytes in a page's slot."""
        fd = os.open(self.tier.segments()[0].data_path, os.O_RDONLY)
        try:
            return os.pread(fd, descriptor.size_bytes, descriptor.offset_bytes)
        finally:
            os.close(fd)

    def check(self, keys: list[bytes], group: Group) -> int:
        """See that all pages of a reply have their bytes; how many there are."""
        pages = group.pages()
        for at, descriptor in pages.items():
            assert self.read(descriptor) == page_of(keys[at]), f"page {at} has other bytes"
        return len(pages)

    def get(self, client: RawLocal, space: int, keys: list[bytes], *, load_ms: int = 60_000) -> int:
        """Get pages group by group, giving each back at once; how many came with their bytes."""
        group = client.acquire(space, keys, request=os.urandom(8), load_ms=load_ms)
        count = 0
        while True:
            count += self.check(keys, group)
            if group.state is not AcquireState.MORE:
                break
            came = [keys[at] for at in group.pages()]
            if came:
                part = [group.lease, space, b"".join(came)]
                client.send_frame(encode(Type.RELEASE, 0, ([], [part], [])))
            group = client.group()
        if group.lease:
            client.release(group.lease)
        return count

    # --- looking

    def until_asked(self, kind: type[Command]) -> None:
        """Until the data plane holds a command of this kind."""
        self.until(lambda: self.fake.count(kind) > 0)

    def settle(self) -> None:
        """Until nothing is copied, loaded or dropped any more."""
        self.until(self._is_settled)

    def _is_settled(self) -> bool:
        ssd = self.ssd
        busy = ssd.copying.queued_bytes + len(ssd.loads) + ssd.drops.waiting_count
        return not busy and not self.fake.asked and not self.control.recovery.running

    def tiers_of(self, client: RawLocal, namespace_id: bytes = ID) -> dict[bytes, set[str]]:
        """Key → tiers of every page held."""
        return {row[0]: set(row[4]) for row in client.inspect("pages", namespace_id)}

    def abandon(self) -> None:
        """End as if everything were killed: nothing is looked at."""
        self.stop()
        self.close()

    def check_accounts(self) -> None:
        """What is counted is what a recount says, in both tiers."""
        self.run(self._recount)

    def _recount(self) -> None:
        ssd = self.ssd
        gauges = self.control.metrics.gauges()
        chunks = self.tier.chunks()
        sizes = {chunk.chunk_index: chunk.slot_bytes for chunk in chunks}
        for name in ("used", "writing", "quarantined", "unlinked"):
            counted = sum(getattr(chunk, name) * sizes[chunk.chunk_index] for chunk in chunks)
            assert gauges[f"{name}_bytes"] == counted, name
        near: set[int] = set()
        held: set[int] = set()
        for namespace in ssd.namespaces():
            far = copies = 0
            rows, _ = namespace.tree.inspect(None, 100_000)
            for row in rows:
                if row.slot >= FAR_PLACES:
                    far += 1
                    held.add(row.slot - FAR_PLACES)
                    continue
                near.add(row.slot)
                if ssd.copies.has(row.slot):
                    copies += 1
                    held.add(ssd.copies.far_of(row.slot) - FAR_PLACES)
            assert namespace.far_count == far
            assert namespace.copy_count == far + copies
        assert len(near) == sum(chunk.used for chunk in chunks)
        if ssd.state.startswith("failed"):
            return
        files = ssd.tier.files()
        assert len(held) == sum(file.used for file in files)
        ready = {
            int(slot)
            for file in files
            for slot, state in zip(*ssd.tier.slots_of_file(file.file_index)[1:], strict=True)
            if state == 2
        }
        assert held == ready
        for slot in held:
            where = (slot // ssd.tier.geometry.stride, slot % ssd.tier.geometry.stride)
            assert where in self.disk.rows, "a copy that counts has no row"


def page_of(key: bytes) -> bytes:
    """The bytes of the page with a key."""
    return hashlib.blake2b(key).digest() * (PAGE_BYTES // 64)


def is_all(statuses: bytes, status: PageStatus) -> bool:
    return bytes(statuses) == bytes([status]) * len(statuses)
