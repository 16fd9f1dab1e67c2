"""Clocks: the real one goes forward, the manual one only when told."""

import pytest

from nexuskv.clock import ManualClock, MonotonicClock


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
