"""The demo: a daemon, several client processes, a real request trace, every byte checked.

Owns the processes and their scratch folder; all are gone when `run` returns or raises.
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
from nexuskv.tools.daemon_process import DaemonProcess, scratch_folder
from nexuskv.tools.demo_client import NUMBER_BYTES, Tally
from nexuskv.tools.progress import Progress
from nexuskv.tools.trace import Request, read_trace

CLIENTS: Final = 3
GRACE_S: Final = 60.0  # for the requests that run when the time is over, and for a slow start
MEMORY_BYTES: Final = GIB
MEMORY_LEAST_BYTES: Final = 64 * MIB
CHUNK_BYTES: Final = 16 * MIB


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo measured."""

    tally: Tally
    clients: int
    elapsed_s: float
    host_memory_bytes: int
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
    with scratch_folder("demo") as folder:
        memory_bytes = _memory(folder)
        flags = {"host_memory": memory_bytes, "chunk_bytes": CHUNK_BYTES}
        with DaemonProcess(folder, flags=flags) as daemon:
            requests = list(read_trace(replay.TRACE))
            start_s = time.monotonic()
            tally = _replay(daemon.url, len(requests), seconds)
            outcome = Outcome(
                tally=tally,
                clients=CLIENTS,
                elapsed_s=time.monotonic() - start_s,
                host_memory_bytes=memory_bytes,
                infinite_hits=_infinite(requests[: tally.requests]),
            )
            with connect(daemon.url, load_config(env={}).config) as store:
                yield outcome, store


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


def _replay(url: str, request_count: int, seconds: float) -> Tally:
    """Let the clients replay the requests; the sum of what they did."""
    queue, feed = os.pipe()
    clients: list[subprocess.Popen[str]] = []
    try:
        try:
            clients = [_client(url, seconds, queue) for _ in range(CLIENTS)]
        finally:
            os.close(queue)
            with os.fdopen(feed, "wb") as numbers:
                numbers.write(
                    b"".join(n.to_bytes(NUMBER_BYTES, "little") for n in range(request_count))
                )
        tallies = _follow(clients, request_count, seconds)
        for client in clients:
            if client.wait(GRACE_S):
                raise NexusError(f"a client process ended with status {client.returncode}")
        return _sum(tallies)
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
        f"{moved:.1f} GB moved, {tally.wrong} wrong",
    )


def _sum(tallies: Sequence[Tally]) -> Tally:
    rows = [asdict(tally) for tally in tallies]
    return Tally(**{name: sum(row[name] for row in rows) for name in rows[0]})
