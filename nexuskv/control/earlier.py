"""Processes that an earlier run of the daemon dealt with, watched until they have ended (I14).

They may hold descriptors that the earlier run handed out; only their end proves that nothing of
theirs writes any more. Control loop only.
"""

import errno
import logging
import os
from collections.abc import Callable

from nexuskv.control.loop import READ, Loop
from nexuskv.tiers.owner import Process

_LOG = logging.getLogger("nexuskv.control")


class EarlierProcesses:
    """One pidfd a process, whatever number of things wait for its end."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._pidfds: dict[Process, int] = {}
        self._waiting: dict[Process, list[Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def when_ended(self, process: Process, then: Callable[[], None]) -> None:
        """Call `then` once the process has ended: at once if it has."""
        waiting = self._waiting.get(process)
        if waiting is not None:
            waiting.append(then)
            return
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError as exc:
            if exc.errno == errno.ESRCH or Process.of(process.pid) != process:
                then()
            else:
                _LOG.error("cannot watch process %d, its slots stay apart: %s", process.pid, exc)
            return
        # Compared once the number is pinned: it may have been given to another process since.
        if Process.of(process.pid) != process:
            os.close(pidfd)
            then()
            return
        self._pidfds[process] = pidfd
        self._waiting[process] = [then]
        self._loop.watch(pidfd, READ, lambda _events: self._ended(process))

    def close(self) -> None:
        """Stop watching; what waits is not called. Idempotent."""
        for process in list(self._pidfds):
            self._forget(process)

    def _ended(self, process: Process) -> None:
        for then in self._forget(process):
            then()

    def _forget(self, process: Process) -> list[Callable[[], None]]:
        pidfd = self._pidfds.pop(process)
        self._loop.forget(pidfd)
        os.close(pidfd)
        return self._waiting.pop(process)
