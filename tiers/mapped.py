"""Which processes have a file mapped now: the only ones that can write into it through memory.

Reads /proc. Processes of other users whose maps this one may not read are passed over: they are in
the trust of whoever runs both. Any thread.
"""

import os
from pathlib import Path

from nexuskv.tiers.owner import Process


def processes_mapping(path: Path) -> list[Process]:
    """The processes that map the file now, this one among them.

    Raises:
        OSError: the file is not there.
    """
    inode = f" {path.stat().st_ino} ".encode()
    name = os.fsencode(path.name)
    found: list[Process] = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        process = Process.of(int(entry))
        if process is not None and _maps(process.pid, inode, name):
            found.append(process)
    return found


def _maps(pid: int, inode: bytes, name: bytes) -> bool:
    lines = _read(Path(f"/proc/{pid}/maps"))
    if not lines:
        # A process whose first thread has ended shows its memory through the others only.
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            return False
        lines = b"".join(_read(Path(f"/proc/{pid}/task/{task}/maps")) for task in tasks[:2])
    # The name too: inode numbers are one filesystem's, and its device is not always shown right.
    return inode in lines and any(inode in row and name in row for row in lines.splitlines())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
