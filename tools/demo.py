"""The demo: a daemon, several client processes, a real request trace, every byte checked.

Host memory is small and the rest lies on disk. In the middle the daemon is killed and started
again, and what it held then is asked for once more. Owns the processes and their folders; all are
gone when the context of `running` ends.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from nexuskv import connect
from nexuskv.client.store import Store
from nexuskv.config import GIB, MIB, load_config
from nexuskv.errors import NexusError, OutOfSpace
from nexuskv.tools import replay
from nexuskv.tools.daemon_process import DaemonProcess, disk_folder, scratch_folder
from nexuskv.tools.demo_client import NUMBER_BYTES, Client, Tally
from nexuskv.tools.progress import Progress
from nexuskv.tools.trace import Request, read_trace

CLIENTS: Final = 3
GRACE_S: Final = 60.0  # for the requests that run when the time is over, and for a slow start
MEMORY_BYTES: Final = 384 * MIB
MEMORY_LEAST_BYTES: Final = 64 * MIB
CHUNK_BYTES: Final = 16 * MIB
SSD_BYTES: Final = 4 * GIB
SSD_LEAST_BYTES: Final = GIB
SSD_FILE_BYTES: Final = 256 * MIB
ASKED_AGAIN: Final = 200  # requests, the last ones before the restart


@dataclass(slots=True)
class Restart:
    """What came of killing the daemon: pages of the last requests before, and the same after."""

    down_s: float = 0.0  # from the kill until the next daemon was ready
    held: int = 0
    host: int = 0  # served from host memory that the killed daemon left
    ssd: int = 0
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo measured."""

    tally: Tally
    restart: Restart
    clients: int
    elapsed_s: float
    host_memory_bytes: int
    ssd_bytes: int  # 0: there was no disk space for it
    infinite_hits: int  # of a store without bounds, on the same requests

    @property
    def hit_rate(self) -> float:
        """Share of the pages asked for that were in the store."""
        return self.tally.hits / max(self.tally.pages, 1)

    @property
    def infinite_hit_rate(self) -> float:
        """The same for a store that never forgets: what repeats in these requests."""
        return self.infinite_hits / max(self.tally.pages, 1)

    @property
    def moved_bytes_per_s(self) -> float:
        """Bytes of pages read and stored, by all clients, a second of the whole replay."""
        return (self.tally.get_bytes + self.tally.put_bytes) / max(self.elapsed_s, 1e-9)

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        rates = {
            "hit_rate": self.hit_rate,
            "infinite_hit_rate": self.infinite_hit_rate,
            "moved_bytes_per_s": self.moved_bytes_per_s,
        }
        return {**asdict(self), **rates, "page_bytes": replay.PAGE_BYTES}


@contextmanager
def running(*, seconds: float) -> Generator[tuple[Outcome, Store], None, None]:
    """Run the demo for at most `seconds` of replay; its store stays open inside the context.

    Raises:
        OutOfSpace: there is no room for even a small store.
        NexusError: the daemon or a client failed.
    """
    with scratch_folder("demo") as folder, disk_folder("demo") as disk:
        memory_bytes, ssd_bytes = _memory(folder), _ssd(disk)
        flags: dict[str, object] = {"host_memory": memory_bytes, "chunk_bytes": CHUNK_BYTES}
        if ssd_bytes:
            flags |= {
                "ssd_dir": disk / "ssd",
                "ssd_capacity": ssd_bytes,
                "ssd_file_bytes": SSD_FILE_BYTES,
            }
        with DaemonProcess(folder, flags=flags) as daemon:
            requests = list(read_trace(replay.TRACE))
            first, first_s = _replay(daemon.url, range(len(requests)), seconds / 2)
            restart = _restart(daemon, requests[: first.requests])
            rest = range(first.requests, len(requests))
            second, second_s = _replay(daemon.url, rest, seconds / 2)
            tally = _sum((first, second))
            outcome = Outcome(
                tally=tally,
                restart=restart,
                clients=CLIENTS,
                elapsed_s=first_s + second_s,
                host_memory_bytes=memory_bytes,
                ssd_bytes=ssd_bytes,
                infinite_hits=_infinite(requests[: tally.requests]),
            )
            with connect(daemon.url, load_config(env={}).config) as store:
                yield outcome, store


def _restart(daemon: DaemonProcess, requests: Sequence[Request]) -> Restart:
    """Kill the daemon, start another on its folders, and look for what the last requests had."""
    chains = [
        [replay.key_of(hash_id) for hash_id in request.hash_ids]
        for request in requests[-ASKED_AGAIN:]
    ]
    found = Restart()
    with connect(daemon.url, load_config(env={}).config) as store:
        space = replay.space_of(store)
        found.held = sum(space.match(keys).page_count for keys in chains)
    start_s = time.monotonic()
    daemon.kill()
    daemon.start()
    found.down_s = time.monotonic() - start_s
    with connect(daemon.url, load_config(env={}).config) as store:
        _wait_recovered(store)
        client = Client(replay.space_of(store))
        for keys in chains:
            client.look(keys)
    found.host = client.tally.hits - client.tally.ssd_hits
    found.ssd, found.wrong = client.tally.ssd_hits, client.tally.wrong
    return found


def _wait_recovered(store: Store) -> None:
    """Wait until the daemon has taken in what it found; `recovering` is 0 then."""
    end_s = time.monotonic() + GRACE_S
    while time.monotonic() < end_s:
        gauges = store.stats()["gauges"]
        if not (isinstance(gauges, dict) and gauges.get("recovering")):
            return


def _infinite(requests: Sequence[Request]) -> int:
    # The queue is in order and every client finishes what it takes: these are the ones replayed.
    return replay.infinite_hits(request.hash_ids for request in requests)


def _memory(folder: Path) -> int:
    """Bytes for pages: the usual, or half of what the file system has left."""
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize // 2
    if free < MEMORY_LEAST_BYTES:
        raise OutOfSpace(f"{folder} has {2 * free} bytes free, need {2 * MEMORY_LEAST_BYTES}")
    return min(MEMORY_BYTES, free // CHUNK_BYTES * CHUNK_BYTES)


def _ssd(folder: Path) -> int:
    """Bytes for pages on disk: the usual, or half of what is left; 0 where that is too little."""
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize // 2 // SSD_FILE_BYTES * SSD_FILE_BYTES
    return min(SSD_BYTES, free) if free >= SSD_LEAST_BYTES else 0


def _replay(url: str, requests: range, seconds: float) -> tuple[Tally, float]:
    """Let the clients replay these requests; the sum of what they did, and how long it took."""
    start_s = time.monotonic()
    queue, feed = os.pipe()
    clients: list[subprocess.Popen[str]] = []
    try:
        try:
            clients = [_client(url, seconds, queue) for _ in range(CLIENTS)]
        finally:
            os.close(queue)
            with os.fdopen(feed, "wb") as numbers:
                numbers.write(b"".join(n.to_bytes(NUMBER_BYTES, "little") for n in requests))
        tallies = _follow(clients, len(requests), seconds)
        for client in clients:
            if client.wait(GRACE_S):
                raise NexusError(f"a client process ended with status {client.returncode}")
        return _sum(tallies), time.monotonic() - start_s
    finally:
        for client in clients:
            client.kill()
            client.wait()
            assert client.stdout is not None
            client.stdout.close()


def _client(url: str, seconds: float, queue: int) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "nexuskv.tools.demo_client", url, str(seconds))
    return subprocess.Popen(
        command, stdin=queue, stdout=subprocess.PIPE, text=True, process_group=0
    )


def _follow(
    clients: Sequence[subprocess.Popen[str]], request_count: int, seconds: float
) -> Sequence[Tally]:
    """Read the clients' reports until they end, and show the progress."""
    tallies = [Tally() for _ in clients]
    progress = Progress("replay")
    start_s = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for at, client in enumerate(clients):
            selector.register(_output(client), selectors.EVENT_READ, at)
        while selector.get_map():
            elapsed_s = time.monotonic() - start_s
            if elapsed_s > seconds + GRACE_S:
                raise NexusError(f"the clients did not end within {seconds + GRACE_S:.0f} s")
            for key, _ in selector.select(GRACE_S):
                if line := key.fileobj.readline():  # type: ignore[union-attr]  # registered above
                    tallies[key.data] = Tally(**json.loads(line))
                else:
                    selector.unregister(key.fileobj)
            _show(progress, _sum(tallies), request_count, elapsed_s / seconds)
    progress.close()
    return tallies


def _output(client: subprocess.Popen[str]) -> IO[str]:
    assert client.stdout is not None
    return client.stdout


def _show(progress: Progress, tally: Tally, request_count: int, time_share: float) -> None:
    moved = (tally.get_bytes + tally.put_bytes) / 1e9
    progress.show(
        max(tally.requests / request_count, min(time_share, 1.0)),
        f"{tally.requests} requests, {tally.hits / max(tally.pages, 1):.1%} of pages found, "
        f"{tally.ssd_hits} on disk, {moved:.1f} GB moved, {tally.wrong} wrong",
    )


def _sum(tallies: Sequence[Tally]) -> Tally:
    rows = [asdict(tally) for tally in tallies]
    return Tally(**{name: sum(row[name] for row in rows) for name in rows[0]})
