"""Control planes that run in a thread of the test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.control.rig import Rig

StartRig = Callable[..., Rig]


@pytest.fixture
def start_rig(shm_dir: Path) -> Iterator[StartRig]:
    """Start control planes: `start_rig(leases_max=2)`. Every one is checked and closed."""
    started: list[Rig] = []

    def start(**settings: object) -> Rig:
        folder = shm_dir / str(len(started))
        folder.mkdir()
        rig = Rig(folder, **settings)
        started.append(rig)
        return rig

    yield start
    for rig in started:
        rig.close()


@pytest.fixture
def rig(start_rig: StartRig) -> Rig:
    """One with small defaults: 4 chunks of 1 MiB, pages of 64 KiB, so 64 pages."""
    return start_rig()
