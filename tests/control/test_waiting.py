"""Acquires that wait: groups, the window, and the three ways to end."""

import pytest

from nexuskv.errors import ConfigError
from nexuskv.protocol import AcquireState, Type, encode
from nexuskv.types import PageStatus
from tests.control.conftest import StartRig
from tests.control.raw import PAGE_BYTES, Group, RawLocal, chain, is_status
from tests.control.rig import Rig

MORE, COMPLETE = AcquireState.MORE, AcquireState.COMPLETE
DEADLINE, ABORTED = AcquireState.DEADLINE, AcquireState.ABORTED


@pytest.fixture
def narrow(start_rig: StartRig) -> Rig:
    """Groups of 2 pages, a window of 4."""
    return start_rig(acquire_group_bytes=2 * PAGE_BYTES, acquire_window_bytes=4 * PAGE_BYTES)


def pair(rig: Rig) -> tuple[RawLocal, int, RawLocal, int]:
    """A reader and a writer, each with the namespace open."""
    reader, writer = rig.local(), rig.local()
    return reader, reader.open(), writer, writer.open()


def drain(reader: RawLocal, space: int, keys: list[bytes], lease: int) -> list[Group]:
    """Take groups and release their pages until the wait ends."""
    groups: list[Group] = []
    while True:
        groups.append(reader.group())
        if groups[-1].state is not MORE:
            return groups
        number = reader.number
        release(reader, space, keys, lease, groups[-1])
        assert reader.number == number + 1


def release(reader: RawLocal, space: int, keys: list[bytes], lease: int, group: Group) -> None:
    """Release the pages of a group, wanting no reply: groups may come in between."""
    reader.number += 1
    blob = b"".join(keys[at] for at in group.pages())
    reader.send_frame(encode(Type.RELEASE, 0, ([], [[lease, space, blob]], [])))


def test_a_wait_completes_when_a_second_writer_commits(rig: Rig) -> None:
    reader, mine, writer, theirs = pair(rig)
    keys = chain("a", 4)
    writer.put(theirs, keys[:1])
    first = reader.acquire(mine, keys, wait_ms=60_000)
    assert (first.state, sorted(first.pages())) == (MORE, [0])
    writer.put(theirs, keys[1:], parent=keys[0])
    last = reader.group()
    assert (last.state, sorted(last.pages()), last.lease) == (COMPLETE, [1, 2, 3], first.lease)
    assert rig.gauges()["leased_slots"] == 4
    assert rig.gauges()["acquires_waiting"] == 0


def test_a_wait_ends_at_its_deadline_with_what_has_come(rig: Rig) -> None:
    reader, mine, writer, theirs = pair(rig)
    keys = chain("a", 4)
    reader.acquire(mine, keys, wait_ms=5000)
    writer.put(theirs, keys[:2])
    rig.advance(5.1)
    last = reader.group()
    assert (last.state, sorted(last.pages())) == (DEADLINE, [0, 1])
    assert reader.call(Type.PING, b"on") == [b"on"]


def test_a_wait_is_aborted_when_its_namespace_is_cleared(rig: Rig) -> None:
    reader, mine, writer, theirs = pair(rig)
    keys = chain("a", 4)
    reader.acquire(mine, keys, wait_ms=60_000)
    writer.put(theirs, keys[:2])
    writer.call(Type.CLEAR, theirs)
    last = reader.group()
    assert (last.state, last.pages()) == (ABORTED, {})


def test_a_wait_is_aborted_when_its_lease_is_released(rig: Rig) -> None:
    reader, mine, writer, theirs = pair(rig)
    keys = chain("a", 4)
    writer.put(theirs, keys[:1])
    lease = reader.acquire(mine, keys, wait_ms=60_000).lease
    writer.put(theirs, keys[1:2], parent=keys[0])
    writer.release(lease)
    last = reader.group()
    assert (last.state, last.pages()) == (ABORTED, {})
    assert rig.gauges()["leased_slots"] == 0


def test_another_tenant_cannot_abort_a_wait(rig: Rig) -> None:
    reader, mine, writer, theirs = pair(rig)
    keys = chain("a", 2)
    lease = reader.acquire(mine, keys, wait_ms=60_000).lease
    rig.local(tenant="other").release(lease)
    writer.put(theirs, keys)
    assert reader.group().state is COMPLETE


def test_a_wait_is_aborted_when_its_lease_has_run_out(rig: Rig) -> None:
    reader, mine, writer, theirs = pair(rig)
    keys = chain("a", 2)
    reader.acquire(mine, keys, ttl_ms=1000, wait_ms=60_000)
    rig.advance(2.0)
    writer.put(theirs, keys)
    last = reader.group()
    assert (last.state, last.pages()) == (ABORTED, {})
    assert rig.gauges()["leases"] == 0


@pytest.mark.parametrize("carrier", ["local", "remote"])
def test_a_wait_is_aborted_when_the_daemon_stops(rig: Rig, carrier: str) -> None:
    reader = rig.any(carrier)
    reader.acquire(reader.open(), chain("a", 2), wait_ms=60_000)
    rig.stop()
    rig.control.close()
    assert reader.group().state is ABORTED


def test_two_waits_of_a_session_that_is_gone_end_without_a_fault(rig: Rig) -> None:
    reader, mine, writer, theirs = pair(rig)
    for name in (b"one", b"two", b"three"):
        reader.acquire(mine, chain("a", 2), request=name, wait_ms=60_000)
    with rig.blocked():
        # Both reach the loop in one turn, and the writer's frame may well be first.
        writer.send(Type.CLEAR, theirs)
        reader.close()
    writer.receive()
    rig.until(lambda: rig.control.metrics.gauges()["acquires_waiting"] == 0)
    assert writer.call(Type.PING, b"on") == [b"on"]


def test_other_requests_are_answered_while_an_acquire_waits(rig: Rig) -> None:
    reader, mine, writer, theirs = pair(rig)
    number = reader.number + 1
    reader.acquire(mine, chain("a", 1), wait_ms=60_000)
    assert reader.call(Type.PING, b"meanwhile") == [b"meanwhile"]
    writer.put(theirs, chain("a", 1))
    assert reader.receive().request_id == number


def test_a_lost_race_and_a_dropped_commit_wake_nobody(rig: Rig) -> None:
    reader, mine, writer, theirs = pair(rig)
    keys = chain("a", 1)
    reservation, _, _ = writer.reserve(theirs, keys)
    writer.call(Type.CLEAR, theirs)
    reader.acquire(mine, keys, wait_ms=60_000)
    writer.commit(reservation, 1)
    assert rig.gauges()["acquires_waiting"] == 1


def test_pages_are_sent_in_groups_of_the_configured_size(narrow: Rig) -> None:
    reader, mine, writer, theirs = pair(narrow)
    keys = chain("a", 6)
    lease = reader.acquire(mine, keys, wait_ms=60_000).lease
    for at, key in enumerate(keys):
        writer.put(theirs, [key], parent=keys[at - 1] if at else None)
    groups = drain(reader, mine, keys, lease)
    assert [sorted(group.pages()) for group in groups] == [[0, 1], [2, 3], [4, 5]]
    assert [group.state for group in groups] == [MORE, MORE, COMPLETE]


def test_no_more_than_the_window_is_sent_unreleased(narrow: Rig) -> None:
    reader, mine, writer, theirs = pair(narrow)
    keys = chain("a", 10)
    lease = reader.acquire(mine, keys, wait_ms=60_000).lease
    writer.put(theirs, keys)
    groups = [reader.group(), reader.group()]
    assert narrow.gauges()["leased_slots"] == 4
    assert reader.call(Type.PING, b"no more") == [b"no more"]
    for group in groups:
        release(reader, mine, keys, lease, group)
    groups += drain(reader, mine, keys, lease)
    assert [at for group in groups for at in sorted(group.pages())] == list(range(10))
    assert groups[-1].state is COMPLETE


def test_releasing_what_was_never_streamed_makes_no_room(narrow: Rig) -> None:
    reader, mine, writer, theirs = pair(narrow)
    keys, held = chain("a", 10), chain("held", 8)
    writer.put(theirs, held)
    body = reader.call(
        Type.ACQUIRE,
        [[mine, b"".join(held)], [mine, b"".join(keys)]],
        b"request",
        0,
        10_000,
        60_000,
        0,
    )
    lease = Group(body).lease
    writer.put(theirs, keys)
    reader.group()
    reader.group()
    assert reader.release_pages(lease, mine, held) == 8
    assert reader.release_pages(lease, mine, chain("never", 8)) == 0
    assert narrow.gauges()["leased_slots"] == 4


def test_a_last_group_that_found_the_window_full_comes_after_a_release(narrow: Rig) -> None:
    reader, mine, writer, theirs = pair(narrow)
    keys = chain("a", 5)
    lease = reader.acquire(mine, keys, wait_ms=60_000).lease
    writer.put(theirs, keys)
    groups = [reader.group(), reader.group()]
    assert reader.call(Type.PING, b"full") == [b"full"]
    release(reader, mine, keys, lease, groups[0])
    last = reader.group()
    assert (last.state, sorted(last.pages())) == (COMPLETE, [4])


def test_a_last_group_that_found_the_window_full_ends_at_the_deadline(narrow: Rig) -> None:
    reader, mine, writer, theirs = pair(narrow)
    keys = chain("a", 5)
    reader.acquire(mine, keys, ttl_ms=20_000, wait_ms=5000)
    writer.put(theirs, keys)
    reader.group()
    reader.group()
    narrow.advance(5.1)
    last = reader.group()
    assert (last.state, last.pages()) == (DEADLINE, {})
    assert narrow.gauges()["leased_slots"] == 4


def test_a_page_wider_than_the_window_is_sent_alone(start_rig: StartRig) -> None:
    rig = start_rig(acquire_window_bytes=PAGE_BYTES // 2, acquire_group_bytes=PAGE_BYTES // 4)
    reader, mine, writer, theirs = pair(rig)
    keys = chain("a", 3)
    lease = reader.acquire(mine, keys, wait_ms=60_000).lease
    writer.put(theirs, keys)
    groups = drain(reader, mine, keys, lease)
    assert [sorted(group.pages()) for group in groups] == [[0], [1], [2]]


def test_a_page_evicted_between_its_commit_and_its_lease_is_waited_for_again(
    start_rig: StartRig,
) -> None:
    rig = start_rig(acquire_group_bytes=8 * PAGE_BYTES)
    reader, mine, writer, theirs = pair(rig)
    keys = chain("a", 2)
    reader.acquire(mine, keys, wait_ms=60_000)
    writer.put(theirs, keys[:1])
    writer.call(Type.REMOVE, theirs, keys[0])
    writer.put(theirs, keys[1:], parent=keys[0])
    assert sorted(reader.group().pages()) == [1]
    writer.put(theirs, keys[:1])
    last = reader.group()
    assert (last.state, sorted(last.pages())) == (COMPLETE, [0])


def test_a_page_wanted_twice_comes_at_both_places(rig: Rig) -> None:
    reader, mine, writer, theirs = pair(rig)
    key = chain("a", 1)[0]
    reader.acquire(mine, [key, key], wait_ms=60_000)
    writer.put(theirs, [key])
    pages = reader.group().pages()
    assert sorted(pages) == [0, 1]
    assert pages[0] == pages[1]


def test_chains_of_several_namespaces_are_waited_for_together(rig: Rig) -> None:
    reader, writer = rig.local(), rig.local()
    mine = [reader.open(model=name) for name in "xy"]
    theirs = [writer.open(model=name) for name in "xy"]
    keys = chain("a", 2)
    body = reader.call(
        Type.ACQUIRE, [[n, b"".join(keys)] for n in mine], b"request", 0, 10_000, 60_000, 0
    )
    assert Group(body).state is MORE
    for number in theirs:
        writer.put(number, keys)
    last = reader.group()
    assert last.state is COMPLETE
    assert [sorted(last.pages(at)) for at in (0, 1)] == [[0, 1], [0, 1]]


def test_acquires_beyond_those_that_may_wait_are_aborted_and_counted(start_rig: StartRig) -> None:
    rig = start_rig(acquires_waiting_max=1)
    client = rig.local()
    space = client.open()
    client.acquire(space, chain("a", 1), request=b"one", wait_ms=60_000)
    assert client.acquire(space, chain("a", 1), request=b"two", wait_ms=60_000).state is ABORTED
    assert client.counter("acquires_waiting_refused") == 1


def test_a_wait_longer_than_the_limit_is_refused(rig: Rig) -> None:
    client = rig.local()
    with pytest.raises(ConfigError, match="acquire_wait_max_s"):
        client.acquire(client.open(), chain("a", 1), wait_ms=300_001)


def test_a_closed_session_waits_for_nothing(rig: Rig) -> None:
    reader, mine, writer, theirs = pair(rig)
    reader.acquire(mine, chain("a", 1), wait_ms=60_000)
    reader.close()
    rig.until(lambda: rig.control.metrics.gauges()["acquires_waiting"] == 0)
    assert is_status(writer.put(theirs, chain("a", 1)), PageStatus.STORED)


def test_deadlines_end_in_their_order(rig: Rig) -> None:
    reader = rig.local()
    space = reader.open()
    ids: dict[int, bytes] = {}
    for name, wait_ms in ((b"late", 9000), (b"soon", 3000), (b"mid", 6000)):
        ids[reader.number + 1] = name
        reader.acquire(space, chain("a", 1), request=name, wait_ms=wait_ms)
    ended: list[bytes] = []
    for _ in range(3):
        rig.advance(3.1)
        ended.append(ids[reader.receive().request_id])
    assert ended == [b"soon", b"mid", b"late"]
