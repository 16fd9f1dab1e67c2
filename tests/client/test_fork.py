"""After a fork the child has sessions of its own and leaves the parent's alone."""

import os
from collections.abc import Callable

from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.protocol import Type
from nexuskv.types import PageStatus
from tests.client.conftest import keys_of, page, room
from tests.client.fake_daemon import FakeDaemon


def in_child(claim: Callable[[], bool]) -> bool:
    """Whether `claim` holds in a forked child."""
    pid = os.fork()
    if pid == 0:
        good = False
        try:
            good = bool(claim())
        finally:
            os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_reads_on_a_session_of_its_own(
    store: Store, space: Space, daemon: FakeDaemon
) -> None:
    keys = keys_of(2)
    space.put(keys, from_=[page(0), page(1)])
    accepted = daemon.accepted

    def reads() -> bool:
        into = room(2)
        return space.get(keys, into=into) == [PageStatus.HIT] * 2 and bytes(into[1]) == page(1)

    assert in_child(reads)
    assert daemon.accepted == accepted + 1
    hellos = [body[1] for kind, _, body in daemon.seen if kind is Type.HELLO]
    assert hellos[0] == os.getpid()
    assert hellos[-1] != os.getpid()


def test_the_parent_goes_on_after_a_child_used_and_closed_the_store(
    store: Store, space: Space, daemon: FakeDaemon
) -> None:
    keys = keys_of(1)
    space.put(keys, from_=[page(0)])
    accepted = daemon.accepted

    def closes() -> bool:
        space.get(keys, into=room(1))
        store.close()
        return True

    assert in_child(closes)
    assert space.get(keys, into=room(1)) == [PageStatus.HIT]
    assert daemon.accepted == accepted + 1  # the child's


def test_a_child_has_request_ids_of_its_own(store: Store, daemon: FakeDaemon) -> None:
    first = store.process.new_request_id()
    read, write = os.pipe()

    def tells() -> bool:
        return os.write(write, store.process.new_request_id()) == 16

    assert in_child(tells)
    assert os.read(read, 16)[:8] != first[:8]
    os.close(read)
    os.close(write)


def test_a_child_inherits_no_open_socket_after_its_first_call(
    store: Store, space: Space, daemon: FakeDaemon
) -> None:
    space.match(keys_of(1))
    inherited = [fd for fd in os.listdir("/proc/self/fd") if _is_client_socket(fd, daemon)]

    def drops() -> bool:
        space.match(keys_of(1))
        left = [fd for fd in os.listdir("/proc/self/fd") if _is_client_socket(fd, daemon)]
        return len(left) <= len(inherited)

    assert inherited
    assert in_child(drops)


def _is_client_socket(fd: str, daemon: FakeDaemon) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False
