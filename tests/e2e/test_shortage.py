"""A client that may open no more sessions, sockets or files, or whose caller holds on to a view."""

import math
import os
import pickle
import resource
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from nexuskv.client.hostmap import HostMaps
from nexuskv.client.store import connect
from nexuskv.tools.daemon_process import DaemonProcess
from nexuskv.types import PageStatus
from tests.e2e.cache import chain, count_good, eventually, gauges, open_space, open_store, put
from tests.e2e.conftest import StartDaemon

pytestmark = pytest.mark.e2e


@contextmanager
def no_descriptor_left() -> Generator[None]:
    """Nothing can be opened in this process inside the block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = os.open(os.devnull, os.O_RDONLY)
    os.close(least)
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def no_thread_left() -> Generator[None]:
    """No thread can be started inside the block: a stack of any size is refused."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize("sessions_max", [1, 3])
def test_threads_share_the_sessions_that_a_full_daemon_has_left(
    start_daemon: StartDaemon, sessions_max: int
) -> None:
    daemon = start_daemon(sessions_max=sessions_max)
    with open_store(daemon.url) as store:
        space = open_space(store)
        keys = chain("shared", 16)
        assert all(put(space, keys))
        good: list[int] = []
        threads = [
            threading.Thread(target=lambda: good.extend(count_good(space, keys) for _ in range(20)))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert good == [16] * 120
        eventually(lambda: gauges(store)["leases"] == 0, "the keeper gives leases back as well")


def test_a_process_without_descriptors_goes_on_with_what_it_has(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        keys = chain("shared", 16)
        assert all(put(space, keys))
        good: list[int] = []
        with no_descriptor_left():
            threads = [
                threading.Thread(target=lambda: good.append(count_good(space, keys)))
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert good == [16] * 4


def test_a_store_opened_without_descriptors_misses_until_there_are_some(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url) as other:
        assert all(put(open_space(other), chain("held", 2)))
    with no_descriptor_left():
        store = connect(daemon.url, other.config)
        space = open_space(store)
        into = [bytearray(space.record.page_bytes)]
        assert space.get(chain("held", 1), into=into) == [PageStatus.UNAVAILABLE]
    with store:
        eventually(lambda: count_good(space, chain("held", 2)) == 2, "it connects by itself")


def test_a_view_that_takes_several_messages_holds_what_any_of_them_found(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url, client_batch_pages=4) as store:
        space = open_space(store)
        keys = chain("long", 12)
        assert all(put(space, keys))
        space.remove(keys[:4])
        with space.view(keys) as view:
            assert [page is not None for page in view.pages] == [False] * 4 + [True] * 8
            assert gauges(store)["leased_slots"] == 8
            assert view.held
        assert view.held
        eventually(lambda: gauges(store)["leases"] == 0, "all leases are given back")


def test_a_view_whose_memory_is_still_used_gives_its_lease_back(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        keys = chain("viewed", 3)
        assert all(put(space, keys))
        with space.view(keys) as view:
            assert view.pages[0] is not None
            held_on_to = pickle.PickleBuffer(view.pages[0])
        assert view.held
        eventually(lambda: gauges(store)["leases"] == 0, "the lease is given back")
        with pytest.raises(ValueError, match="released"):
            bytes(view.pages[1] or b"")
        held_on_to.release()


def test_a_map_for_reading_does_not_serve_a_session_that_may_write(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store, store.process.pool.lend(math.inf) as link:
        maps = HostMaps()
        reading = maps.attach(replace(link.session, writable=False))
        writing = maps.attach(link.session)
        assert (reading.writable, writing.writable) == (False, True)
        for each in (reading, writing, maps.attach(replace(link.session, writable=False))):
            each.release()
        maps.close()


def test_a_process_without_threads_is_served_and_reconnects_once_it_has_one(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        with no_thread_left():
            assert all(put(space, chain("a", 4)))
            assert count_good(space, chain("a", 4)) == 4
            daemon.kill()
            assert count_good(space, chain("a", 4)) == 0
        daemon.start()
        eventually(lambda: all(put(space, chain("a", 4))), "it reconnects")
