"""Writers that race, stop, hang up and die between reserve and commit (I4, I14)."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.tools.daemon_process import DaemonProcess
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
WRITER_PAGES = 96
TRIES = 20


def test_two_writers_of_one_chain_both_succeed_and_no_reader_sees_a_mix(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store, page_bytes=PAGE_BYTES)
        for attempt in range(8):
            keys = chain(f"race {attempt}", 8)
            with ThreadPoolExecutor(2) as pool:
                puts = [pool.submit(put, space, keys, version=version) for version in (1, 2)]
                outcomes = [each.result() for each in puts]
            assert outcomes == [[True] * 8, [True] * 8]
            into = [bytearray(PAGE_BYTES) for _ in keys]
            assert all(space.get(keys, into=into))
            for key, got in zip(keys, into, strict=True):
                assert got in (page(key, PAGE_BYTES, version=1), page(key, PAGE_BYTES, version=2))


def test_space_of_a_writer_killed_between_reserve_and_commit_comes_back(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url) as store:
        with _caught_writing(daemon, store) as writer:
            writer.kill()
        eventually(lambda: gauges(store)["writing_bytes"] == 0, "writing slots are given back")
        eventually(lambda: gauges(store)["quarantined_bytes"] == 0, "quarantine is empty")
        space = open_space(store, page_bytes=PAGE_BYTES)
        keys = chain("after", 200)
        assert all(put(space, keys)), "the whole store can be filled"
        assert count_good(space, keys) == 200


def test_a_writer_frozen_in_its_copy_changes_no_other_page_when_it_wakes(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url) as store, _caught_writing(daemon, store) as writer:
        space = open_space(store, page_bytes=PAGE_BYTES, model="others")
        keys = _fill_under_pressure(store, space)
        with space.view(keys) as view:
            writer.thaw()
            assert writer.outcome() == ["STORED"] * WRITER_PAGES
            seen = [None if p is None else bytes(p) for p in view.pages]
            assert view.held
        assert seen == pages(keys, PAGE_BYTES)
        assert count_good(space, keys) == len(keys)


def test_a_client_that_hangs_up_while_its_copy_runs_keeps_its_slots_until_it_exits(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store, page_bytes=PAGE_BYTES, model="others")
        with _caught_hung_up(daemon, store) as writer:
            quarantined = gauges(store)["quarantined_bytes"]
            assert quarantined == WRITER_PAGES * PAGE_BYTES
            keys = _fill_under_pressure(store, space)
            writer.thaw()
            outcome = writer.outcome()
            assert isinstance(outcome, list)
            assert not {"STORED", "EXISTS"} & set(outcome)
            assert gauges(store)["quarantined_bytes"] == quarantined
            assert count_good(space, keys) == len(keys)
            writer.end()
        eventually(lambda: gauges(store)["quarantined_bytes"] == 0, "its exit frees its slots")


def test_a_full_quarantine_refuses_reservations_until_the_writer_exits(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(quarantine_bytes="32MiB")
    with open_store(daemon.url) as store:
        space = open_space(store, page_bytes=PAGE_BYTES, model="others")
        with _caught_hung_up(daemon, store) as writer:
            refused = space.put(chain("refused", 4), from_=[bytes(PAGE_BYTES)] * 4)
            assert not any(refused)
            assert counters(store)["quarantine_refusals"] > 0
            assert gauges(store)["used_bytes"] == 0
            writer.kill()
        eventually(lambda: all(put(space, chain("again", 4))), "service returns")


@contextmanager
def _caught_writing(daemon: DaemonProcess, store: Store) -> Generator[Child]:
    """A writer frozen after it was lent its slots and before it committed."""
    wait_populated(store)
    for attempt in range(TRIES):
        name = f"caught {attempt}"
        with child("put", daemon.url, name=name, count=WRITER_PAGES, page_bytes=PAGE_BYTES,
                   wait=True) as writer:  # fmt: skip
            assert writer.read() == "ready"
            committed = counters(store)["committed_pages"]
            writer.go()
            eventually(partial(_has_begun, store, committed), "the writer was lent slots")
            writer.freeze()
            if gauges(store)["writing_bytes"] and counters(store)["committed_pages"] == committed:
                yield writer
                return
    pytest.fail(f"no writer was caught in its copy in {TRIES} tries")


@contextmanager
def _caught_hung_up(daemon: DaemonProcess, store: Store) -> Generator[Child]:
    """A writer frozen in its copy, whose sockets are closed."""
    with _caught_writing(daemon, store) as writer:
        writer.hang_up()
        eventually(lambda: gauges(store)["quarantined_bytes"] > 0, "its slots are in quarantine")
        yield writer


def _has_begun(store: Store, committed_before: int) -> bool:
    return bool(
        gauges(store)["writing_bytes"] or counters(store)["committed_pages"] > committed_before
    )


def _fill_under_pressure(store: Store, space: Space) -> list[bytes]:
    """Write twice what the daemon holds; returns the chain that is held whole at the end."""
    room = gauges(store)["capacity_bytes"] // PAGE_BYTES - WRITER_PAGES
    for round_number in range(2 * room // 32):
        put(space, chain(f"pressure {round_number}", 32))
    keys = chain("kept", room // 2)
    assert all(put(space, keys))
    return keys
