from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from nexuskv.clock import ManualClock
from nexuskv.dataplane.fake import FakeTransport, Faults
from nexuskv.types import PageStatus

if TYPE_CHECKING:
    from tests.dataplane.conftest import MakeFiles, SegmentFiles

HIT, CORRUPT, LOST = PageStatus.HIT, PageStatus.CORRUPT, PageStatus.UNAVAILABLE
Opened = tuple[FakeTransport, "SegmentFiles", ManualClock]


@pytest.fixture
def opened(make_files: "MakeFiles") -> Iterator[Opened]:
    files, clock = make_files(8192, 4), ManualClock()
    with FakeTransport(files.open(writable=True), clock=clock) as transport:
        yield transport, files, clock


def test_dropped_pages_are_unavailable_and_the_rest_arrives(opened: Opened) -> None:
    transport, files, _ = opened
    transport.faults = Faults(drop={1})
    into = files.arena.buffers()
    assert transport.load(files.arena.pages(), into) == bytes([HIT, LOST, HIT, HIT])
    assert into[2] == files.arena.payloads[2]


def test_a_page_flipped_on_its_way_is_corrupt(opened: Opened) -> None:
    transport, files, _ = opened
    transport.faults = Faults(flip={0})
    into = files.arena.buffers()
    assert transport.load(files.arena.pages(), into) == bytes([CORRUPT, HIT, HIT, HIT])
    assert into[0] != files.arena.payloads[0]


def test_a_transfer_cut_half_way_loses_the_rest(opened: Opened) -> None:
    transport, files, _ = opened
    transport.faults = Faults(cut_after=2)
    statuses = transport.load(files.arena.pages(), files.arena.buffers())
    assert statuses == bytes([HIT, HIT, LOST, LOST])


def test_pages_delayed_past_the_deadline_are_unavailable(opened: Opened) -> None:
    transport, files, clock = opened
    transport.faults = Faults(delay_s=1.0)
    statuses = transport.load(files.arena.pages(), files.arena.buffers(), deadline_s=2.5)
    assert statuses == bytes([HIT, HIT, LOST, LOST])
    assert clock.now() == 4.0


def test_a_page_flipped_while_stored_fails_its_check(opened: Opened) -> None:
    transport, files, _ = opened
    arena = files.arena
    transport.faults = Faults(flip={3})
    stored = transport.store(arena.pages(), arena.payloads)
    checksum = int.from_bytes(stored.checksums[24:], "little")
    assert stored.statuses == bytes([PageStatus.STORED] * 4)
    transport.faults = Faults()
    pages = arena.pages([*arena.descriptors[:3], arena.other(3, checksum=checksum)])
    assert transport.check(pages) == bytes([HIT, HIT, HIT, CORRUPT])


def test_a_dropped_store_leaves_the_slot_alone(opened: Opened) -> None:
    transport, files, _ = opened
    transport.faults = Faults(drop={0})
    stored = transport.store(files.arena.pages(), [bytes(8192)] * 4)
    assert stored.statuses[0] == LOST
    assert files.arena.data[:8192] == files.arena.payloads[0]
