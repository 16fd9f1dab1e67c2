"""One background thread a process, started when first needed: it does chores when they are due.

What the chores are it does not know: `chores` does what is due and answers when to come back. The
thread never holds a lock while it works, so a caller never waits for it. Ends at `close`.
"""

import math
import threading
from collections.abc import Callable

from nexuskv.clock import Clock


class Keeper:
    """A thread with an alarm clock."""

    def __init__(self, chores: Callable[[], float], *, clock: Clock) -> None:
        self._chores = chores
        self._clock = clock
        self._alarm = threading.Condition(threading.Lock())
        self._wake_at_s = math.inf
        self._thread: threading.Thread | None = None
        self._closed = False

    def wake_by(self, at_s: float) -> None:
        """Have the chores done at `at_s` or earlier. Cheap when an earlier alarm is set."""
        if at_s >= self._wake_at_s:
            return
        with self._alarm:
            if at_s >= self._wake_at_s or self._closed:
                return
            self._wake_at_s = at_s
            if self._thread is None and not self._start():
                self._wake_at_s = math.inf
            self._alarm.notify()

    def close(self, *, timeout_s: float) -> bool:
        """End the thread after the chore it is at; whether it ended in `timeout_s`. Idempotent."""
        with self._alarm:
            self._closed = True
            self._wake_at_s = -math.inf
            self._alarm.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _start(self) -> bool:
        """Start the thread; False when the system has none left: the next alarm tries again."""
        thread = threading.Thread(target=self._run, name="nexuskv-keeper", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while self._sleep():
            again_s = self._chores()
            with self._alarm:
                # An alarm set meanwhile stays if it is the earlier one.
                self._wake_at_s = min(self._wake_at_s, again_s)

    def _sleep(self) -> bool:
        """Wait until the alarm; False at the end."""
        with self._alarm:
            while not self._closed:
                left_s = self._wake_at_s - self._clock.now()
                if left_s <= 0:
                    self._wake_at_s = math.inf
                    return True
                self._alarm.wait(None if left_s == math.inf else min(left_s, threading.TIMEOUT_MAX))
        return False
