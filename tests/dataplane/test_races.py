"""What holds while somebody else writes to the same memory: no order of events gives wrong bytes.

Each test repeats a race until the event it is about was seen, up to a deadline.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from nexuskv.dataplane.checksum import page_checksum
from nexuskv.errors import TransferFailed
from nexuskv.types import PageStatus

if TYPE_CHECKING:
    from tests.dataplane.conftest import MakeArena, MakeFiles

PAGE_BYTES = 1 << 20
WAIT_S = 20.0
NAMESPACE_ID = bytes(range(16))


@contextmanager
def _again_and_again(work: Callable[[], object]) -> Generator[None, None, None]:
    """Another thread that does `work`, which gives the GIL up, over and over."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _until(seen: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        if seen():
            return True
    return False


def _scribbler(address: int, length: int) -> Callable[[], object]:
    """Fill memory with one value and then another."""

    def scribble() -> None:
        for value in (1, 2):
            ctypes.memset(address, value, length)

    return scribble


def test_a_source_that_changes_while_it_is_stored_fails_its_check(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena(PAGE_BYTES, 1)
    source = bytearray(PAGE_BYTES)
    segment = arena.segment(moving)

    def torn_page_is_caught() -> bool:
        _, checksums = moving.store(segment, arena.pages(), [source])
        stored = arena.other(0, checksum=int.from_bytes(checksums, "little"))
        return bool(moving.check(segment, arena.pages([stored]))[0] == PageStatus.CORRUPT)

    with _again_and_again(_scribbler(moving.address_of(source), PAGE_BYTES)):
        assert _until(torn_page_is_caught)


def test_a_destination_that_changes_while_it_is_filled_is_no_hit(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena(PAGE_BYTES, 1)
    into = bytearray(PAGE_BYTES)

    def damage_is_caught() -> bool:
        statuses = moving.load(arena.segment(moving), arena.slots(moving), arena.pages(), [into])
        return bool(statuses[0] == PageStatus.CORRUPT)

    with _again_and_again(_scribbler(moving.address_of(into), PAGE_BYTES)):
        assert _until(damage_is_caught)


def test_a_slot_given_away_during_the_copy_is_stale_and_never_corrupt(
    moving: ModuleType, make_arena: "MakeArena"
) -> None:
    arena = make_arena(PAGE_BYTES, 1)
    (descriptor,) = arena.descriptors
    arena.keys *= 8
    arena.data[PAGE_BYTES - 1] = 1
    descriptor = replace(
        descriptor, checksum=page_checksum(arena.data[:PAGE_BYTES], NAMESPACE_ID, arena.keys[0])
    )
    payload = arena.data[:PAGE_BYTES]
    pages = arena.pages([descriptor] * 8)  # one slot, read for long enough to be given away
    into = [bytearray(PAGE_BYTES) for _ in range(8)]
    segment, slots = arena.segment(moving), arena.slots(moving)
    seen: set[int] = set()

    def give_away_after_the_first_page() -> None:
        while not into[0][-1]:
            pass
        # The order of a daemon: the header changes before a byte does.
        arena.set_generation(descriptor, 1)
        ctypes.memset(segment.address, 0, PAGE_BYTES)

    def hit_and_stale_were_seen() -> bool:
        arena.set_generation(descriptor, descriptor.generation)
        arena.data[:PAGE_BYTES] = payload
        into[0][-1] = 0
        other = threading.Thread(target=give_away_after_the_first_page)
        other.start()
        statuses = moving.load(segment, slots, pages, into)
        other.join()
        seen.update(statuses)
        for status, page in zip(statuses, into, strict=True):
            assert status != PageStatus.HIT or page == payload
        return {PageStatus.HIT, PageStatus.STALE} <= seen

    assert _until(hit_and_stale_were_seen)
    for _ in range(20):
        hit_and_stale_were_seen()
    assert PageStatus.CORRUPT not in seen


def test_closing_a_segment_lets_running_copies_finish(make_files: "MakeFiles") -> None:
    files = make_files(PAGE_BYTES, 4)
    pages, into = files.arena.pages(), files.arena.buffers()
    segment = files.open()
    started = threading.Event()
    seen: list[bytes] = []

    def load_again_and_again() -> None:
        while True:
            seen.append(segment.load(pages, into))
            started.set()

    def load_until_closed() -> None:
        with pytest.raises(TransferFailed, match="closed"):
            load_again_and_again()

    reader = threading.Thread(target=load_until_closed)
    reader.start()
    assert started.wait(WAIT_S)
    segment.close()
    reader.join()
    assert set(seen) == {bytes([PageStatus.HIT] * 4)}


def test_many_threads_load_through_one_segment(make_files: "MakeFiles") -> None:
    files = make_files(8192, 64)
    results: list[bytes] = []
    with files.open() as segment:

        def load() -> None:
            into = files.arena.buffers()
            for _ in range(20):
                results.append(segment.load(files.arena.pages(), into, threads=2))

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(results) == {bytes([PageStatus.HIT] * 64)}
    assert len(results) == 80
