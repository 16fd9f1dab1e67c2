"""What the worker says: parts of answers, counted, so that its end can wait for the last one."""

import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from nexuskv.worker.commands import Answer, News, Result

Reply: TypeAlias = Callable[[int, Result], None]
"""Takes an answer and the sequence of its command. Any thread."""

NEWS: Final = 0
"""The sequence of what answers nothing."""


class Answers:
    """Passes answers on. Thread-safe."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._changed = threading.Condition()
        self._owed = 0

    def owe(self, parts: int = 1) -> None:
        """So many answers are to come."""
        with self._changed:
            self._owed += parts

    def give(self, sequence: int, answer: Answer) -> None:
        """One of them."""
        self._reply(sequence, answer)
        with self._changed:
            self._owed -= 1
            self._changed.notify_all()

    def tell(self, news: News) -> None:
        """Say what nobody asked for."""
        self._reply(NEWS, news)

    def wait_all(self, timeout_s: float) -> bool:
        """Wait until nothing is owed; whether it is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._owed, timeout_s)
