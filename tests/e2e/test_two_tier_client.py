"""A client of a daemon whose host memory is far smaller than what it holds: the rest is on disk."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.tools.bench.ssd_pages import check_ssd, wait_copied
from nexuskv.tools.cli import FAILED, OK, main
from nexuskv.tools.daemon_process import DaemonProcess
from nexuskv.types import PageStatus
from tests.e2e.cache import (
    KIB,
    MIB,
    chain,
    open_space,
    open_store,
    page,
    pages,
    put,
    wait_populated,
)
from tests.e2e.conftest import StartDaemon

pytestmark = pytest.mark.e2e

Capture = pytest.CaptureFixture[str]
PAGE_BYTES = 64 * KIB
PIECE = 64  # pages that are put at a time: 4 MiB
COUNT = 1024  # 64 MiB, twice the host tier
LONG = chain("long", COUNT)
CHAINS = [chain(f"chain {n}", PIECE) for n in range(COUNT // PIECE)]
OLD, NEW = CHAINS[0], CHAINS[-1]


@pytest.fixture
def daemon(start_daemon: StartDaemon, tmp_path: Path) -> DaemonProcess:
    return start_daemon(
        host_memory="32MiB",
        chunk_bytes="4MiB",
        ssd_dir=tmp_path / "ssd",
        ssd_capacity="256MiB",
        ssd_file_bytes="16MiB",
        acquire_window_bytes="8MiB",
        acquire_group_bytes="1MiB",
    )


@pytest.fixture
def store(daemon: DaemonProcess) -> Iterator[Store]:
    with open_store(daemon.url, acquire_window_bytes=8 * MIB, acquire_group_bytes=MIB) as opened:
        check_ssd(opened)
        wait_populated(opened)
        yield opened


@pytest.fixture
def space(store: Store) -> Space:
    """Chains that are all on disk, the new ones also in host memory."""
    found = open_space(store, page_bytes=PAGE_BYTES)
    for at, keys in enumerate(CHAINS, 1):
        assert all(put(found, keys))
        wait_copied(store, at * PIECE)
    return found


def far_count(space: Space, keys: list[bytes]) -> int:
    match = space.match(keys)
    assert match.page_count == len(keys)
    return match.tier_counts["ssd"]


def test_a_chain_larger_than_host_memory_is_got_whole(store: Store) -> None:
    space = open_space(store, page_bytes=PAGE_BYTES)
    for at in range(0, COUNT, PIECE):
        assert all(put(space, LONG[at : at + PIECE], parent=LONG[at - 1] if at else None))
        wait_copied(store, at + PIECE)
    assert far_count(space, LONG) > COUNT // 4
    into = [bytearray(PAGE_BYTES) for _ in LONG]
    assert set(space.get(LONG, into=into)) == {PageStatus.HIT}
    assert into == pages(LONG, PAGE_BYTES)


def test_pages_on_disk_are_misses_for_who_may_not_load(space: Space) -> None:
    assert (far_count(space, OLD), far_count(space, NEW)) == (PIECE, 0)
    into = [bytearray(PAGE_BYTES) for _ in OLD]
    assert set(space.get(OLD, into=into, load=False)) == {PageStatus.MISS}
    assert set(space.get(NEW, into=into, load=False)) == {PageStatus.HIT}


def test_a_prefetch_brings_pages_into_host_memory(space: Space) -> None:
    assert far_count(space, OLD) == PIECE
    assert space.prefetch(OLD) == PIECE
    assert far_count(space, OLD) == 0


def test_loading_is_estimated_to_take_time(space: Space) -> None:
    into = [bytearray(PAGE_BYTES) for _ in NEW]
    assert set(space.get(NEW, into=into)) == {PageStatus.HIT}  # how fast copies are is known now
    assert far_count(space, OLD) == PIECE
    assert space.match(OLD).load_s > space.match(NEW).load_s > 0


def test_a_view_loads_what_it_shows(space: Space) -> None:
    assert far_count(space, OLD) == PIECE
    with space.view(OLD, check=True) as view:
        assert [bytes(p) for p in view.pages if p is not None] == pages(OLD, PAGE_BYTES)
    assert view.held


def test_a_lease_on_pages_on_disk_is_read_elsewhere(
    daemon: DaemonProcess, store: Store, space: Space
) -> None:
    assert far_count(space, OLD) == PIECE
    lease = store.acquire([(space, OLD)], request_id=b"far", ttl_s=30)
    assert lease
    assert lease.token_count == PIECE * 16
    into = [bytearray(PAGE_BYTES) for _ in OLD]
    with open_store(daemon.url) as other:
        theirs = open_space(other, page_bytes=PAGE_BYTES)
        assert set(other.lease(lease.token).get(theirs, OLD, into=into)) == {PageStatus.HIT}
    assert into == pages(OLD, PAGE_BYTES)


def _verify(
    capsys: Capture, daemon: DaemonProcess, *argv: str
) -> tuple[int, dict[str, dict[str, int]]]:
    capsys.readouterr()
    code = main(["verify", "--json", "--url", daemon.url, *argv])
    rows = json.loads(capsys.readouterr().out)["tiers"]
    return code, {row["tier"]: row for row in rows}


def test_verify_reads_every_page_in_both_tiers(
    daemon: DaemonProcess, space: Space, capsys: Capture
) -> None:
    near = COUNT - sum(far_count(space, keys) for keys in CHAINS)
    code, tiers = _verify(capsys, daemon)
    assert code == OK
    assert (tiers["ssd"]["good"], tiers["ssd"]["bytes"]) == (COUNT, COUNT * PAGE_BYTES)
    assert tiers["host"]["good"] == near


def test_verify_drops_a_page_that_is_damaged_on_disk(
    daemon: DaemonProcess, space: Space, capsys: Capture, tmp_path: Path
) -> None:
    _flip(tmp_path / "ssd", page(OLD[3], PAGE_BYTES))
    code, tiers = _verify(capsys, daemon, "--tier", "ssd")
    assert (code, tiers["ssd"]["corrupt"]) == (FAILED, 1)
    assert space.match(OLD).page_count == 3
    code, tiers = _verify(capsys, daemon, "--tier", "ssd")
    assert (code, tiers["ssd"]["good"]) == (OK, COUNT - 1)


def _flip(folder: Path, data: bytes) -> None:
    """Flip one bit of a page where it lies on disk."""
    for path in folder.glob("slabs/*/slab-*"):
        content = path.read_bytes()
        place = content.find(data)
        if place >= 0:
            with path.open("r+b") as file:
                file.seek(place + len(data) // 2)
                file.write(bytes([data[len(data) // 2] ^ 0x10]))
            return
    pytest.fail("the page is in no slab file")


def test_page_get_writes_a_page_from_disk(
    daemon: DaemonProcess, space: Space, tmp_path: Path
) -> None:
    assert far_count(space, OLD[:1]) == 1
    out = tmp_path / "page"
    argv = ["page", "get", OLD[0].hex(), "--out", str(out), "--url", daemon.url]
    assert main(argv) == OK
    assert out.read_bytes() == page(OLD[0], PAGE_BYTES)


def test_page_get_of_a_page_that_is_not_held_is_status_1(
    daemon: DaemonProcess, space: Space, capsys: Capture
) -> None:
    assert main(["page", "get", "00" * 32, "--json", "--url", daemon.url]) == FAILED
    assert "is not held" in capsys.readouterr().err
