import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nexuskv.dataplane import native
from nexuskv.dataplane.shm import SegmentMap
from nexuskv.errors import ConfigError, ProtocolError, TransferFailed
from nexuskv.types import Descriptor, PageStatus

if TYPE_CHECKING:
    from tests.dataplane.conftest import MakeFiles

WAIT_S = 20.0
CHUNK_BYTES = 1 << 20


def _payloads(page_bytes: int, count: int) -> list[bytes]:
    return [bytes([at + 1]) * page_bytes for at in range(count)]


@pytest.mark.parametrize("writable", [False, True], ids=["read-only", "writable"])
def test_pages_of_another_process_files_are_loaded(make_files: "MakeFiles", writable: bool) -> None:
    files = make_files(8192, 4)
    into = files.arena.buffers()
    with files.open(writable=writable) as segment:
        assert segment.load(files.arena.pages(), into) == bytes([PageStatus.HIT] * 4)
    assert into == files.arena.payloads


def test_stored_pages_are_seen_through_another_mapping(make_files: "MakeFiles") -> None:
    files = make_files(8192, 2)
    payloads = _payloads(8192, 2)
    with files.open(writable=True) as segment:
        stored = segment.store(files.arena.pages(), payloads)
    assert stored.statuses == bytes([PageStatus.STORED] * 2)
    assert files.arena.data[:16384] == b"".join(payloads)


def test_check_reports_the_damaged_page(make_files: "MakeFiles") -> None:
    files = make_files(8192, 2)
    files.arena.flip(1)
    with files.open() as segment:
        statuses = segment.check(files.arena.pages())
    assert statuses == bytes([PageStatus.HIT, PageStatus.CORRUPT])


def test_a_read_only_segment_refuses_stores(make_files: "MakeFiles") -> None:
    files = make_files(8192, 1)
    with files.open() as segment, pytest.raises(ConfigError, match="reading only"):
        segment.store(files.arena.pages(), _payloads(8192, 1))


def test_a_view_shows_the_page_in_place_and_read_only(make_files: "MakeFiles") -> None:
    files = make_files(8192, 2)
    with files.open(writable=True) as segment:
        view = segment.page_view(files.arena.descriptors[1])
        assert view.readonly
        assert view == files.arena.payloads[1]
        view.release()


def test_a_view_outlives_close(make_files: "MakeFiles") -> None:
    files = make_files(8192, 1)
    segment = files.open()
    view = segment.page_view(files.arena.descriptors[0])
    segment.close()
    assert view == files.arena.payloads[0]


def test_the_last_view_of_a_closed_segment_unmaps_it(make_files: "MakeFiles") -> None:
    files = make_files(8192, 1)
    segment = files.open()
    view = segment.page_view(files.arena.descriptors[0])
    mapped = _mappings(files.spec.data_path)
    segment.close()
    del segment
    assert _mappings(files.spec.data_path) == mapped
    del view
    assert _mappings(files.spec.data_path) == mapped - 1


def _mappings(path: str) -> int:
    return Path("/proc/self/maps").read_text().count(path)


def test_close_is_idempotent_and_ends_every_use(make_files: "MakeFiles") -> None:
    files = make_files(8192, 1)
    segment = files.open(writable=True)
    segment.close()
    segment.close()
    for call in (
        lambda: segment.load(files.arena.pages(), files.arena.buffers()),
        lambda: segment.store(files.arena.pages(), _payloads(8192, 1)),
        lambda: segment.check(files.arena.pages()),
        lambda: segment.page_view(files.arena.descriptors[0]),
        lambda: segment.generation(files.arena.descriptors[0]),
    ):
        with pytest.raises(TransferFailed, match="closed"):
            call()


def test_generation_follows_the_slot_table(make_files: "MakeFiles") -> None:
    files = make_files(400_000, 5)
    with files.open() as segment:
        for descriptor in files.arena.descriptors:
            assert segment.generation(descriptor) == descriptor.generation
        files.arena.set_generation(files.arena.descriptors[3], 99)
        assert segment.generation(files.arena.descriptors[3]) == 99


@pytest.mark.parametrize(
    "descriptor",
    [
        Descriptor(7, 4096, 8192, 0, 0),
        Descriptor(7, 0, 0, 0, 0),
        Descriptor(7, 1 << 30, 8192, 0, 0),
        Descriptor(8, 0, 8192, 0, 0),
    ],
    ids=["between-slots", "empty", "past-end", "other-segment"],
)
def test_generation_of_no_slot_is_refused(make_files: "MakeFiles", descriptor: Descriptor) -> None:
    files = make_files(8192, 1)
    with files.open() as segment, pytest.raises(ProtocolError):
        segment.generation(descriptor)


@pytest.mark.parametrize(
    "descriptor",
    [Descriptor(7, (1 << 20) - 4096, 8192, 0, 0), Descriptor(8, 0, 8192, 0, 0)],
    ids=["past-end", "other-segment"],
)
def test_a_view_outside_the_segment_is_refused(
    make_files: "MakeFiles", descriptor: Descriptor
) -> None:
    files = make_files(8192, 1)
    with files.open() as segment, pytest.raises(ProtocolError, match="not in segment"):
        segment.page_view(descriptor)


def test_errors_tell_the_daemons_mistakes_from_the_callers(make_files: "MakeFiles") -> None:
    files = make_files(8192, 1)
    outside = files.arena.pages([files.arena.other(0, offset_bytes=1 << 30)])
    with files.open() as segment:
        with pytest.raises(ProtocolError):
            segment.load(outside, files.arena.buffers())
        with pytest.raises(ConfigError):
            segment.load(files.arena.pages(), [bytearray(1)])
        with pytest.raises(ConfigError):
            segment.load(files.arena.pages(), [bytes(8192)])


@pytest.mark.parametrize("which", ["data_path", "table_path"])
def test_a_missing_file_is_a_failed_transfer(make_files: "MakeFiles", which: str) -> None:
    files = make_files()
    Path(getattr(files.spec, which)).unlink()
    with pytest.raises(TransferFailed, match="No such file"):
        files.open()


@pytest.mark.parametrize("which", ["data_path", "table_path"])
def test_a_file_shorter_than_announced_is_never_mapped(make_files: "MakeFiles", which: str) -> None:
    files = make_files()
    os.truncate(getattr(files.spec, which), 4096)
    with pytest.raises(ProtocolError, match="has 4096 bytes"):
        files.open()


def test_a_link_in_place_of_a_segment_is_not_followed(make_files: "MakeFiles") -> None:
    files = make_files()
    path = Path(files.spec.data_path)
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    with pytest.raises(TransferFailed):
        files.open()


def test_something_that_is_no_file_is_refused(make_files: "MakeFiles") -> None:
    spec = replace(make_files().spec, data_path="/dev/null")
    with pytest.raises(ProtocolError, match="no regular file"):
        SegmentMap.open(spec, writable=False)


@pytest.mark.parametrize("writable", [False, True], ids=["read-only", "writable"])
def test_chunks_named_by_a_load_are_populated_and_no_others(
    make_files: "MakeFiles", writable: bool
) -> None:
    files = make_files(400_000, 6)  # two pages a chunk
    arena = files.arena
    pages = arena.pages([None, arena.descriptors[2], None])
    with files.open(writable=writable) as segment:
        segment.load(pages, arena.buffers()[:3])
        assert segment.wait_populated(WAIT_S)
        with segment.page_view(arena.descriptors[0]) as first:
            address = native.address_of(first)
        assert [_is_mapped(address + chunk * CHUNK_BYTES) for chunk in range(3)] == [
            False,
            True,
            False,
        ]


def _is_mapped(address: int) -> bool:
    """Whether this process has page table entries for the whole chunk at `address`."""
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        entries = os.pread(file.fileno(), CHUNK_BYTES // 4096 * 8, address // 4096 * 8)
    return all(entry >> 63 for entry in memoryview(entries).cast("Q"))


def test_a_segment_never_named_has_no_thread(make_files: "MakeFiles") -> None:
    before = threading.active_count()
    with make_files().open():
        assert threading.active_count() == before


def test_many_views_are_those_of_each_page(make_files: "MakeFiles") -> None:
    files = make_files(8192, 3)
    arena = files.arena
    joined = arena.descriptors[2].encode() + bytes(32) + arena.descriptors[0].encode()
    with files.open() as segment:
        views = segment.page_views(joined)
        assert views == [arena.payloads[2], None, arena.payloads[0]]
        del views


def test_unchanged_is_false_once_one_slot_changed_owner(make_files: "MakeFiles") -> None:
    files = make_files(8192, 3)
    arena = files.arena
    joined = b"".join(d.encode() for d in arena.descriptors) + bytes(32)
    with files.open() as segment:
        assert segment.unchanged(joined)
        arena.set_generation(arena.descriptors[1], 1)
        assert not segment.unchanged(joined)
