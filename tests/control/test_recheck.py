"""Pages reported corrupt: read again before they are dropped (I2)."""

import logging

import pytest

from nexuskv.dataplane.checksum import page_checksum
from nexuskv.errors import ConfigError
from nexuskv.namespace import namespace_id
from nexuskv.protocol import Type
from nexuskv.types import Descriptor
from tests.control.conftest import StartRig
from tests.control.raw import PAGE_BYTES, RawLocal, chain, record
from tests.control.rig import Rig

NAMESPACE_ID = namespace_id(record().encode())


def put_bytes(rig: Rig, client: RawLocal, space: int, keys: list[bytes]) -> list[Descriptor]:
    """Store pages whose bytes follow from their place, and their checksums."""
    reservation, _, lent = client.reserve(space, keys)
    sums = b""
    with open(rig.tier.segments()[0].data_path, "r+b") as data:
        for at, (key, descriptor) in enumerate(zip(keys, lent, strict=True)):
            page = bytes([at]) * PAGE_BYTES
            data.seek(descriptor.offset_bytes)
            data.write(page)
            sums += page_checksum(page, NAMESPACE_ID, key).to_bytes(8, "little")
    client.commit(reservation, len(keys), checksums=sums)
    return list(client.acquire(space, keys, request=b"put", ttl_ms=1).pages().values())


def flip(rig: Rig, descriptor: Descriptor) -> None:
    """Damage one byte of a page where it rests."""
    with open(rig.tier.segments()[0].data_path, "r+b") as data:
        data.seek(descriptor.offset_bytes + 777)
        byte = data.read(1)[0]
        data.seek(descriptor.offset_bytes + 777)
        data.write(bytes([byte ^ 1]))


def report(client: RawLocal, space: int, key: bytes, descriptor: Descriptor) -> None:
    row = [space, key, descriptor.checksum, descriptor.generation]
    client.call(Type.RELEASE, [], [], [row])


def until_read(rig: Rig) -> None:
    """Wait until the worker has answered everything."""
    rig.until(lambda: rig.control.recheck.pending_count == 0)


def test_a_corrupt_page_is_dropped_counted_and_logged_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 3)
    pages = put_bytes(rig, client, space, keys)
    flip(rig, pages[1])
    with caplog.at_level(logging.ERROR, "nexuskv.control"):
        for _ in range(5):
            report(client, space, keys[1], pages[1])
        until_read(rig)
        report(client, space, keys[1], pages[1])
        until_read(rig)
    assert client.match(space, keys) == 1
    assert rig.counter("corrupt_pages") == 1
    assert rig.counter("corrupt_reports") == 6
    assert len(caplog.records) == 1
    assert keys[1].hex() in caplog.text


def test_what_followed_a_dropped_page_is_matched_again_when_it_comes_back(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 3)
    pages = put_bytes(rig, client, space, keys)
    flip(rig, pages[1])
    report(client, space, keys[1], pages[1])
    until_read(rig)
    client.put(space, [keys[1]], parent=keys[0])
    assert client.match(space, keys) == 3


def test_a_report_about_a_good_page_changes_nothing(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 3)
    pages = put_bytes(rig, client, space, keys)
    for key, page in zip(keys, pages, strict=True):
        report(client, space, key, page)
    until_read(rig)
    assert client.match(space, keys) == 3
    assert rig.counter("corrupt_pages") == 0


def test_a_corrupt_page_that_is_leased_keeps_its_slot_until_the_lease_ends(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    pages = put_bytes(rig, client, space, keys)
    client.acquire(space, keys, ttl_ms=5000)
    flip(rig, pages[0])
    report(client, space, keys[0], pages[0])
    until_read(rig)
    assert client.match(space, keys) == 0
    assert rig.gauges()["unlinked_slots"] == 1
    rig.advance(6.0)
    assert rig.gauges()["unlinked_slots"] == 0


@pytest.mark.parametrize("what", ["checksum", "generation", "key"])
def test_a_report_about_another_page_is_not_even_read(rig: Rig, what: str) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    (page,) = put_bytes(rig, client, space, keys)
    flip(rig, page)
    row = {"key": keys[0], "checksum": page.checksum, "generation": page.generation}
    row[what] = chain("b", 1)[0] if what == "key" else 12345
    client.call(Type.RELEASE, [], [], [[space, *row.values()]])
    until_read(rig)
    assert client.match(space, keys) == 1


def test_a_report_of_a_half_key_is_refused(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    with pytest.raises(ConfigError):
        client.call(Type.RELEASE, [], [], [[space, b"half", 1, 1]])


def test_a_flood_of_reports_is_bounded_and_loses_nothing_else(start_rig: StartRig) -> None:
    rig = start_rig(worker_queue_max=4)
    client = rig.local()
    space, keys = client.open(), chain("a", 60)
    pages = put_bytes(rig, client, space, keys)
    rows = [[space, k, p.checksum, p.generation] for k, p in zip(keys, pages, strict=True)]
    for _ in range(5):
        client.call(Type.RELEASE, [], [], rows)
    until_read(rig)
    assert rig.counter("worker_queue_full") > 0
    assert client.match(space, keys) == 60


def test_a_page_evicted_before_it_was_read_again_is_no_corruption(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    (page,) = put_bytes(rig, client, space, keys)
    flip(rig, page)
    with rig.blocked():
        client.send(Type.RELEASE, [], [], [[space, keys[0], page.checksum, page.generation]])
        client.send(Type.CLEAR, space)
    client.receive()
    client.receive()
    until_read(rig)
    assert rig.counter("corrupt_pages") == 0


def test_a_dropped_page_is_announced(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    (page,) = put_bytes(rig, client, space, keys)
    before = client.call(Type.SUBSCRIBE)[2]
    flip(rig, page)
    report(client, space, keys[0], page)
    until_read(rig)
    assert client.call(Type.SUBSCRIBE)[2] == before + 1
