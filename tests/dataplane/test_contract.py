"""The contract of `Transport`, held by every transport: real ones and the fake around one."""

import math
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from nexuskv.clock import ManualClock
from nexuskv.dataplane.batch import Pages
from nexuskv.dataplane.checksum import page_checksum
from nexuskv.dataplane.fake import FakeTransport
from nexuskv.dataplane.transport import Transport
from nexuskv.errors import ConfigError, ProtocolError, TransferFailed
from nexuskv.types import PageStatus

if TYPE_CHECKING:
    from tests.dataplane.conftest import MakeFiles, SegmentFiles

PAST_S = -1.0
NAMESPACE_ID = bytes(range(16))


@pytest.fixture(params=["shm", "fake"])
def opened(
    request: pytest.FixtureRequest, make_files: "MakeFiles"
) -> "Iterator[tuple[Transport, SegmentFiles]]":
    """A transport to four pages of 8 KiB, and the files behind it."""
    files = make_files(8192, 4)
    transport: Transport = files.open(writable=True)
    if request.param == "fake":
        transport = FakeTransport(transport, clock=ManualClock())
    with transport:
        yield transport, files


def test_load_delivers_the_committed_bytes(opened: "tuple[Transport, SegmentFiles]") -> None:
    transport, files = opened
    into = files.arena.buffers()
    assert transport.load(files.arena.pages(), into) == bytes([PageStatus.HIT] * 4)
    assert into == files.arena.payloads


def test_load_fills_a_page_of_several_regions_in_order(
    opened: "tuple[Transport, SegmentFiles]",
) -> None:
    transport, files = opened
    k, v = bytearray(4096), bytearray(4096)
    pages = files.arena.pages(files.arena.descriptors[:1])
    assert transport.load(pages, [[k, v]]) == bytes([PageStatus.HIT])
    assert k + v == files.arena.payloads[0]


def test_load_answers_for_each_page_on_its_own(opened: "tuple[Transport, SegmentFiles]") -> None:
    transport, files = opened
    arena = files.arena
    arena.flip(1)
    arena.set_generation(arena.descriptors[2], 1)
    pages = arena.pages([*arena.descriptors[:3], None])
    assert transport.load(pages, arena.buffers()) == bytes(
        [PageStatus.HIT, PageStatus.CORRUPT, PageStatus.STALE, PageStatus.MISS]
    )


def test_what_was_stored_is_loaded_under_the_checksum_returned(
    opened: "tuple[Transport, SegmentFiles]",
) -> None:
    transport, files = opened
    arena = files.arena
    payloads = [bytes([at]) * 8192 for at in range(4)]
    stored = transport.store(arena.pages(), payloads)
    assert stored.statuses == bytes([PageStatus.STORED] * 4)
    checksums = struct.unpack("<4Q", stored.checksums)
    assert checksums[0] == page_checksum(payloads[0], NAMESPACE_ID, arena.keys[0])
    descriptors = [arena.other(at, checksum=checksum) for at, checksum in enumerate(checksums)]
    into = arena.buffers()
    assert transport.load(arena.pages([*descriptors]), into) == bytes([PageStatus.HIT] * 4)
    assert into == payloads


def test_store_skips_what_names_no_page(opened: "tuple[Transport, SegmentFiles]") -> None:
    transport, files = opened
    pages = files.arena.pages([None, files.arena.descriptors[1]])
    stored = transport.store(pages, [b"", bytes(8192)])
    assert stored.statuses == bytes([PageStatus.MISS, PageStatus.STORED])
    assert stored.checksums[:8] == bytes(8)


def test_check_judges_pages_in_place(opened: "tuple[Transport, SegmentFiles]") -> None:
    transport, files = opened
    files.arena.flip(3)
    assert transport.check(files.arena.pages()) == bytes([PageStatus.HIT] * 3 + [4])


@pytest.mark.parametrize("call", ["load", "store", "check"])
def test_nothing_begins_after_the_deadline(
    opened: "tuple[Transport, SegmentFiles]", call: str
) -> None:
    transport, files = opened
    pages, buffers = files.arena.pages(), files.arena.buffers()
    if call == "load":
        statuses = transport.load(pages, buffers, deadline_s=PAST_S)
    elif call == "store":
        statuses = transport.store(pages, buffers, deadline_s=PAST_S).statuses
    else:
        statuses = transport.check(pages, deadline_s=PAST_S)
    assert statuses == bytes([PageStatus.UNAVAILABLE] * 4)
    assert buffers == files.arena.buffers()
    assert files.arena.data[:8192] == files.arena.payloads[0]


def test_an_empty_batch_is_fine(opened: "tuple[Transport, SegmentFiles]") -> None:
    transport, _ = opened
    nothing = Pages(b"", b"", 32, NAMESPACE_ID)
    assert transport.load(nothing, []) == transport.check(nothing) == b""
    assert transport.store(nothing, [], deadline_s=math.inf) == (b"", b"")


def test_the_callers_mistakes_raise_before_a_byte_moves(
    opened: "tuple[Transport, SegmentFiles]",
) -> None:
    transport, files = opened
    into = [*files.arena.buffers()[:3], bytearray(1)]
    with pytest.raises(ConfigError):
        transport.load(files.arena.pages(), into)
    assert into[0] == bytes(8192)


def test_a_descriptor_outside_the_segment_raises_before_a_byte_moves(
    opened: "tuple[Transport, SegmentFiles]",
) -> None:
    transport, files = opened
    pages = files.arena.pages(
        [files.arena.descriptors[0], files.arena.other(1, offset_bytes=1 << 30)]
    )
    into = files.arena.buffers()[:2]
    with pytest.raises(ProtocolError):
        transport.load(pages, into)
    assert into[0] == bytes(8192)


def test_a_closed_transport_refuses(opened: "tuple[Transport, SegmentFiles]") -> None:
    transport, files = opened
    transport.close()
    transport.close()
    with pytest.raises(TransferFailed):
        transport.load(files.arena.pages(), files.arena.buffers())
