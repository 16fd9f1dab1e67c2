"""`nexuskv bench start`: from nothing to the first answer of a daemon, and the cost of imports.

The time of a start runs from before the process is made to the answer to a first ping, Python's own
start in it. The pool is sparse: its size should not matter.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Final

from nexuskv import connect
from nexuskv.config import GIB, format_size, load_config
from nexuskv.errors import NexusError
from nexuskv.tools.bench.report import Row, row
from nexuskv.tools.daemon_process import DaemonProcess, scratch_folder

START_S: Final = 1.0
IMPORT_S: Final = 0.05
SIZES: Final = (GIB, 64 * GIB)
ROOM_SHARE: Final = 0.9  # of what the file system has left: more would be refused
IMPORTS: Final = ("nexuskv", "nexuskv.index.radix", "nexuskv.client.store")


def rows(quick: bool) -> list[Row]:
    """All rows; `quick` takes fewer rounds."""
    rounds = 3 if quick else 9
    found = []
    with scratch_folder("bench") as folder:
        room = os.statvfs(folder)
        most = int(room.f_bavail * room.f_frsize * ROOM_SHARE) // GIB * GIB
        for size_bytes in sorted({min(size, max(most, GIB)) for size in SIZES}):
            times_s = [_start(folder, size_bytes) for _ in range(rounds)]
            name = f"start {format_size(size_bytes)}"
            found.append(row(name, median(times_s), "s", START_S, target=1.0, worst=max(times_s)))
    for module in IMPORTS:
        times_s = [_import(module) for _ in range(rounds)]
        name = f"import {module}"
        found.append(row(name, median(times_s), "s", IMPORT_S, target=1.0, worst=max(times_s)))
    return found


def _start(folder: Path, size_bytes: int) -> float:
    """Seconds from nothing to the first answer."""
    daemon = DaemonProcess(folder, flags={"host_memory": size_bytes})
    start_s = time.perf_counter()
    with daemon, connect(daemon.url, load_config(env={}).config) as store:
        store.ping()
        return time.perf_counter() - start_s


def _import(module: str) -> float:
    """Seconds that an import takes in a fresh interpreter, without the interpreter's own start."""
    code = f"import time; s = time.perf_counter(); import {module}; print(time.perf_counter() - s)"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NexusError(f"import {module} failed: {done.stderr}")
    return float(done.stdout)
