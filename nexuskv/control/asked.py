"""Commands that the data plane has not answered yet, and what is to happen when it does.

One table for everybody who asks: tokens are never used twice. Control thread only.
"""

from collections.abc import Callable
from itertools import count
from typing import TypeAlias

from nexuskv.control.counters import Counters
from nexuskv.worker.commands import (
    Command,
    CommandQueue,
    CopiedIn,
    CopiedOut,
    CopiesChecked,
    CopiesDropped,
    NamespaceSaved,
    PagesChecked,
    RowsLoaded,
)

TokenAnswer: TypeAlias = (
    PagesChecked
    | CopiedOut
    | CopiedIn
    | CopiesChecked
    | CopiesDropped
    | NamespaceSaved
    | RowsLoaded
)
Then: TypeAlias = Callable[[TokenAnswer], None]


class Asked:
    """Sends commands that carry a token and finds who waits for an answer."""

    def __init__(self, *, worker: CommandQueue, counters: Counters) -> None:
        self._worker = worker
        self._counters = counters
        self._tokens = count(1)
        self._open: dict[int, tuple[int, Then]] = {}  # pages still unanswered, and who waits

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, make: Callable[[int], Command], then: Then, *, page_count: int = 1) -> bool:
        """Send a command; `then` is called with each of its answers.

        Args:
            make: the command for a token.
            then: takes the answer, once, or for a `CopyIn` several times.
            page_count: pages of a `CopyIn`; it is over when all have been answered.

        Returns:
            False, and `then` is never called, when the data plane takes no command now.
        """
        token = next(self._tokens)
        if not self._worker.submit(make(token)):
            self._counters.add("worker_queue_full")
            return False
        self._open[token] = (page_count, then)
        return True

    def answered(self, answer: TokenAnswer) -> None:
        """Pass an answer on."""
        left, then = self._open[answer.token]
        left -= len(answer.statuses) if isinstance(answer, CopiedIn) else left
        if left > 0:
            self._open[answer.token] = (left, then)
        else:
            del self._open[answer.token]
        then(answer)
