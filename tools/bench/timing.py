"""How benchmarks take time: alternating rounds, medians, and a busy Python thread beside them."""

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, Self

ALONE_S: Final = 0.1


def alternate(
    rounds: int, *actions: Callable[[int], object], at_a_time: int = 1
) -> list[list[float]]:
    """Run each action once a round, in turn, and time it: one list of seconds an action.

    Actions get the round's number. Taking turns lets a machine that slows down slow all of them;
    every other turn the order is reversed, so that none always follows the same one. With
    `at_a_time` an action runs so many rounds before it is the next one's turn: what another process
    answers is then not measured for how that process wakes.
    """
    times_s: list[list[float]] = [[] for _ in actions]
    numbered = list(enumerate(actions))
    for turn in range(0, rounds, at_a_time):
        for at, action in numbered if turn // at_a_time % 2 else reversed(numbered):
            for number in range(turn, min(turn + at_a_time, rounds)):
                start_s = time.perf_counter()
                action(number)
                times_s[at].append(time.perf_counter() - start_s)
    return times_s


def percentile(times_s: Sequence[float], share: float) -> float:
    """The value below which `share` of the times lie."""
    ordered = sorted(times_s)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class BusyThread:
    """A thread that does nothing but count in Python, as an engine's own threads keep the GIL busy.

    A context manager. `rate` is what it counts a second while the block's own code runs.
    """

    def __init__(self) -> None:
        self._count = 0
        self._on = True
        self._thread = threading.Thread(target=self._run, name="busy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False
        self._thread.join()

    def rate(self, during: Callable[[], object]) -> float:
        """Counts a second while `during` runs in the calling thread."""
        start_count, start_s = self._count, time.perf_counter()
        during()
        return (self._count - start_count) / (time.perf_counter() - start_s)

    def rate_alone(self) -> float:
        """Counts a second while the calling thread only waits."""
        waits = threading.Event()
        return self.rate(lambda: waits.wait(ALONE_S))

    def rates(self, rounds: int, during: Callable[[], object]) -> tuple[float, float]:
        """Counts a second beside `during` and alone, taken in turns; medians."""
        beside: list[float] = []
        alone: list[float] = []
        for _ in range(rounds):
            alone.append(self.rate_alone())
            beside.append(self.rate(during))
        return median(beside), median(alone)

    def _run(self) -> None:
        while self._on:
            self._count += 1
