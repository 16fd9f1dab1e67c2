"""A process that copies pages to an ssd folder in the worker's order, until it is killed.

Usage: python -m tests.tiers.ssd_child FOLDER SEED KILL_AFTER. It says on stdout what became durable
and kills itself with SIGKILL after so many steps, wherever that is: between the writes of a group,
between data and sync, sync and rows, rows and answer, or in the middle of making a file.
"""

import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from nexuskv.tiers.catalogue import Catalogue, CatalogueRow
from nexuskv.tiers.disk import KernelDisk
from nexuskv.tiers.slabs import SlabFolder
from tests.tiers.slab_parts import GEOMETRY, SLOT_BYTES, open_folder, page_memory, record

FILES = 3
GROUP = 4
SIZE_BYTES = 9000


def content(number: int) -> bytes:
    """The bytes of page `number`."""
    return random.Random(number).randbytes(SIZE_BYTES)


class Steps:
    """Counts steps and dies at the last one."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


class MortalDisk(KernelDisk):
    """Takes a step before and after each write and sync."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def write(self, fd: int, data: memoryview, offset_bytes: int) -> int:
        self._steps.take()
        # Half a page is what a process killed in the middle of a write leaves.
        half = data.nbytes // 2 // 4096 * 4096
        if half:
            super().write(fd, data[:half], offset_bytes)
            self._steps.take()
        return super().write(fd, data, offset_bytes)

    def sync(self, fd: int) -> None:
        self._steps.take()
        super().sync(fd)
        self._steps.take()


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def copy_group(
    slabs: SlabFolder, catalogue: Catalogue, group: Iterable[tuple[int, int, int]], steps: Steps
) -> None:
    """Data, sync, rows: in this order."""
    rows = [CatalogueRow(file, slot, record(slot, number)) for file, slot, number in group]
    for file, slot, number in group:
        with page_memory(content(number)) as view:
            slabs.write_from(view, file_index=file, slot_index=slot, size_bytes=SIZE_BYTES)
    slabs.sync({file for file, _, _ in group})
    steps.take()
    catalogue.put(rows)
    steps.take()
    for file, slot, number in group:
        say("put", file, slot, number)


def numbers(seed: int) -> Iterator[int]:
    number = seed * 1_000_000
    while True:
        number += 1
        yield number


def main(folder: Path, seed: int, kill_after: int) -> None:
    steps = Steps(kill_after)
    number = numbers(seed)
    rng = random.Random(seed)
    with (
        open_folder(folder, files=FILES, disk=MortalDisk(steps)) as slabs,
        Catalogue.open(
            slabs.catalogue_folder,
            geometry=GEOMETRY,
            files=lambda: slabs.files,
            start_over=False,
        ) as catalogue,
    ):
        say("open")
        while True:
            for file in set(range(FILES)) - set(slabs.files):
                slabs.make(file, SLOT_BYTES)
            places = [(rng.randrange(FILES), rng.randrange(15)) for _ in range(GROUP)]
            places = sorted(set(places))
            # A row goes durably before its slot is written again.
            for place in places:
                say("drop", *place)
            catalogue.delete(places)
            steps.take()
            copy_group(
                slabs, catalogue, [(file, slot, next(number)) for file, slot in places], steps
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
