"""What a daemon finds of the run before it, and what it must not (I14, I11)."""

import contextlib
import os
import random
import select
import signal
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import pytest

from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.tools.daemon_process import DaemonProcess
from tests.e2e.cache import (
    KIB,
    MIB,
    chain,
    count_good,
    counters,
    eventually,
    gauges,
    open_space,
    open_store,
    put,
    wait_populated,
)
from tests.e2e.children import Child, child
from tests.e2e.conftest import StartDaemon

pytestmark = pytest.mark.e2e

WRITER_PAGES = 48
TRIES = 20


def kill(daemon: DaemonProcess) -> None:
    daemon.kill()


def stop(daemon: DaemonProcess) -> None:
    assert daemon.stop() == 0


def kill_all(daemon: DaemonProcess) -> None:
    """Control and worker at once."""
    with open_store(daemon.url) as store:
        worker = gauges(store)["worker_pid"]
    os.kill(worker, signal.SIGSTOP)
    daemon.kill()
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


HOW = pytest.mark.parametrize("end", [stop, kill, kill_all], ids=lambda end: end.__name__)
End = Callable[[DaemonProcess], None]


@pytest.fixture
def keeper(start_daemon: StartDaemon) -> DaemonProcess:
    """A daemon that keeps its pages: 64 MiB in chunks of 4."""
    return start_daemon(keep_pages=True, host_memory="64MiB", chunk_bytes="4MiB")


@contextlib.contextmanager
def recovered(daemon: DaemonProcess) -> Generator[Store]:
    """Start again; a store once all is found."""
    daemon.start()
    with open_store(daemon.url) as store:
        eventually(lambda: not gauges(store)["recovering"], "recovery ends")
        yield store
        assert counters(store)["internal_errors"] == 0


@HOW
def test_every_page_is_served_again(keeper: DaemonProcess, end: End) -> None:
    with open_store(keeper.url) as store:
        small, large = spaces(store)
        assert all(put(small, chain("a", 200)))
        assert all(put(large, chain("b", 12)))
        used = gauges(store)["used_bytes"]
    end(keeper)
    with recovered(keeper) as store:
        small, large = spaces(store)
        assert count_good(small, chain("a", 200)) == 200
        assert count_good(large, chain("b", 12)) == 12
        assert gauges(store)["used_bytes"] == used
        assert gauges(store)["quarantined_bytes"] == 0


@HOW
def test_a_cleared_namespace_stays_empty_and_the_other_full(
    keeper: DaemonProcess, end: End
) -> None:
    with open_store(keeper.url) as store:
        small, large = spaces(store)
        put(small, chain("a", 50))
        put(large, chain("b", 5))
        small.clear()
        end(keeper)
    with recovered(keeper) as store:
        small, large = spaces(store)
        assert count_good(small, chain("a", 50)) == 0
        assert count_good(large, chain("b", 5)) == 5


@HOW
def test_removed_pages_stay_away(keeper: DaemonProcess, end: End) -> None:
    keys = chain("a", 50)
    with open_store(keeper.url) as store:
        small, _ = spaces(store)
        put(small, keys)
        small.remove(keys[30:])
        end(keeper)
    with recovered(keeper) as store:
        small, _ = spaces(store)
        assert (count_good(small, keys[:30]), count_good(small, keys[30:])) == (30, 0)


def test_pages_stored_after_a_clear_are_kept(keeper: DaemonProcess) -> None:
    with open_store(keeper.url) as store:
        small, _ = spaces(store)
        put(small, chain("old", 20))
        small.clear()
        put(small, chain("new", 20))
    keeper.kill()
    with recovered(keeper) as store:
        small, _ = spaces(store)
        assert (count_good(small, chain("old", 20)), count_good(small, chain("new", 20))) == (0, 20)


def test_without_keep_pages_a_start_is_empty_and_a_stop_leaves_nothing(
    keeper: DaemonProcess,
) -> None:
    with open_store(keeper.url) as store:
        put(spaces(store)[0], chain("a", 20))
    keeper.kill()
    keeper.set_flag("keep_pages", False)
    with recovered(keeper) as store:
        assert count_good(spaces(store)[0], chain("a", 20)) == 0
    assert keeper.stop() == 0
    assert keeper.leftovers() == []


def test_a_start_that_fails_leaves_the_pages_of_the_run_before(keeper: DaemonProcess) -> None:
    with open_store(keeper.url) as store:
        put(spaces(store)[0], chain("a", 20))
    keeper.kill()
    keeper.set_flag("http", "192.0.2.1:80")
    keeper.launch()
    assert keeper.wait() == 2
    keeper.set_flag("http", "")
    with recovered(keeper) as store:
        assert count_good(spaces(store)[0], chain("a", 20)) == 20


def test_a_client_that_lives_through_a_restart_goes_on(keeper: DaemonProcess) -> None:
    keys = chain("a", 40)
    with open_store(keeper.url) as store:
        small, _ = spaces(store)
        put(small, keys)
        with small.view(keys) as view:
            assert view.held
            keeper.kill()
            keeper.start()
        eventually(lambda: count_good(small, keys) == 40, "the client reads again")
        assert all(put(small, chain("b", 40)))


def test_raised_and_lowered_capacity_lose_only_what_does_not_fit(keeper: DaemonProcess) -> None:
    with open_store(keeper.url) as store:
        wait_populated(store)
        put(spaces(store)[0], chain("a", 3000))
        held = gauges(store)["used_bytes"]
    keeper.kill()
    keeper.set_flag("host_memory", "128MiB")
    with recovered(keeper) as store:
        assert gauges(store)["used_bytes"] == held
        assert count_good(spaces(store)[0], chain("a", 3000)) == 3000
        eventually(lambda: gauges(store)["populated_bytes"] == 128 * MIB, "it grows")
    keeper.kill()
    keeper.set_flag("host_memory", "32MiB")
    with recovered(keeper) as store:
        assert 0 < gauges(store)["used_bytes"] <= 32 * MIB
        eventually(lambda: resident_bytes(keeper) <= 33 * MIB, "memory above is given back")


def test_memory_moves_to_another_page_size_after_a_restart(keeper: DaemonProcess) -> None:
    with open_store(keeper.url) as store:
        wait_populated(store)
        put(spaces(store)[0], chain("a", 2000))
    keeper.kill()
    with recovered(keeper) as store:
        _, large = spaces(store)
        assert all(put(large, chain("b", 40)))
        assert count_good(large, chain("b", 40)) == 40


def test_a_writer_frozen_over_a_kill_changes_no_other_page_when_it_wakes(
    keeper: DaemonProcess,
) -> None:
    """The important one: the daemon that lent the slots is gone, the next one must know of them."""
    with caught_writing(keeper) as writer:
        kill_all(keeper)
        with recovered(keeper) as store:
            quarantined = gauges(store)["quarantined_bytes"]
            assert 0 < quarantined <= WRITER_PAGES * 256 * KIB
            _, large = spaces(store)
            for number in range(12):
                put(large, chain(f"pressure {number}", 32))
            kept = chain("kept", 100)
            assert all(put(large, kept))
            writer.thaw()
            writer.outcome()
            assert count_good(large, kept) == 100
            assert gauges(store)["quarantined_bytes"] == quarantined
            writer.end()
            eventually(lambda: gauges(store)["quarantined_bytes"] == 0, "its end frees its slots")
            assert count_good(large, kept) == 100


def test_a_frozen_writer_is_known_to_the_third_run_too(keeper: DaemonProcess) -> None:
    with caught_writing(keeper) as writer:
        kill_all(keeper)
        with recovered(keeper) as store:
            quarantined = gauges(store)["quarantined_bytes"]
        keeper.stop()
        with recovered(keeper) as store:
            assert gauges(store)["quarantined_bytes"] == quarantined > 0
            writer.kill()
            eventually(lambda: gauges(store)["quarantined_bytes"] == 0, "its end frees its slots")


def test_kills_at_random_moments_of_puts_lose_nothing_that_was_committed(
    keeper: DaemonProcess,
) -> None:
    keeper.set_flag("host_memory", "256MiB")
    keeper.restart()
    choice = random.Random(20)
    stored: dict[str, int] = {}
    for number in range(20):
        with child("put", keeper.url, name=f"busy {number}", count=64, page_bytes=64 * KIB,
                   wait=True) as writer:  # fmt: skip
            assert writer.read() == "ready"
            with open_store(keeper.url) as store:
                assert all(put(spaces(store)[0], chain(f"sure {number}", 4)))
            stored[f"sure {number}"] = 4
            writer.go()
            select.select([writer], [], [], choice.uniform(0.0, 0.05))  # when is the point
            keeper.kill()
            writer.outcome()
            writer.end()
        with recovered(keeper) as store:
            small, _ = spaces(store)
            lost = [name for name, n in stored.items() if count_good(small, chain(name, n)) != n]
            # What was put at the kill may be there in part, but only with the right bytes.
            count_good(open_space(store, page_bytes=64 * KIB), chain(f"busy {number}", 64))
            assert not lost, f"lost {lost}"
            check_accounts(store)


def test_sigterm_under_load_ends_in_time_with_all_pages_on_record(keeper: DaemonProcess) -> None:
    with open_store(keeper.url) as store:
        small, _ = spaces(store)
        assert all(put(small, chain("sure", 100)))
        with child("put", keeper.url, name="busy", count=64, page_bytes=64 * KIB,
                   wait=True) as writer:  # fmt: skip
            assert writer.read() == "ready"
            writer.go()
            assert keeper.stop(timeout_s=10.0) == 0
            writer.outcome()
    with recovered(keeper) as store:
        assert count_good(spaces(store)[0], chain("sure", 100)) == 100


# --- parts


def spaces(store: Store) -> tuple[Space, Space]:
    """Small and large pages."""
    return (
        open_space(store, page_bytes=16 * KIB, model="small"),
        open_space(store, page_bytes=256 * KIB, model="large"),
    )


def check_accounts(store: Store) -> None:
    """Pages of the index fill what counts as used."""
    ids = [row[0] for row in store.inspect("namespaces")]
    held = sum([len(list(store.inspect("pages", each))) for each in ids if isinstance(each, bytes)])
    assert gauges(store)["pages"] == held


def resident_bytes(daemon: DaemonProcess) -> int:
    """Memory that the segment's data takes."""
    files: list[Path] = list(daemon.segment_folder.glob("data-*"))
    return sum(path.stat().st_blocks * 512 for path in files)


def has_begun(store: Store, committed_before: int) -> bool:
    """Whether a writer has slots, or has committed already."""
    committed = counters(store)["committed_pages"]
    return bool(gauges(store)["writing_bytes"]) or committed > committed_before


@contextlib.contextmanager
def caught_writing(daemon: DaemonProcess) -> Generator[Child]:
    """A writer frozen after it was lent its slots and before it committed."""
    with open_store(daemon.url) as store:
        wait_populated(store)
        for attempt in range(TRIES):
            with child("put", daemon.url, name=f"caught {attempt}", count=WRITER_PAGES,
                       page_bytes=256 * KIB, wait=True) as writer:  # fmt: skip
                assert writer.read() == "ready"
                before = counters(store)["committed_pages"]
                writer.go()
                eventually(partial(has_begun, store, before), "the writer was lent slots")
                writer.freeze()
                if gauges(store)["writing_bytes"]:
                    yield writer
                    return
    pytest.fail(f"no writer was caught in its copy in {TRIES} tries")
