"""kill -9 at every step of copying to an ssd folder: a row never names bytes that are not there.

What kill -9 cannot show is a lost page cache: for that there is only the order of the calls.
"""

import errno
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nexuskv.errors import TransferFailed
from nexuskv.tiers.catalogue import Catalogue
from nexuskv.tiers.fake_disk import Fault, FaultyDisk
from nexuskv.tiers.record import RECORD_BYTES, decode
from tests.tiers.slab_parts import GEOMETRY, SLOT_BYTES, load, open_folder
from tests.tiers.ssd_child import FILES, SIZE_BYTES, Steps, content, copy_group

REPO = Path(__file__).parents[2]

Place = tuple[int, int]


def run_until_killed(folder: Path, seed: int, kill_after: int) -> list[str]:
    """What the child said before it was killed."""
    command = [sys.executable, "-m", "tests.tiers.ssd_child", str(folder)]
    command += [str(seed), str(kill_after)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.splitlines()


def follow(said: list[str], held: dict[Place, int]) -> set[Place]:
    """Apply what was said; returns the places whose last step was not answered."""
    unsure: set[Place] = set()
    for line in said:
        word, *numbers = line.split()
        if word == "drop":
            unsure.add((int(numbers[0]), int(numbers[1])))
        elif word == "put":
            place = (int(numbers[0]), int(numbers[1]))
            held[place] = int(numbers[2])
            unsure.discard(place)
    return unsure


def look(folder: Path) -> dict[Place, int]:
    """Every row, place → page number, after checking that the place holds that page's bytes."""
    found: dict[Place, int] = {}
    with (
        open_folder(folder, files=FILES) as slabs,
        Catalogue.open(
            slabs.catalogue_folder, geometry=GEOMETRY, files=lambda: slabs.files, start_over=False
        ) as catalogue,
    ):
        page = catalogue.rows(b"", 1000)
        assert catalogue.bad_rows == 0
        for at in range(len(page.places) // 8):
            record = decode(page.records[at * RECORD_BYTES :][:RECORD_BYTES])
            assert record is not None
            file = int.from_bytes(page.places[at * 8 : at * 8 + 4], "little")
            number = int.from_bytes(record.key, "big")
            assert load(slabs, file, record.slot, SIZE_BYTES) == content(number)
            found[file, record.slot] = number
    return found


@pytest.mark.parametrize("seed", [1])
def test_no_row_names_bytes_that_are_not_there_after_kills(tmp_path: Path, seed: int) -> None:
    folder, rng = tmp_path / "ssd", random.Random(seed)
    held: dict[Place, int] = {}
    for life in range(3):
        said = run_until_killed(folder, seed * 10 + life, kill_after=rng.randrange(2, 120))
        unsure = follow(said, held)
        found = look(folder)
        for place in set(held) | set(found):
            assert place in unsure or found.get(place) == held.get(place)
        held = found


@pytest.mark.parametrize("kill_after", [1, 4, 7, 12])
def test_kill_at_each_of_the_first_steps_leaves_a_folder_that_opens(
    tmp_path: Path, kill_after: int
) -> None:
    run_until_killed(tmp_path / "ssd", 5, kill_after)
    look(tmp_path / "ssd")


def test_failed_sync_leaves_no_row(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with open_folder(tmp_path / "ssd", files=FILES, disk=disk) as slabs:
        slabs.make(0, SLOT_BYTES)
        disk.plan("sync", Fault(errno.EIO))
        with (
            Catalogue.open(
                slabs.catalogue_folder,
                geometry=GEOMETRY,
                files=lambda: slabs.files,
                start_over=False,
            ) as catalogue,
            pytest.raises(TransferFailed),
        ):
            copy_group(slabs, catalogue, [(0, 1, 1), (0, 2, 2)], Steps(100))
    assert look(tmp_path / "ssd") == {}
