"""Clocks: the real one goes forward, the manual one only when told."""

import ast
from pathlib import Path

import pytest

from nexuskv.clock import ManualClock, MonotonicClock

ROOT = Path(__file__).parents[1]


def test_the_real_clock_never_goes_back() -> None:
    clock = MonotonicClock()
    times = [clock.now() for _ in range(1000)]
    assert times == sorted(times)


def test_the_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(1.5)
    assert clock.now() == 6.5


def test_the_manual_clock_refuses_to_go_back() -> None:
    with pytest.raises(ValueError, match="back"):
        ManualClock().advance(-0.1)


@pytest.mark.parametrize("folder", ["control", "worker", "tiers", "index"])
def test_no_part_of_the_daemon_reads_the_wall_clock(folder: str) -> None:
    """So that setting it, back or forth, changes nothing: leases, pins and waits count seconds."""
    wall = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
    found: list[str] = []
    for path in (ROOT / "nexuskv" / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in wall:
                found.append(f"{path.name}:{node.lineno}")
    assert found == []
