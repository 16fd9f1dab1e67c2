"""Control planes that run in a thread of the test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.control.rig import Rig
from tests.control.two_tiers import TwoTiers

StartRig = Callable[..., Rig]
StartTiers = Callable[..., TwoTiers]


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


@pytest.fixture
def start_tiers(shm_dir: Path) -> Iterator[StartTiers]:
    """Start control planes with an ssd tier: `start_tiers(ssd_policy="on_evict", disk=disk)`."""
    started: list[TwoTiers] = []

    def start(folder: Path | None = None, **settings: Any) -> TwoTiers:
        if folder is None:
            folder = shm_dir / f"two {len(started)}"
            folder.mkdir()
        rig = TwoTiers(folder, **settings)
        started.append(rig)
        return rig

    yield start
    for rig in started:
        rig.close()


@pytest.fixture
def two(start_tiers: StartTiers) -> TwoTiers:
    """64 pages of host memory, 240 of ssd."""
    return start_tiers()
