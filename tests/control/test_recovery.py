"""Recovery of host pages: what comes back, what does not, and what happens meanwhile."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from nexuskv.clock import ManualClock
from nexuskv.config import load_config
from nexuskv.control.counters import Counters
from nexuskv.control.earlier import EarlierProcesses
from nexuskv.control.events import EventStream
from nexuskv.control.host_recovery import HostRecords
from nexuskv.control.loop import Loop
from nexuskv.control.namespaces import Namespace, Namespaces
from nexuskv.control.pages import Pages
from nexuskv.control.recovery import Recovery
from nexuskv.control.room import Room
from nexuskv.control.waiting import Waiting
from nexuskv.index.leases import LeaseTable
from nexuskv.index.radix import RadixIndex
from nexuskv.namespace import NamespaceRecord, namespace_id
from nexuskv.tiers.host import HostTier
from nexuskv.tiers.namespace_table import NamespaceTable
from nexuskv.tiers.owner import Process
from nexuskv.tiers.record import ParentState
from nexuskv.types import Kind
from tests.control.raw import INCARNATION, KIB, MIB, chain, record

PAGE = 4 * KIB
SPACE = record(page_bytes=PAGE)
OTHER = record(page_bytes=PAGE, model="other")


class BusyClock(ManualClock):
    """Time passes with every look: a slice is over after one step."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()


class Run:
    """One run of the parts that a recovery joins, on a folder that runs share."""

    def __init__(self, folder: Path, *, busy: bool = False) -> None:
        clock = BusyClock() if busy else ManualClock()
        flags = {"host_memory": 4 * MIB, "chunk_bytes": MIB}
        config = load_config(env={}, flags=flags).config
        self.counters = Counters()
        self.loop = Loop(clock, self.counters)
        self.tier = HostTier.open(
            folder=folder,
            capacity_bytes=config.host_memory,
            chunk_bytes=config.chunk_bytes,
            huge_pages=False,
            incarnation=INCARNATION,
        )
        self.index = RadixIndex(fragments_max=config.fragments_max)
        self.table = NamespaceTable.open(folder, rows_max=config.namespaces_max)
        self.namespaces = Namespaces(
            index=self.index, table=self.table, chunk_bytes=MIB, namespaces_max=8
        )
        leases = LeaseTable(leases_max=8, slot_count=self.tier.slot_count)
        events = EventStream(incarnation=INCARNATION, counters=self.counters)
        pages = Pages(
            tier=self.tier,
            leases=leases,
            namespaces=self.namespaces,
            events=events,
            counters=self.counters,
        )
        room = Room(
            config=config,
            clock=clock,
            index=self.index,
            pages=pages,
            namespaces=self.namespaces,
            counters=self.counters,
        )
        self.earlier = EarlierProcesses(self.loop)
        self.on_record = HostRecords(
            tier=self.tier,
            earlier=self.earlier,
            counters=self.counters,
            on_memory=lambda: None,
        )
        self.recovery = Recovery(
            config=config,
            clock=clock,
            namespaces=self.namespaces,
            near=self.on_record,
            index=self.index,
            room=room,
            waiting=Waiting(config=config, clock=clock, pages=pages, counters=self.counters),
            events=events,
            counters=self.counters,
        )
        self._clock = clock

    def step(self) -> None:
        """One slice."""
        self.recovery.tick(self._clock.now())

    def recover(self) -> None:
        """All of it."""
        while self.recovery.running:
            self.step()

    def space(self, of: NamespaceRecord = SPACE) -> Namespace:
        return self.namespaces.open(of.encode(), tenant="default")

    def lend(self, count: int, *, pid: int = 1, start_time: int = 1) -> np.ndarray:
        """Slots of a writer."""
        while self.tier.free_count(PAGE) < count:
            if not self.tier.carve(PAGE):
                chunk_index = self.tier.chunk_to_populate()
                assert chunk_index is not None
                self.tier.populate_chunk(chunk_index)
                self.tier.chunk_populated(chunk_index)
        return self.tier.take(PAGE, count, pid=pid, start_time=start_time, session=1)

    def put(
        self,
        keys: list[bytes],
        *,
        of: NamespaceRecord = SPACE,
        parent: bytes | None = None,
        unknown: bool = False,
        epoch: int = 0,
        indexed: bool = False,
    ) -> list[int]:
        """Committed pages, on record; `indexed`: and in the index."""
        slots = self.lend(len(keys))
        if indexed:
            assert self.space(of).tree.insert(parent, b"".join(keys), slots.tolist()) == []
        state = ParentState.ROOT if parent is None else ParentState.KEY
        self.tier.publish(
            slots,
            namespace_id=namespace_id(of.encode()),
            keys=b"".join(keys),
            key_bytes=len(keys[0]),
            parent_state=ParentState.UNKNOWN if unknown else state,
            parent=parent or b"",
            epoch=epoch,
            checksums=np.zeros(len(keys), dtype=np.uint64),
        )
        found: list[int] = slots.tolist()
        return found

    def accounts_agree(self) -> bool:
        """Whether every slot that counts as used is a page of the index."""
        return self.tier.used_bytes == self.index.page_count * PAGE

    def close(self) -> None:
        self.earlier.close()
        self.table.close()
        self.loop.close()
        self.tier.close(unlink=False)


StartRun = Callable[..., Run]


@pytest.fixture
def start(shm_dir: Path) -> Iterator[StartRun]:
    """Start a run; the one before it ends, and its pages stay."""
    runs: list[Run] = []

    def start(**options: bool) -> Run:
        if runs:
            runs[-1].close()
        runs.append(Run(shm_dir / "s", **options))
        return runs[-1]

    yield start
    runs[-1].close()


@pytest.fixture
def first(start: StartRun) -> Run:
    """A first run that knows two namespaces."""
    run = start()
    run.space()
    run.space(OTHER)
    return run


def recovered(start: StartRun) -> Run:
    run = start()
    run.recover()
    return run


def matched(run: Run, keys: list[bytes], of: NamespaceRecord = SPACE) -> int:
    return run.space(of).tree.match(b"".join(keys))


def test_a_chain_on_record_is_matched_whole(start: StartRun, first: Run) -> None:
    keys = chain("a", 300)
    first.put(keys)
    run = recovered(start)
    assert matched(run, keys) == 300
    assert run.space().tree.fragment_count == 0
    assert run.accounts_agree()


def test_pages_keep_their_slots(start: StartRun, first: Run) -> None:
    keys = chain("a", 20)
    slots = first.put(keys)
    run = recovered(start)
    assert run.space().tree.find(b"".join(keys)).tolist() == slots


@pytest.mark.parametrize("step", [1, 7])
def test_records_in_any_order_become_one_chain(start: StartRun, first: Run, step: int) -> None:
    keys = chain("a", 210)
    order = np.random.default_rng(step).permutation(210 // step)
    for index in order.tolist():
        at = index * step
        first.put(keys[at : at + step], parent=keys[at - 1] if at else None)
    run = recovered(start)
    assert matched(run, keys) == 210
    assert run.space().tree.fragment_count == 0


def test_branches_are_whole(start: StartRun, first: Run) -> None:
    keys = chain("a", 40)
    branches = {at: chain(f"b{at}", 5) for at in range(0, 40, 3)}
    for at, branch in branches.items():
        first.put(branch, parent=keys[at])
    first.put(keys)
    run = recovered(start)
    assert [matched(run, [*keys[: at + 1], *branches[at]]) for at in branches] == [
        at + 6 for at in branches
    ]


def test_pages_of_two_namespaces_are_kept_apart(start: StartRun, first: Run) -> None:
    keys = chain("a", 10)
    first.put(keys[:4])
    first.put(keys, of=OTHER)
    run = recovered(start)
    assert (matched(run, keys), matched(run, keys, OTHER)) == (4, 10)


def test_pages_below_a_lost_one_wait_as_one_fragment(start: StartRun, first: Run) -> None:
    keys = chain("a", 30)
    slots = first.put(keys)
    first.tier.free(np.array(slots[10:11], dtype=np.uint32))
    run = recovered(start)
    assert matched(run, keys) == 10
    assert (run.space().tree.page_count, run.space().tree.fragment_count) == (29, 1)
    run.put(keys[10:11], parent=keys[9], indexed=True)
    assert matched(run, keys) == 30


def test_pages_of_an_unknown_parent_come_back(start: StartRun, first: Run) -> None:
    keys = chain("a", 6)
    first.put(keys, unknown=True)
    run = recovered(start)
    assert run.space().tree.page_count == 6
    assert matched(run, keys) == 6


def test_records_that_name_each_other_as_parents_do_no_harm(start: StartRun, first: Run) -> None:
    keys = chain("a", 9)
    for at, key in enumerate(keys):
        first.put([key], parent=keys[(at + 1) % 9] if at % 3 else keys[at])
    run = recovered(start)
    assert run.space().tree.page_count == 9
    assert run.accounts_agree()
    assert matched(run, keys[:1]) == 1


@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.STATE], ids=lambda kind: kind.name.lower())
def test_pages_that_stand_alone_come_back(start: StartRun, first: Run, kind: Kind) -> None:
    of = record(page_bytes=PAGE, kind=kind, window_pages=2 * (kind is Kind.WINDOW))
    first.space(of)
    keys = chain("a", 12)
    first.put(keys, of=of)
    assert matched(recovered(start), keys, of) == 12


def test_of_a_page_on_record_twice_one_stays(start: StartRun, first: Run) -> None:
    keys = chain("a", 8)
    first.put(keys)
    first.put(keys)
    run = recovered(start)
    assert run.space().tree.page_count == 8
    assert run.accounts_agree()
    assert run.counters.snapshot()["recovery_dropped_pages"] == 8


@pytest.mark.parametrize("epoch", [0, 1, 3], ids=["older", "before", "newer"])
def test_pages_of_another_epoch_are_freed(start: StartRun, first: Run, epoch: int) -> None:
    first.namespaces.save_epoch(first.space(), 2)
    first.put(chain("a", 8), epoch=epoch)
    first.put(chain("b", 3), epoch=2)
    run = recovered(start)
    assert run.space().tree.epoch == 2
    assert (matched(run, chain("a", 8)), matched(run, chain("b", 3))) == (0, 3)
    assert run.accounts_agree()


def test_pages_of_a_namespace_that_is_not_on_record_are_freed(start: StartRun, first: Run) -> None:
    first.put(chain("a", 8), of=record(page_bytes=PAGE, model="nobody"))
    first.put(chain("b", 3))
    run = recovered(start)
    assert run.index.page_count == 3
    assert run.accounts_agree()


@pytest.mark.parametrize("damage", ["lost", "flipped"])
def test_without_the_table_of_namespaces_pages_are_misses(
    start: StartRun, first: Run, damage: str
) -> None:
    first.put(chain("a", 8))
    path = first.tier.folder / "namespaces"
    if damage == "lost":
        path.unlink()
    else:
        raw = bytearray(path.read_bytes())
        raw[100] ^= 1
        path.write_bytes(raw)
    run = recovered(start)
    assert (run.index.page_count, run.tier.used_bytes) == (0, 0)


def test_pages_with_keys_of_another_length_are_freed(start: StartRun, first: Run) -> None:
    first.put(chain("a", 8, key_bytes=16))
    run = recovered(start)
    assert (run.index.page_count, run.tier.used_bytes) == (0, 0)


def test_namespaces_are_known_before_a_session_opens_them(start: StartRun, first: Run) -> None:
    first.put(chain("a", 8))
    run = start()
    assert set(run.namespaces.by_id) == {namespace_id(of.encode()) for of in (SPACE, OTHER)}


def test_a_namespace_is_not_forgotten_while_its_pages_are_on_their_way(
    start: StartRun, first: Run
) -> None:
    first.put(chain("a", 8))
    run = start(busy=True)
    run.step()
    for number in range(10):
        run.space(record(page_bytes=PAGE, model=f"many {number}"))
        if len(run.namespaces.by_id) == 8:
            break
    run.recover()
    assert matched(run, chain("a", 8)) == 8


# --- meanwhile


def test_recovery_goes_in_slices(start: StartRun, first: Run) -> None:
    first.put(chain("a", 600))
    run = start(busy=True)
    seen = {run.recovery.gauges()["recovery_pages_done"]}
    while run.recovery.running:
        assert run.recovery.next_due() is not None
        run.step()
        seen.add(run.recovery.gauges()["recovery_pages_done"])
    assert len(seen) > 2
    gauges = run.recovery.gauges()
    assert gauges["recovery_pages_done"] == gauges["recovery_pages_total"] > 600
    assert run.recovery.next_due() is None


def test_a_page_committed_meanwhile_wins(start: StartRun, first: Run) -> None:
    keys = chain("a", 8)
    first.put(keys)
    run = start(busy=True)
    fresh = run.put(keys, indexed=True)
    run.recover()
    assert run.space().tree.find(b"".join(keys)).tolist() == fresh
    assert run.accounts_agree()


@pytest.mark.parametrize("steps", range(4))
def test_a_page_removed_meanwhile_comes_back_neither_now_nor_later(
    start: StartRun, first: Run, steps: int
) -> None:
    keys = chain("a", 8)
    first.put(keys)
    run = start(busy=True)
    for _ in range(steps):
        run.step()
    remove(run, keys[2:4])
    run.recover()
    assert run.space().tree.page_count == 6
    assert run.accounts_agree()
    assert run.tier.unlinked_bytes == 0
    later = recovered(start)
    assert later.space().tree.page_count == 6
    assert matched(later, keys) == 2


@pytest.mark.parametrize("steps", range(4))
def test_pages_cleared_meanwhile_come_back_neither_now_nor_later(
    start: StartRun, first: Run, steps: int
) -> None:
    first.put(chain("a", 8))
    run = start(busy=True)
    for _ in range(steps):
        run.step()
    space = run.space()
    run.namespaces.save_epoch(space, 1)
    gone = space.tree.clear()
    run.tier.free(np.array(gone, dtype=np.uint32))
    run.recover()
    assert (space.tree.page_count, run.tier.used_bytes) == (0, 0)
    assert recovered(start).index.page_count == 0


def remove(run: Run, keys: list[bytes]) -> None:
    """What `remove` does."""
    blob = b"".join(keys)
    gone = run.space().tree.remove(blob)
    run.tier.free(np.array(gone, dtype=np.uint32))
    if run.recovery.running:
        pending, _ = run.on_record.forget(run.space(), blob)
        run.recovery.removed(pending)


# --- writers of the run before (I14)


@pytest.fixture
def writer() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is told to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    yield process
    process.communicate()


def start_time_of(process: subprocess.Popen[bytes]) -> int:
    found = Process.of(process.pid)
    assert found is not None
    return found.start_time


def test_slots_of_a_living_writer_are_kept_apart_until_it_ends(
    start: StartRun, first: Run, writer: subprocess.Popen[bytes]
) -> None:
    start_time = start_time_of(writer)
    first.lend(3, pid=writer.pid, start_time=start_time)
    run = recovered(start)
    assert run.tier.quarantined_bytes == 3 * PAGE
    writer.communicate()
    run.loop.soon(run.loop.stop)
    run.loop.run()
    assert (run.tier.quarantined_bytes, len(run.earlier)) == (0, 0)


def test_slots_of_a_dead_writer_are_free(
    start: StartRun, first: Run, writer: subprocess.Popen[bytes]
) -> None:
    start_time = start_time_of(writer)
    first.lend(3, pid=writer.pid, start_time=start_time)
    writer.communicate()
    assert recovered(start).tier.quarantined_bytes == 0


def test_a_process_that_has_only_the_writers_number_is_not_the_writer(
    start: StartRun, first: Run, writer: subprocess.Popen[bytes]
) -> None:
    start_time = start_time_of(writer)
    first.lend(3, pid=writer.pid, start_time=start_time - 1)
    assert recovered(start).tier.quarantined_bytes == 0


def test_slots_of_a_living_writer_stay_apart_over_a_third_run(
    start: StartRun, first: Run, writer: subprocess.Popen[bytes]
) -> None:
    start_time = start_time_of(writer)
    slots = first.lend(3, pid=writer.pid, start_time=start_time)
    recovered(start)
    run = recovered(start)
    assert run.tier.quarantined_bytes == 3 * PAGE
    assert not set(run.lend(700).tolist()) & set(slots.tolist())
