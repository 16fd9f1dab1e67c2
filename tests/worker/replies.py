"""What an engine says, collected."""

import threading

from nexuskv.worker.commands import Result

WAIT_S = 10


class Replies:
    """Collects what the engine says."""

    def __init__(self) -> None:
        self._said: list[tuple[int, Result]] = []
        self._changed = threading.Condition()

    def __call__(self, sequence: int, result: Result) -> None:
        with self._changed:
            self._said.append((sequence, result))
            self._changed.notify_all()

    def wait(self, count: int) -> list[tuple[int, Result]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._said) >= count, WAIT_S)
            return list(self._said)
