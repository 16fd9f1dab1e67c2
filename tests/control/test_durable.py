"""clear, remove and verify on two tiers: answered when it is true, refused when it cannot be."""

import pytest

from nexuskv.errors import ConfigError, OutOfSpace, Unavailable
from nexuskv.protocol import Type
from nexuskv.types import PageStatus
from nexuskv.worker.commands import (
    CheckCopies,
    CheckPages,
    CopyOut,
    DropCopies,
    SaveNamespace,
)
from tests.control.conftest import StartTiers
from tests.control.raw import PAGE_BYTES, RawLocal, chain
from tests.control.two_tiers import ID, TwoTiers, page_of

HIT, CORRUPT, MISS = PageStatus.HIT, PageStatus.CORRUPT, PageStatus.MISS
UNAVAILABLE = PageStatus.UNAVAILABLE


def copied(two: TwoTiers, client: RawLocal, space: int, keys: list[bytes]) -> None:
    two.put(client, space, keys)
    two.settle()


def where_of(two: TwoTiers, key: bytes) -> tuple[int, int]:
    return next(w for w, page in two.disk.pages.items() if page == page_of(key))


def test_a_removal_is_answered_once_its_rows_are_gone(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 4)
    copied(two, client, space, keys)
    two.fake.held.add(DropCopies)
    number = client.send(Type.REMOVE, space, b"".join(keys[2:]))
    client.send(Type.PING, b"meanwhile")
    assert client.receive().body == [b"meanwhile"]
    assert len(two.disk.rows) == 4
    two.run(lambda: two.fake.release())
    frame = client.receive()
    assert (frame.request_id, frame.body) == (number, [2])
    assert len(two.disk.rows) == 2
    assert client.match(space, keys) == 2


def test_a_removal_whose_rows_cannot_be_deleted_says_so(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 2)
    copied(two, client, space, keys)
    two.fake.failing.add(DropCopies)
    with pytest.raises(Unavailable):
        client.call(Type.REMOVE, space, b"".join(keys))
    assert client.match(space, keys) == 0
    two.fake.failing.clear()
    two.advance(two.config.ssd_retry_s)
    two.settle()
    assert two.disk.rows == {}


def test_a_removal_of_pages_without_copies_needs_no_worker_before_any_copy(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 2)
    two.fake.refused.add(SaveNamespace)
    two.put(client, space, keys)
    assert client.call(Type.REMOVE, space, b"".join(keys)) == [2]


@pytest.mark.parametrize("kind", [Type.REMOVE, Type.CLEAR])
@pytest.mark.parametrize("fault", ["away", "failed"])
def test_what_could_come_back_is_not_taken_away(two: TwoTiers, kind: Type, fault: str) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 2)
    copied(two, client, space, keys)
    two.run(two.fake.die if fault == "away" else two.fake.fail_ssd)
    two.turn()
    with pytest.raises(Unavailable):
        client.call(kind, space, *([b"".join(keys)] if kind is Type.REMOVE else []))
    assert client.match(space, keys) == 2


def test_a_clear_is_answered_once_its_epoch_is_durable(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 4)
    copied(two, client, space, keys)
    two.fake.held.add(SaveNamespace)
    number = client.send(Type.CLEAR, space)
    client.send(Type.PING, b"meanwhile")
    assert client.receive().body == [b"meanwhile"]
    assert client.match(space, keys) == 4
    two.run(lambda: two.fake.release())
    frame = client.receive()
    assert (frame.request_id, frame.body) == (number, [4, 1])
    assert two.disk.namespaces[ID][1] == 1
    assert client.match(space, keys) == 0
    two.settle()
    assert two.disk.rows == {}


def test_a_clear_whose_epoch_cannot_be_written_clears_nothing(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 4)
    copied(two, client, space, keys)
    two.fake.failing.add(SaveNamespace)
    with pytest.raises(Unavailable):
        client.call(Type.CLEAR, space)
    assert client.match(space, keys) == 4
    two.fake.failing.clear()
    assert client.call(Type.CLEAR, space) == [4, 1]


def test_clears_that_come_together_end_together(two: TwoTiers) -> None:
    one, other = two.local(), two.local()
    mine, theirs = one.open(), other.open()
    copied(two, one, mine, chain("a", 4))
    two.fake.held.add(SaveNamespace)
    one.send(Type.CLEAR, mine)
    other.send(Type.CLEAR, theirs)
    two.turn()
    two.run(lambda: two.fake.release())
    assert sorted([one.receive().body, other.receive().body]) == [[0, 1], [4, 1]]


def test_a_commit_between_a_clear_and_its_epoch_is_cleared_too(two: TwoTiers) -> None:
    client, other = two.local(), two.local()
    space, theirs = client.open(), other.open()
    copied(two, client, space, chain("a", 2))
    reservation, _, _ = other.reserve(theirs, chain("late", 1))
    two.fake.held.add(SaveNamespace)
    client.send(Type.CLEAR, space)
    two.put(other, theirs, chain("b", 2))
    two.run(lambda: two.fake.release())
    assert client.receive().body == [4, 1]
    assert other.match(theirs, chain("b", 2)) == 0
    assert other.commit(reservation, 1) == bytes([PageStatus.DROPPED])


def test_pages_stored_after_a_clear_are_copied_under_the_new_epoch(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 3)
    copied(two, client, space, keys)
    client.call(Type.CLEAR, space)
    copied(two, client, space, keys)
    assert len(two.disk.rows) == 3
    assert all(tiers == {"host", "ssd"} for tiers in two.tiers_of(client).values())


def test_requests_that_wait_are_bounded(start_tiers: StartTiers) -> None:
    two = start_tiers(deferred_max=1)
    client = two.local()
    space, keys = client.open(), chain("a", 3)
    copied(two, client, space, keys)
    two.fake.held.add(DropCopies)
    client.send(Type.REMOVE, space, keys[2])
    client.send(Type.REMOVE, space, keys[1])
    with pytest.raises(OutOfSpace):
        client.receive()
    two.run(lambda: two.fake.release())
    assert client.receive().body == [1]


@pytest.mark.parametrize("kind", [Type.REMOVE, Type.CLEAR, Type.VERIFY])
def test_the_session_may_be_gone_when_the_answer_is_there(two: TwoTiers, kind: Type) -> None:
    client, other = two.local(), two.local()
    space, keys = client.open(), chain("a", 3)
    copied(two, client, space, keys)
    two.fake.held |= {DropCopies, SaveNamespace, CheckPages}
    theirs = other.open()
    body: dict[Type, list[object]] = {
        Type.REMOVE: [theirs, b"".join(keys)],
        Type.CLEAR: [theirs],
        Type.VERIFY: [ID, b"".join(keys), "host"],
    }
    other.send(kind, *body[kind])
    two.turn()
    other.close()
    two.until(lambda: len(two.control.sessions) == 1)
    two.run(lambda: two.fake.release())
    two.settle()
    assert client.match(space, keys) == (3 if kind is Type.VERIFY else 0)


# --- verify


@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_verify_says_which_pages_a_tier_holds_whole(two: TwoTiers, tier: str) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 20)
    copied(two, client, space, keys)
    asked = [*keys, *chain("never", 1)]
    (statuses,) = client.call(Type.VERIFY, ID, b"".join(asked), tier)
    assert statuses == bytes([HIT] * 20 + [MISS])


def test_verify_takes_a_bad_page_out_of_host_memory_and_keeps_its_copy(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 3)
    copied(two, client, space, keys)
    page = client.acquire(space, keys, request=b"look", ttl_ms=1).pages()[1]
    two.advance(2)
    with open(two.tier.segments()[0].data_path, "r+b") as data:
        data.seek(page.offset_bytes)
        data.write(b"flip")
    (statuses,) = client.call(Type.VERIFY, ID, b"".join(keys), "host")
    assert statuses == bytes([HIT, CORRUPT, HIT])
    assert two.tiers_of(client)[keys[1]] == {"ssd"}
    assert two.get(client, space, keys) == 3


@pytest.mark.parametrize("where", ["both", "ssd only"])
def test_verify_takes_a_bad_copy_off_the_ssd(two: TwoTiers, where: str) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 3)
    copied(two, client, space, keys)
    if where == "ssd only":
        copied(two, client, space, chain("b", 32))
        copied(two, client, space, chain("c", 32))
    bad = where_of(two, keys[1])
    two.disk.pages[bad] = bytes(PAGE_BYTES)
    (statuses,) = client.call(Type.VERIFY, ID, b"".join(keys), "ssd")
    assert statuses == bytes([HIT, CORRUPT, HIT])
    two.settle()
    assert bad not in two.disk.rows
    assert client.match(space, keys) == (3 if where == "both" else 1)
    assert two.counter("verify_corrupt") == 1


def test_verify_of_a_page_that_goes_meanwhile_is_a_miss(two: TwoTiers) -> None:
    client, other = two.local(), two.local()
    space, keys = client.open(), chain("a", 2)
    copied(two, client, space, keys)
    theirs = other.open()
    two.disk.pages[where_of(two, keys[0])] = bytes(PAGE_BYTES)
    two.fake.held.add(CheckCopies)
    client.send(Type.VERIFY, ID, b"".join(keys), "ssd")
    two.until_asked(CheckCopies)
    other.call(Type.REMOVE, theirs, b"".join(keys))
    two.run(lambda: two.fake.release())
    assert client.receive().body == [bytes([MISS, HIT])]
    two.settle()


def test_a_copy_that_is_checked_is_not_written_over(start_tiers: StartTiers) -> None:
    two = start_tiers(ssd_capacity=2**20)
    client, other = two.local(), two.local()
    space, keys = client.open(), chain("a", 15)
    copied(two, client, space, keys)
    theirs = other.open()
    two.fake.held.add(CheckCopies)
    client.send(Type.VERIFY, ID, b"".join(keys), "ssd")
    two.until_asked(CheckCopies)
    checked = two.fake.asked[0].command
    assert isinstance(checked, CheckCopies)
    places = {(row.file_index, row.slot_index) for row in checked.pages}
    other.call(Type.REMOVE, theirs, b"".join(keys))
    two.put(other, theirs, chain("b", 15))
    two.turn()
    written = {
        (row.file_index, row.slot_index)
        for command in two.fake.seen[-4:]
        if isinstance(command, CopyOut)
        for row in command.pages
    }
    assert not written & places
    two.run(lambda: two.fake.release())
    client.receive()
    two.settle()


@pytest.mark.parametrize("fault", ["away", "no answer"])
def test_verify_without_a_worker_says_unavailable(two: TwoTiers, fault: str) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 2)
    copied(two, client, space, keys)
    if fault == "away":
        two.run(lambda: two.fake.die())
        two.turn()
    else:
        two.fake.failing |= {CheckPages, CheckCopies}
    for tier in ("host", "ssd"):
        assert client.call(Type.VERIFY, ID, b"".join(keys), tier) == [bytes([UNAVAILABLE] * 2)]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param([bytes(16), b"", "host"], id="unknown namespace"),
        pytest.param([ID, b"half", "host"], id="half a key"),
        pytest.param([ID, b"", "tape"], id="unknown tier"),
        pytest.param([ID, bytes(32 * 1025), "host"], id="too many"),
    ],
)
def test_a_verify_that_means_nothing_is_refused(two: TwoTiers, body: list[object]) -> None:
    client = two.local()
    client.open()
    with pytest.raises(ConfigError):
        client.call(Type.VERIFY, *body)


def test_a_bad_page_reported_by_a_client_is_kept_by_its_copy_which_is_checked(
    two: TwoTiers,
) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 1)
    copied(two, client, space, keys)
    group = client.acquire(space, keys, request=b"look")
    page = group.pages()[0]
    with open(two.tier.segments()[0].data_path, "r+b") as data:
        data.seek(page.offset_bytes)
        data.write(b"flip")
    client.call(Type.RELEASE, [], [], [[space, keys[0], page.checksum, page.generation]])
    two.settle()
    assert two.tiers_of(client) == {keys[0]: {"ssd"}}
    assert any(isinstance(each, CheckCopies) for each in two.fake.seen)
    client.release(group.lease)
    assert two.get(client, space, keys) == 1


def test_a_bad_page_whose_copy_is_bad_too_is_gone(two: TwoTiers) -> None:
    client = two.local()
    space, keys = client.open(), chain("a", 1)
    copied(two, client, space, keys)
    two.disk.pages[where_of(two, keys[0])] = bytes(PAGE_BYTES)
    page = client.acquire(space, keys, request=b"look", ttl_ms=1).pages()[0]
    with open(two.tier.segments()[0].data_path, "r+b") as data:
        data.seek(page.offset_bytes)
        data.write(b"flip")
    client.call(Type.RELEASE, [], [], [[space, keys[0], page.checksum, page.generation]])
    two.settle()
    two.advance(2)
    assert two.tiers_of(client) == {}
