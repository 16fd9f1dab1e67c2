"""Two tiers as a whole: a model, a data plane that reorders, fails and dies, and restarts."""

import hashlib
import select
import shutil
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nexuskv.dataplane.checksum import page_checksum
from nexuskv.protocol import ERROR, AcquireState, Type, decode_reply, encode
from nexuskv.types import PageStatus
from nexuskv.worker.commands import (
    Command,
    CopyIn,
    CopyOut,
    DropCopies,
    MakeFile,
    SaveNamespace,
)
from tests.control.conftest import StartTiers
from tests.control.fake_worker import Disk
from tests.control.raw import MIB, PAGE_BYTES, Group, RawLocal, chain, is_status
from tests.control.two_tiers import ID, TwoTiers

KINDS: list[type[Command]] = [CopyIn, CopyOut, DropCopies, MakeFile, SaveNamespace]
kinds = st.sampled_from(KINDS)
CHAINS = [chain(f"chain {number}", 40) for number in range(4)]
lengths = st.integers(1, 40)
chains = st.integers(0, len(CHAINS) - 1)


# --- failure and recovery


def test_a_tier_that_fails_leaves_service_and_the_rest_serves_on(two: TwoTiers) -> None:
    client = two.local()
    space = client.open()
    for name in ("far", "near"):
        for at in range(0, 64, 16):
            keys = chain(name, 64)
            two.put(client, space, keys[at : at + 16], parent=keys[at - 1] if at else None)
            two.settle()
    assert two.gauges()["ssd_only_pages"] == 64
    two.run(lambda: two.fake.fail_ssd("the drive is gone"))
    two.until(lambda: two.control.metrics.gauges()["ssd_only_pages"] == 0)
    assert client.stats()["ssd"] == "failed: the drive is gone"
    assert client.match(space, chain("far", 64)) == 0
    assert two.get(client, space, chain("near", 64)) == 64
    assert is_status(two.put(client, space, chain("more", 30)), PageStatus.STORED)
    assert client.match(space, chain("more", 30)) == 30
    assert two.gauges()["copies_in_flight"] == 0


def test_an_acquire_that_waits_for_a_tier_that_fails_ends(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 4)
    two.put(client, space, keys)
    two.settle()
    two.put(client, space, chain("b", 64))
    two.settle()
    two.fake.held.add(CopyIn)
    assert client.acquire(space, keys, load_ms=60_000).state is AcquireState.MORE
    two.until_asked(CopyIn)
    two.run(lambda: two.fake.fail_ssd())
    two.turn()
    two.fake.failing.add(CopyIn)
    two.run(lambda: two.fake.release())
    assert client.group().state is AcquireState.DEADLINE
    two.until(lambda: two.control.metrics.gauges()["ssd_only_pages"] == 0)


@pytest.mark.parametrize("states", [("starting", "ready")])
def test_stats_name_the_state_of_the_ssd(two: TwoTiers, states: tuple[str, str]) -> None:
    client = two.local()
    assert client.stats()["ssd"] == states[1]
    two.run(lambda: two.fake.die())
    two.turn()
    assert client.stats()["ssd"] == states[0]


def test_an_ssd_that_cannot_be_opened_leaves_host_memory_to_serve(two: TwoTiers) -> None:
    client = two.local()
    two.run(lambda: two.fake.die())
    two.run(lambda: two.fake.start(ssd_error="the folder is another product's"))
    two.turn()
    assert client.stats()["ssd"] == "failed: the folder is another product's"
    assert is_status(two.put(client, client.open(), chain("a", 4)), PageStatus.STORED)


def test_pages_on_the_ssd_survive_the_loss_of_all_memory(
    start_tiers: StartTiers, shm_dir: Path
) -> None:
    disk = Disk()
    first = start_tiers(disk=disk)
    client = first.local()
    space, keys = client.open(), chain("a", 40)
    first.put(client, space, keys[:20])
    first.put(client, space, keys[20:], parent=keys[19])
    first.settle()
    first.abandon()
    second = start_tiers(disk=disk)
    second.settle()
    other = second.local()
    theirs = other.open()
    assert other.match(theirs, keys) == 40
    assert set(second.tiers_of(other)) == set(keys)
    assert second.get(other, theirs, keys) == 40
    assert second.gauges()["recovering"] == 0


def test_recovered_pages_can_be_evicted_and_their_slots_used(start_tiers: StartTiers) -> None:
    disk = Disk()
    first = start_tiers(disk=disk, ssd_capacity=2 * MIB)
    client = first.local()
    space = client.open()
    for name in "ab":
        first.put(client, space, chain(name, 15))
        first.settle()
    first.abandon()
    second = start_tiers(disk=disk, ssd_capacity=2 * MIB)
    second.settle()
    other = second.local()
    theirs = other.open()
    for name in "cd":
        second.put(other, theirs, chain(name, 15))
        second.settle()
    assert all("ssd" in second.tiers_of(other)[key] for key in chain("d", 15))


def test_rows_of_an_earlier_epoch_do_not_come_back(start_tiers: StartTiers) -> None:
    disk = Disk()
    first = start_tiers(disk=disk)
    client = first.local()
    space = client.open()
    first.put(client, space, chain("a", 4))
    first.settle()
    first.fake.refused.add(DropCopies)
    assert client.call(Type.CLEAR, space) == [4, 1]
    first.put(client, space, chain("b", 4))
    first.until(lambda: len(disk.rows) == 8)
    first.abandon()
    second = start_tiers(disk=disk)
    second.settle()
    other = second.local()
    theirs = other.open()
    assert other.match(theirs, chain("a", 4)) == 0
    assert other.match(theirs, chain("b", 4)) == 4
    assert len(disk.rows) == 4


def test_a_removal_during_recovery_is_answered_after_it(start_tiers: StartTiers) -> None:
    disk = Disk()
    first = start_tiers(disk=disk)
    client = first.local()
    space, keys = client.open(), chain("a", 12)
    first.put(client, space, keys)
    first.settle()
    first.abandon()
    second = start_tiers(disk=disk)
    second.settle()
    other = second.local()
    theirs = other.open()
    assert other.call(Type.REMOVE, theirs, b"".join(keys[6:])) == [6]
    assert len(disk.rows) == 6
    second.abandon()
    third = start_tiers(disk=disk)
    third.settle()
    assert set(third.tiers_of(third.local())) == set(keys[:6])


# --- the model


class TwoTierModel(RuleBasedStateMachine):
    """Pages have a version that is in their bytes. What may be served is known for each key."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="nexuskv-model-", dir="/dev/shm"))
        self.disk = Disk()
        self.version = 0
        self.may_be: dict[bytes, dict[int, int]] = {}  # key → version → step it was stored at
        self.steps = 0
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        folder = self.folder / str(self.starts)
        folder.mkdir()
        rng = Random(self.starts)
        self.two = TwoTiers(
            folder,
            disk=self.disk,
            rng=rng,
            ssd_capacity=3 * MIB,
            host_memory=2 * MIB,
            copy_queue_bytes=2 * MIB,
        )
        self.client, self.asking = self.two.local(), self.two.local()
        self.space, self.theirs = self.client.open(), self.asking.open()
        self.waiting: dict[int, tuple[str, int, list[bytes]]] = {}

    def teardown(self) -> None:
        try:
            self.heal()
        finally:
            self.two.close()
            shutil.rmtree(self.folder)

    # --- what clients do

    @rule(number=chains, start=st.integers(0, 30), count=lengths)
    def put(self, number: int, start: int, count: int) -> None:
        keys = CHAINS[number][start : start + count]
        parent = CHAINS[number][start - 1] if start else None
        self.steps += 1
        self.version += 1
        reservation, _, lent = self.client.reserve(self.space, keys)
        if not reservation:
            return
        sums = b""
        with open(self.two.tier.segments()[0].data_path, "r+b") as data:
            for key, descriptor in zip(keys, lent, strict=True):
                page = versioned(key, self.version)
                if descriptor.size_bytes:
                    data.seek(descriptor.offset_bytes)
                    data.write(page)
                sums += page_checksum(page, ID, key).to_bytes(8, "little")
        statuses = self.client.commit(reservation, len(keys), parent=parent, checksums=sums)
        for key, status in zip(keys, statuses, strict=True):
            if status == PageStatus.STORED:
                self.may_be.setdefault(key, {})[self.version] = self.steps

    @rule(number=chains, count=lengths, load=st.booleans())
    def get(self, number: int, count: int, load: bool) -> None:
        keys = CHAINS[number][:count]
        request = self.steps.to_bytes(8, "little")
        self.steps += 1
        load_ms = 60_000 if load else 0
        body = [[self.theirs, b"".join(keys)]], request, 0, 10_000, 0, load_ms
        self.waiting[self.asking.send(Type.ACQUIRE, *body)] = ("get", self.steps, keys)
        self.hear()

    @rule(number=chains)
    def fill(self, number: int) -> None:
        for start in range(0, 40, 20):
            self.put(number, start, 20)

    @rule(numbers=st.permutations(range(len(CHAINS))))
    def get_all(self, numbers: list[int]) -> None:
        for number in numbers:
            self.get(number, 40, load=True)

    @rule(number=chains, start=st.integers(0, 30), count=lengths)
    def remove(self, number: int, start: int, count: int) -> None:
        keys = CHAINS[number][start : start + count]
        self.steps += 1
        sent = self.asking.send(Type.REMOVE, self.theirs, b"".join(keys))
        self.waiting[sent] = ("gone", self.steps, keys)
        self.hear()

    @rule()
    def clear(self) -> None:
        self.steps += 1
        sent = self.asking.send(Type.CLEAR, self.theirs)
        self.waiting[sent] = ("gone", self.steps, [key for keys in CHAINS for key in keys])
        self.hear()

    # --- what the data plane does

    @rule(kind=kinds)
    def hold(self, kind: type[Command]) -> None:
        self.two.fake.held.add(kind)

    @rule(kind=kinds)
    def release(self, kind: type[Command]) -> None:
        self.two.run(lambda: self.two.fake.release(kind))
        self.hear()

    @rule(at=st.integers(0, 10))
    def answer_one(self, at: int) -> None:
        def answer() -> None:
            if self.two.fake.asked:
                self.two.fake.answer_now(at % len(self.two.fake.asked))

        self.two.run(answer)
        self.hear()

    @rule(kind=kinds, lying=st.booleans())
    def fail(self, kind: type[Command], lying: bool) -> None:
        self.two.fake.failing.add(kind)
        self.two.fake.lying = lying

    @rule()
    def calm(self) -> None:
        """For a while all goes well."""
        self.two.fake.failing.clear()
        if not self.two.fake.alive:
            self.two.run(self.two.fake.start)
        self.two.run(self.two.fake.release)
        self.hear()

    @rule(at=st.integers(0, 50))
    def damage(self, at: int) -> None:
        """A page on the ssd loses its bytes."""
        places = sorted(self.disk.pages)
        if places:
            self.disk.pages[places[at % len(places)]] = bytes(PAGE_BYTES)

    @precondition(lambda self: self.two.fake.alive)
    @rule()
    def die(self) -> None:
        self.two.run(self.two.fake.die)
        self.hear()

    @precondition(lambda self: not self.two.fake.alive)
    @rule()
    def revive(self) -> None:
        self.two.run(self.two.fake.start)
        self.hear()

    @rule(seconds=st.sampled_from([0.03, 1.1, 11.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.two.advance(seconds)
        self.hear()

    @rule()
    def lose_all_memory(self) -> None:
        """The machine restarts; what was asked and not answered may have happened or not."""
        self.two.abandon()
        self.start()
        self.two.settle()

    # --- what must hold

    def hear(self) -> None:
        """Take the replies that are there."""
        for _ in range(3):
            self.two.turn()
        while select.select([self.asking.socket], [], [], 0)[0]:
            self.take(self.asking)

    def take(self, client: RawLocal) -> None:
        frame = decode_reply(client.receive_frame())
        what, step, keys = self.waiting[frame.request_id]
        if frame.type == ERROR:
            del self.waiting[frame.request_id]
            return
        if what == "gone":
            del self.waiting[frame.request_id]
            for key in keys:
                stored = self.may_be.get(key, {})
                self.may_be[key] = {v: at for v, at in stored.items() if at > step}
            return
        group = Group(frame.body)
        for at, descriptor in group.pages().items():
            page = self.two.read(descriptor)
            versions = self.may_be.get(keys[at], {})
            assert any(page == versioned(keys[at], v) for v in versions), "another page's bytes"
        if group.state is AcquireState.MORE:
            came = b"".join(keys[at] for at in group.pages())
            part = [group.lease, self.theirs, came]
            client.send_frame(encode(Type.RELEASE, 0, ([], [part], [])))
            return
        del self.waiting[frame.request_id]
        if group.lease:
            client.send_frame(encode(Type.RELEASE, 0, ([group.lease], [], [])))

    @invariant()
    def the_daemon_is_whole(self) -> None:
        assert self.two.counter("internal_errors") == 0

    def heal(self) -> None:
        """All goes well from now on: everything ends, and the accounts are right."""
        fake = self.two.fake
        fake.failing.clear()
        if not fake.alive:
            self.two.run(fake.start)
        self.two.run(lambda: fake.release())
        self.hear()
        self.two.advance(70)
        self.two.advance(1)
        self.two.settle()
        self.hear()
        assert not self.waiting, "something was never answered"


def versioned(key: bytes, version: int) -> bytes:
    return hashlib.blake2b(key + version.to_bytes(8, "little")).digest() * (PAGE_BYTES // 64)


TestTwoTierModel = TwoTierModel.TestCase
TestTwoTierModel.settings = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
