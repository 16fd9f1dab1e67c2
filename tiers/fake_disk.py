"""A disk that fails when it is told to, in front of the real one. For tests."""

import os
import threading
from collections import deque
from typing import Final, Literal, NamedTuple, TypeAlias

from nexuskv.tiers.disk import Disk, KernelDisk

Call: TypeAlias = Literal["read", "write", "sync"]


class Fault(NamedTuple):
    """What one call does instead: raise this errno, or move at most so many bytes."""

    error: int = 0
    most_bytes: int = 0


class FaultyDisk:
    """Passes calls on, but for the next ones that faults are planned for. Any thread."""

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk: Final = disk or KernelDisk()
        self._guard = threading.Lock()
        self._planned: dict[Call, deque[Fault]] = {
            "read": deque(),
            "write": deque(),
            "sync": deque(),
        }
        self.calls: list[Call] = []

    def plan(self, call: Call, *faults: Fault) -> None:
        """Let the next calls of this kind fail so, in this order; then they work again."""
        with self._guard:
            self._planned[call].extend(faults)

    def read(self, fd: int, into: memoryview, offset_bytes: int) -> int:
        """See `Disk.read`."""
        return self._disk.read(fd, self._pass("read", into), offset_bytes)

    def write(self, fd: int, data: memoryview, offset_bytes: int) -> int:
        """See `Disk.write`."""
        return self._disk.write(fd, self._pass("write", data), offset_bytes)

    def sync(self, fd: int) -> None:
        """See `Disk.sync`."""
        self._pass("sync", memoryview(b""))
        self._disk.sync(fd)

    def _pass(self, call: Call, view: memoryview) -> memoryview:
        with self._guard:
            self.calls.append(call)
            fault = self._planned[call].popleft() if self._planned[call] else None
        if fault is None:
            return view
        if fault.error:
            raise OSError(fault.error, os.strerror(fault.error))
        return view[: fault.most_bytes]
