"""The client over tcp, across forks, and following events, against a real daemon."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from nexuskv.client.space import Space
from nexuskv.client.store import Store, connect
from nexuskv.config import Config
from nexuskv.errors import ConfigError
from nexuskv.tools.daemon_process import DaemonProcess
from nexuskv.types import PageStatus
from tests.client.conftest import keys_of, page, quick, room, space_of, until
from tests.e2e.conftest import StartDaemon

pytestmark = pytest.mark.e2e

COUNT = 8
KEYS = keys_of(COUNT)
PAGES = [page(n) for n in range(COUNT)]
HIT = [PageStatus.HIT] * COUNT


@pytest.fixture
def served(start_daemon: StartDaemon) -> DaemonProcess:
    """A daemon on both carriers that publishes events and drops silent sessions after 1 s."""
    any_port = "tcp://127.0.0.1:0"
    return start_daemon(listen=any_port, events=any_port, session_idle_s=1.0)


@pytest.fixture
def local(served: DaemonProcess) -> Iterator[Store]:
    with connect(served.url, quick()) as store:
        space_of(store).put(KEYS, from_=PAGES)
        yield store


@pytest.fixture
def remote(served: DaemonProcess, local: Store) -> Iterator[Store]:
    config = replace(quick(), session_idle_s=1.0)
    with connect(served.url_of("tcp"), config) as store:
        yield store


def reads_all(space: Space) -> bool:
    into = room(COUNT)
    return space.get(KEYS, into=into) == HIT and [bytes(item) for item in into] == PAGES


def test_a_remote_session_on_this_host_reads_through_shared_memory(remote: Store) -> None:
    assert reads_all(space_of(remote))
    with space_of(remote).view(KEYS, check=True) as view:
        assert None not in view.pages
    assert view.held


def test_a_remote_session_may_not_put(remote: Store) -> None:
    put = space_of(remote).put([b"another!"], from_=[PAGES[0]])
    assert put == [PageStatus.UNAVAILABLE]
    assert remote.connected


def test_a_silent_remote_session_is_kept_by_heartbeats(remote: Store, local: Store) -> None:
    space = space_of(remote)
    assert reads_all(space)
    stopped = threading.Event()
    stopped.wait(2.5)  # longer than the daemon bears silence: time itself is what is tested
    assert reads_all(space)
    assert remote.counters["reconnects"] == 0


def test_a_remote_get_waits_for_a_local_put(remote: Store, local: Store) -> None:
    late = keys_of(2, 100)
    writer = threading.Timer(0.2, lambda: space_of(local).put(late, from_=PAGES[:2]))
    writer.start()
    into = room(2)
    assert space_of(remote).get(late, into=into, wait_s=10) == [PageStatus.HIT] * 2
    writer.join()
    assert [bytes(item) for item in into] == PAGES[:2]


def test_a_frozen_daemon_costs_a_remote_client_one_timeout(
    served: DaemonProcess, remote: Store
) -> None:
    space = space_of(remote)
    assert reads_all(space)
    served.freeze()
    assert not any(space.get(KEYS, into=room(COUNT)))
    assert not remote.connected
    served.thaw()
    until(lambda: remote.connected)
    assert reads_all(space)


def in_child(claim: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        good = False
        try:
            good = claim()
        finally:
            os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("carrier", ["local", "remote"])
def test_parent_and_child_both_go_on_after_a_fork(
    carrier: str, request: pytest.FixtureRequest
) -> None:
    store: Store = request.getfixturevalue(carrier)
    space = space_of(store)
    assert reads_all(space)

    def child() -> bool:
        good = reads_all(space)
        store.close()
        return good

    assert in_child(child)
    assert reads_all(space)


def test_a_child_stores_pages_as_a_process_of_its_own(local: Store) -> None:
    space, new = space_of(local), keys_of(2, 50)
    assert in_child(lambda: all(space.put(new, from_=PAGES[:2])))
    assert space.match(new).page_count == 2


def test_a_follower_sees_what_is_stored_removed_and_cleared(local: Store) -> None:
    space = space_of(local)
    with local.follow() as follower:
        follower.changes(timeout_s=0)
        assert follower.pages[space.id] == set(KEYS)

        def shows(wanted: set[bytes]) -> bool:
            follower.changes(timeout_s=1)
            return follower.pages[space.id] == wanted

        space.put([b"newpage!"], from_=PAGES[:1], parent=KEYS[-1])
        until(lambda: shows({*KEYS, b"newpage!"}))
        space.remove(KEYS[:2])
        until(lambda: shows({*KEYS[2:], b"newpage!"}))
        space.clear()
        until(lambda: shows(set()))


def test_pages_larger_than_a_chunk_are_refused_at_put(local: Store) -> None:
    size_bytes = 32 << 20
    space = local.namespace(model="m", dtype="b", page_tokens=1, page_bytes=size_bytes, key_bytes=8)
    with pytest.raises(ConfigError, match="chunk_bytes"):
        space.put(KEYS[:1], from_=[bytes(size_bytes)])


def test_a_put_larger_than_one_reservation_is_split(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(session_reserved_bytes="1MiB")
    with connect(daemon.url, Config()) as store:
        space = space_of(store)
        keys = keys_of(300)  # 2.3 MiB of slots
        assert space.put(keys, from_=[PAGES[0]] * 300) == [PageStatus.STORED] * 300
        assert space.match(keys).page_count == 300
