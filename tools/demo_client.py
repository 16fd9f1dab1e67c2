"""One client process of the demo: takes requests from a shared queue, gets, checks, puts.

Run as `python -m nexuskv.tools.demo_client URL SECONDS`. The queue is stdin, a pipe that all
clients share: little-endian u32 numbers of requests of the trace, a client reads one at a time. It
reports on stdout, one JSON object a line: the `Tally` so far every `REPORT_S`, and at the end.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Final

from nexuskv import connect
from nexuskv.client.space import Space
from nexuskv.config import load_config
from nexuskv.tools import replay
from nexuskv.tools.trace import read_trace

REPORT_S: Final = 0.2
NUMBER_BYTES: Final = 4


@dataclass(slots=True)
class Tally:
    """What a client has done so far."""

    requests: int = 0
    pages: int = 0
    hits: int = 0
    ssd_hits: int = 0  # of those, loaded from disk
    stored: int = 0
    failed: int = 0  # pages matched but not got, or not stored
    wrong: int = 0  # pages whose bytes differ
    get_bytes: int = 0
    put_bytes: int = 0
    get_s: float = 0.0
    put_s: float = 0.0


class Client:
    """Replays requests against one space, every byte checked."""

    def __init__(self, space: Space) -> None:
        self.tally = Tally()
        self._space = space
        self._bytes = replay.PageBytes()
        self._buffers: list[bytearray] = []

    def replay(self, hash_ids: tuple[int, ...]) -> None:
        """One request: load the prefix that is held, store the rest as an engine would."""
        keys = [replay.key_of(hash_id) for hash_id in hash_ids]
        self._put(keys, self.look(keys))

    def look(self, keys: list[bytes]) -> int:
        """Load the prefix that is held, checked; how many pages."""
        tally = self.tally
        match = self._space.match(keys)
        hits = self._get(keys[: match.page_count])
        tally.requests += 1
        tally.pages += len(keys)
        tally.hits += hits
        tally.ssd_hits += max(0, hits - match.tier_counts.get("host", hits))
        return hits

    def _get(self, keys: list[bytes]) -> int:
        """Load a prefix; how many pages of it arrived, in a row."""
        while len(self._buffers) < len(keys):
            self._buffers.append(bytearray(replay.PAGE_BYTES))
        into = self._buffers[: len(keys)]
        start_s = time.monotonic()
        statuses = self._space.get(keys, into=into)
        self.tally.get_s += time.monotonic() - start_s
        got = sum(map(bool, statuses))
        self.tally.get_bytes += got * replay.PAGE_BYTES
        self.tally.failed += len(keys) - got
        for key, page, status in zip(keys, into, statuses, strict=True):
            if status and not self._bytes.equal(key, page):
                self.tally.wrong += 1
        return next((at for at, status in enumerate(statuses) if not status), len(statuses))

    def _put(self, keys: list[bytes], hits: int) -> None:
        """Store the pages after the first `hits`."""
        missing = keys[hits:]
        if not missing:
            return
        pages = [self._bytes.parts(key) for key in missing]
        start_s = time.monotonic()
        statuses = self._space.put(missing, from_=pages, parent=keys[hits - 1] if hits else None)
        self.tally.put_s += time.monotonic() - start_s
        stored = sum(status.name == "STORED" for status in statuses)
        self.tally.stored += stored
        self.tally.put_bytes += stored * replay.PAGE_BYTES
        self.tally.failed += sum(not status for status in statuses)


def main(url: str, seconds: float) -> int:
    """Replay until the queue or the time ends."""
    requests = list(read_trace(replay.TRACE))
    with connect(url, load_config(env={}).config) as store:
        client = Client(replay.space_of(store))
        end_s = time.monotonic() + seconds
        report_s = 0.0
        while (now_s := time.monotonic()) < end_s:
            # Writers fill the pipe with whole numbers, so a read is one number or the end.
            number = os.read(sys.stdin.fileno(), NUMBER_BYTES)
            if not number:
                break
            client.replay(requests[int.from_bytes(number, "little")].hash_ids)
            if now_s > report_s:
                report_s = now_s + REPORT_S
                print(json.dumps(asdict(client.tally)), flush=True)
    print(json.dumps(asdict(client.tally)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
