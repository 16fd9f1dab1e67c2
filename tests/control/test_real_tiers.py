"""Control on a real ssd folder: the worker's own engine, files and catalogue; faults behind it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nexuskv.protocol import Type
from nexuskv.serve import worker_settings
from nexuskv.types import PageStatus
from nexuskv.worker.ssd import Ssd
from tests.control.raw import PATIENCE_S, RawLocal, chain, is_status
from tests.control.rig import Memory
from tests.control.two_tiers import ID, TwoTiers, page_of
from tests.worker.inprocess import InProcessWorker

LONG = chain("long", 150)  # host memory holds 64 pages


class RealTiers(TwoTiers):
    """Both tiers for real; the worker is a thread."""

    def make_worker(self, stack: ExitStack, chunks_to_be_had: int | None) -> Any:
        settings = worker_settings(self.config, self.tier)
        memory = Memory.open(settings)
        stack.callback(memory.close)
        self.inner = InProcessWorker(
            queue_max=self.config.worker_queue_max,
            memory=memory,
            open_ssd=partial(Ssd.open, settings),
            ssd_threads=2,
            ssd_errors_max=self.config.ssd_errors_max,
        )
        stack.callback(self.inner.close, PATIENCE_S)
        return self.inner

    def until_ready(self) -> None:
        self.until(lambda: self.ssd.state == "ready" and not self.control.recovery.running)

    def settle(self) -> None:
        self.until(self._is_quiet)

    def _is_quiet(self) -> bool:
        ssd = self.ssd
        if ssd.state.startswith("failed"):
            return not len(ssd.loads)
        busy = ssd.copying.queued_bytes + len(ssd.loads) + ssd.drops.waiting_count
        return not busy and not self.control.recovery.running

    def check_accounts(self) -> None:
        """The rows are in a real catalogue: only what control counts is looked at."""


StartReal = Callable[..., RealTiers]


@pytest.fixture
def start_real(shm_dir: Path, tmp_path: Path) -> Iterator[StartReal]:
    started: list[RealTiers] = []

    def start(**settings: Any) -> RealTiers:
        folder = shm_dir / f"real {len(started)}"
        folder.mkdir()
        rig = RealTiers(folder, ssd_dir=str(tmp_path / "ssd"), **settings)
        started.append(rig)
        rig.until(lambda: rig.ssd.state != "starting")
        return rig

    yield start
    for rig in started:
        rig.close()


@pytest.fixture
def real(start_real: StartReal) -> RealTiers:
    rig = start_real()
    rig.until_ready()
    return rig


def put_long(real: RealTiers, client: RawLocal, space: int) -> None:
    for at in range(0, len(LONG), 15):
        real.put(client, space, LONG[at : at + 15], parent=LONG[at - 1] if at else None)
        real.settle()


def slabs(folder: Path) -> list[Path]:
    return sorted((folder / "ssd" / "slabs").rglob("slab-*"))


def flip(folder: Path, key: bytes) -> None:
    """Damage the page of a key wherever it lies on disk."""
    page = page_of(key)
    for path in slabs(folder):
        raw = path.read_bytes()
        at = raw.find(page)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 1000)
                file.write(bytes([page[1000] ^ 1]))
            return
    raise AssertionError("the page is on no disk")


def test_a_chain_longer_than_memory_comes_back_from_disk(real: RealTiers) -> None:
    client = real.local()
    space = client.open()
    put_long(real, client, space)
    assert client.match(space, LONG) == len(LONG)
    assert real.get(client, space, LONG) == len(LONG)
    assert real.counter("loads_done") >= len(LONG) - 64


def test_pages_are_there_after_memory_is_lost(start_real: StartReal) -> None:
    first = start_real()
    client = first.local()
    space = client.open()
    put_long(first, client, space)
    first.abandon()
    second = start_real()
    second.until_ready()
    other = second.local()
    theirs = other.open()
    assert other.match(theirs, LONG) == len(LONG)
    assert second.get(other, theirs, LONG) == len(LONG)


@pytest.mark.parametrize("how", [Type.CLEAR, Type.REMOVE])
def test_what_was_taken_away_does_not_come_back(start_real: StartReal, how: Type) -> None:
    first = start_real()
    client = first.local()
    space = client.open()
    put_long(first, client, space)
    body = [b"".join(LONG)] if how is Type.REMOVE else []
    assert client.call(how, space, *body)[0] == len(LONG)
    first.abandon()
    second = start_real()
    second.until_ready()
    assert second.local().inspect("namespaces")[0][2] == 0


def test_a_page_damaged_on_disk_is_a_miss_and_counted(real: RealTiers, tmp_path: Path) -> None:
    client = real.local()
    space = client.open()
    put_long(real, client, space)
    tiers = real.tiers_of(client)
    bad = next(at for at, key in enumerate(LONG) if tiers[key] == {"ssd"})
    flip(tmp_path, LONG[bad])
    assert real.get(client, space, LONG) == len(LONG) - 1
    assert real.counter("loads_corrupt") == 1
    assert client.match(space, LONG) == bad


def test_verify_finds_what_is_damaged_on_disk(real: RealTiers, tmp_path: Path) -> None:
    client = real.local()
    space = client.open()
    put_long(real, client, space)
    flip(tmp_path, LONG[3])
    (statuses,) = client.call(Type.VERIFY, ID, b"".join(LONG), "ssd")
    assert statuses.count(PageStatus.CORRUPT) == 1
    assert statuses.count(PageStatus.HIT) == len(LONG) - 1


def test_files_truncated_behind_its_back_end_the_tier_not_the_daemon(
    start_real: StartReal, tmp_path: Path
) -> None:
    real = start_real(ssd_errors_max=3)
    real.until_ready()
    client = real.local()
    space = client.open()
    put_long(real, client, space)
    for path in slabs(tmp_path):
        with path.open("r+b") as file:
            file.truncate(4096)
    assert real.get(client, space, LONG) < len(LONG)
    real.until(lambda: real.ssd.state.startswith("failed"))
    real.until(lambda: real.control.metrics.gauges()["ssd_only_pages"] == 0)
    fresh = chain("fresh", 30)
    assert is_status(real.put(client, space, fresh), PageStatus.STORED)
    assert real.get(client, space, fresh) == 30


def test_a_folder_removed_while_serving_costs_the_tier_only(
    start_real: StartReal, tmp_path: Path
) -> None:
    real = start_real(ssd_errors_max=3)
    real.until_ready()
    client = real.local()
    space = client.open()
    put_long(real, client, space)
    shutil.rmtree(tmp_path / "ssd")
    for number in range(12):
        keys = chain(f"more {number}", 15)
        assert is_status(real.put(client, space, keys), PageStatus.STORED)
        real.settle()
        assert real.get(client, space, keys) == 15


def test_a_folder_of_another_product_is_refused_and_host_memory_serves(
    start_real: StartReal, tmp_path: Path
) -> None:
    (tmp_path / "ssd").mkdir()
    (tmp_path / "ssd" / "somebody's file").write_text("theirs")
    real = start_real()
    assert real.ssd.state.startswith("failed: ")
    client = real.local()
    space = client.open()
    assert is_status(real.put(client, space, LONG[:15]), PageStatus.STORED)
    assert real.get(client, space, LONG[:15]) == 15


def test_pages_of_two_sizes_share_the_ssd(start_real: StartReal) -> None:
    real = start_real(ssd_capacity=6 * 2**20)
    real.until_ready()
    client = real.local()
    small, big = client.open(), client.open(model="big", page_bytes=256 * 1024)
    put_long(real, client, small)
    for number in range(20):
        assert client.put(big, chain(f"big {number}", 3))
        real.settle()
    gauges = real.gauges()
    assert gauges["ssd_file_bytes"] <= 6 * 2**20
    assert all(row[-1] for row in client.inspect("namespaces"))
