"""Readers that are late, pages that are flipped or cleared under them, leases that are shared."""

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nexuskv.client.store import Store
from nexuskv.protocol import AcquireState
from nexuskv.tools.daemon_process import DaemonProcess
from nexuskv.types import PageStatus
from tests.e2e.cache import (
    MIB,
    chain,
    count_good,
    counters,
    eventually,
    gauges,
    open_space,
    open_store,
    page,
    pages,
    put,
    wait_populated,
)
from tests.e2e.children import Child, child
from tests.e2e.conftest import StartDaemon

pytestmark = pytest.mark.e2e

PAGE_BYTES = MIB
READ_PAGES = 96
TRIES = 20


def test_a_reader_frozen_past_its_lease_gets_stale_pages_and_reports_none(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(lease_margin_s=0.1)
    with open_store(daemon.url) as store:
        wait_populated(store)
        space = open_space(store, page_bytes=PAGE_BYTES)
        with _caught_reading(daemon, store) as reader:
            eventually(lambda: gauges(store)["leases"] == 0, "its lease ends")
            others = open_space(store, page_bytes=PAGE_BYTES, model="others")
            for number in range(16):
                put(others, chain(f"pressure {number}", 32))
            reader.thaw()
            outcome = reader.outcome()
        assert isinstance(outcome, dict)
        assert outcome["right"], "no hit may have wrong bytes"
        assert "STALE" in outcome["statuses"]
        assert "CORRUPT" not in outcome["statuses"]
        assert counters(store)["corrupt_reports"] == 0
        assert count_good(others, chain("pressure 15", 32)) == 32
        assert space.match(chain("read", READ_PAGES)).page_count < READ_PAGES


def test_a_batch_longer_than_its_lease_renews_it(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(lease_margin_s=0)
    with open_store(daemon.url, lease_ttl_s=0.02) as store:
        wait_populated(store)
        space = open_space(store, page_bytes=PAGE_BYTES)
        keys = chain("long", 200)
        assert all(put(space, keys))
        into = [bytearray(PAGE_BYTES) for _ in keys]
        for _ in range(3):
            assert set(space.get(keys, into=into)) == {PageStatus.HIT}


def test_a_flipped_byte_misses_everywhere_and_is_dropped_once(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store, open_store(daemon.url) as other:
        keys = chain("flipped", 8)
        space, same = open_space(store), open_space(other)
        assert all(put(space, keys))
        _flip(daemon, page(keys[3], space.record.page_bytes))
        into = [bytearray(space.record.page_bytes) for _ in keys]
        for each in (space, same, space):
            statuses = each.get(keys, into=into)
            assert not statuses[3]
            assert [bool(s) for s in statuses[:3]] == [True] * 3
        store.ping()  # carries the report if the next exchange has not
        eventually(lambda: counters(store)["corrupt_pages"] == 1, "the page is dropped")
        assert space.get(keys, into=into)[3] is PageStatus.MISS
        assert space.match(keys).page_count == 3
        assert counters(store)["corrupt_pages"] == 1
        assert len(re.findall(r"corrupt in host memory", daemon.log())) == 1


def test_after_a_clear_every_new_call_misses_and_an_open_view_stays_whole(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        keys = chain("cleared", 16)
        assert all(put(space, keys))
        with space.view(keys) as view:
            assert space.clear() == 16
            assert count_good(space, keys) == 0
            assert space.match(keys).page_count == 0
            assert gauges(store)["unlinked_slots"] == 16
            with space.view(keys) as later:
                assert later.pages == [None] * 16
            assert [bytes(p) for p in view.pages if p is not None] == pages(
                keys, space.record.page_bytes
            )
        eventually(lambda: gauges(store)["unlinked_slots"] == 0, "the view's slots are free")


def test_clear_during_puts_and_gets_leaves_nothing_begun_before(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        keys = chain("churn", 64)
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                put(space, keys)
                count_good(space, keys)

        threads = [threading.Thread(target=churn) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            space.clear()
        stop.set()
        for thread in threads:
            thread.join()
        space.clear()
        assert count_good(space, keys) == 0
        assert gauges(store)["pages"] == 0
        assert gauges(store)["writing_bytes"] == 0


def test_a_commit_reserved_before_a_clear_is_dropped(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        wait_populated(store)
        space = open_space(store, page_bytes=PAGE_BYTES)
        for attempt in range(TRIES):
            name, count = f"dropped {attempt}", 96
            with child(
                "put", daemon.url, name=name, count=count, page_bytes=PAGE_BYTES, wait=True
            ) as writer:
                assert writer.read() == "ready"
                before = counters(store)
                writer.go()
                eventually(
                    lambda before=before: (
                        counters(store)["reserved_pages"]  # type: ignore[misc]
                        > before["reserved_pages"]
                    ),
                    "it has reserved",
                )
                space.clear()
                outcome = writer.outcome()
            if outcome == ["DROPPED"] * count:
                assert count_good(space, chain(name, count)) == 0
                return
        pytest.fail(f"no commit was overtaken by a clear in {TRIES} tries")


def test_a_lease_is_read_renewed_and_released_by_another_process(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        keys = chain("shared", 8)
        assert all(put(space, keys))
        lease = store.acquire([(space, keys)], request_id=b"shared", ttl_s=30)
        again = store.acquire([(space, keys)], request_id=b"shared", ttl_s=30)
        assert gauges(store)["leases"] == 1, "the same request id is one lease"
        common = {"name": "shared", "count": 8, "page_bytes": space.record.page_bytes}
        with child("read_lease", daemon.url, token=lease.token.hex(), tenant="other",
                   **common) as stranger:  # fmt: skip
            refused = stranger.outcome()
        assert refused == {"statuses": ["STALE"] * 8, "right": True, "renewed": False}
        with child("read_lease", daemon.url, token=again.token.hex(), release=True,
                   **common) as reader:  # fmt: skip
            assert reader.outcome() == {"statuses": ["HIT"] * 8, "right": True, "renewed": True}
        eventually(lambda: gauges(store)["leases"] == 0, "the other process released it")


def test_a_waiting_get_is_completed_by_a_second_writer(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store, open_store(daemon.url) as writer_store:
        space, writer = open_space(store), open_space(writer_store)
        keys = chain("awaited", 16)
        put(space, keys[:4])
        lease = store.acquire([(space, keys)], request_id=b"wait", ttl_s=30, wait_s=20)
        assert lease.token_count == 4 * 16
        into = [bytearray(space.record.page_bytes) for _ in keys]
        with _while_waiting(store, lambda: put(writer, keys[4:], parent=keys[3])):
            statuses = lease.get(space, keys, into=into)
        assert set(statuses) == {PageStatus.HIT}
        assert into == pages(keys, space.record.page_bytes)
        assert lease.state is AcquireState.COMPLETE
        lease.release()


def test_a_wait_ends_at_its_deadline_with_what_came(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store, open_store(daemon.url) as writer_store:
        space, writer = open_space(store), open_space(writer_store)
        keys = chain("late", 16)
        lease = store.acquire([(space, keys)], request_id=b"late", ttl_s=30, wait_s=2)
        put(space, keys[:2])
        into = [bytearray(space.record.page_bytes) for _ in keys]
        with _while_waiting(store, lambda: put(writer, keys[2:9], parent=keys[1])):
            statuses = lease.get(space, keys, into=into)
        assert [bool(s) for s in statuses] == [True] * 9 + [False] * 7
        assert lease.state is AcquireState.DEADLINE
        lease.release()


def test_a_wait_is_aborted_by_a_clear(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store, open_store(daemon.url) as other:
        space, same = open_space(store), open_space(other)
        keys = chain("aborted", 16)
        put(space, keys[:2])
        lease = store.acquire([(space, keys)], request_id=b"aborted", ttl_s=30, wait_s=20)
        into = [bytearray(space.record.page_bytes) for _ in keys]
        with _while_waiting(store, same.clear):
            statuses = lease.get(space, keys, into=into)
        assert not any(statuses[2:])
        assert lease.state is AcquireState.ABORTED
        lease.release()


@contextmanager
def _while_waiting(store: Store, act: object) -> Generator[None]:
    """Do something from another thread once the daemon has an acquire that waits."""

    def later() -> None:
        eventually(lambda: gauges(watcher)["acquires_waiting"] == 1, "an acquire waits")
        assert callable(act)
        act()

    with open_store(store.url) as watcher:
        thread = threading.Thread(target=later)
        thread.start()
        yield
        thread.join()


@contextmanager
def _caught_reading(daemon: DaemonProcess, store: Store) -> Generator[Child]:
    """A reader with a short lease, frozen between its acquire and the end of its copy."""
    space = open_space(store, page_bytes=PAGE_BYTES)
    keys = chain("read", READ_PAGES)
    for _ in range(TRIES):
        assert all(put(space, keys))
        with child("get", daemon.url, name="read", count=READ_PAGES, page_bytes=PAGE_BYTES,
                   lease_ttl_s=0.3) as reader:  # fmt: skip
            assert reader.read() == "ready"
            before = counters(store)["acquire_hits"]
            reader.go()
            eventually(
                lambda before=before: counters(store)["acquire_hits"] > before,  # type: ignore[misc]
                "the reader was answered",
            )
            reader.freeze()
            if gauges(store)["leases"] and not reader.has_spoken():
                yield reader
                return
    pytest.fail(f"no reader was caught in its copy in {TRIES} tries")


def _flip(daemon: DaemonProcess, data: bytes) -> None:
    """Flip one bit of a page where it lies in shared memory."""
    (path,) = Path(daemon.segment_folder).glob("data-*")
    content = path.read_bytes()
    place = content.find(data)
    assert place >= 0
    with path.open("r+b") as file:
        file.seek(place + len(data) // 2)
        file.write(bytes([data[len(data) // 2] ^ 0x10]))
