"""kill -9 of the control process, the worker, or both, at any moment of a loaded run.

After each the daemon serves what it had answered for, nothing that it had answered to have removed,
and never a wrong byte. Each run prints its seed; write it into `SEED` to kill in the same order.
"""

import contextlib
import json
import os
import random
import select
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.tools.daemon_process import DaemonProcess
from tests.e2e.cache import (
    KIB,
    MIB,
    chain,
    count_good,
    counters,
    eventually,
    gauges,
    open_space,
    open_store,
    wait_populated,
)
from tests.e2e.children import Child
from tests.e2e.conftest import StartDaemon
from tests.e2e.filler import PAGES

SEED: int | None = None
SIZES = {"small": 16 * KIB, "large": 64 * KIB}
CHAINS = 12  # that each filler works on in a round
# One chunk holds all pages of a size: while others are still populated after a start, pages that
# find no memory would take that of older ones, and nothing could be said of what must be there.
ROOMY = {"host_memory": "256MiB", "chunk_bytes": "64MiB", "keep_pages": True}
TIGHT = {"host_memory": "8MiB", "chunk_bytes": "2MiB", "keep_pages": True}
SSD = {"ssd_capacity": "64MiB", "ssd_file_bytes": "8MiB"}
FILES = ("data-", "table-", "namespaces", "lock")


class Known:
    """What a filler was told: the state of each chain as far as its user can know."""

    def __init__(self) -> None:
        self.state: dict[str, str] = {}

    def note(self, line: str) -> bool:
        """Take one line of a filler; True when its round is done."""
        word, _, name = line.partition(" ")
        if name:
            self.state[name] = word
        return word == "done"

    def names(self, word: str) -> list[str]:
        """The chains that are `stored`, `removed` or `unsure`."""
        return [name for name, state in self.state.items() if state == word]


class Run:
    """A daemon, its fillers, and what is known of their chains."""

    def __init__(self, daemon: DaemonProcess, seed: int, stack: ExitStack) -> None:
        self._daemon = daemon
        self._random = random.Random(seed)
        self._known = {name: Known() for name in SIZES}
        self._fillers: dict[str, Child] = {}
        self._partial: dict[str, bytes] = {}
        self._working: dict[str, Child] = {}  # that have not done their round
        for index, (name, size) in enumerate(SIZES.items()):
            child = Child(
                "fill", daemon.url, name=name, page_bytes=size, chains=CHAINS, seed=seed + index
            )
            stack.callback(child.close)
            self._fillers[name] = child
            assert child.outcome() == "ready"
        with open_store(daemon.url) as store:
            wait_populated(store)

    def round(self, *, complete: bool) -> None:
        """Work, kill in the middle, let it end, look at everything."""
        for child in self._fillers.values():
            child.say("go")
        self._working = dict(self._fillers)
        self._listen(until_s=time.monotonic() + self._random.uniform(0.0, 0.3))
        self._kill(self._random.choice(("control", "worker", "both")))
        self._listen(until_s=None)
        with open_store(self._daemon.url) as store:
            self._check(store, complete=complete)

    def finish(self) -> None:
        """Let the fillers end; each has to end well."""
        for child in self._fillers.values():
            child.say("end")
            assert isinstance(child.outcome(), int)
            child.end()

    def _listen(self, until_s: float | None) -> None:
        """Take what the fillers say, until then or until all have done their round."""
        working = self._working
        while working:
            left_s = 60.0 if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                return
            heard, _, _ = select.select(list(working.values()), [], [], left_s)
            assert heard or until_s is not None, "a filler hangs"
            for name in [name for name, child in working.items() if child in heard]:
                notes = [self._known[name].note(line) for line in self._lines(name)]
                if any(notes):
                    del working[name]

    def _lines(self, name: str) -> list[str]:
        """Whole lines of a filler that can be read now; a reader that buffers would hide some."""
        data = os.read(self._fillers[name].fileno(), 64 * KIB)
        assert data, "a filler ended by itself"
        *whole, self._partial[name] = (self._partial.get(name, b"") + data).split(b"\n")
        return [str(json.loads(line)) for line in whole]

    def _kill(self, whom: str) -> None:
        worker = self._worker_pid()
        if whom != "worker":
            self._daemon.kill()
        if whom != "control" and worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        if whom != "worker":
            self._daemon.start()

    def _worker_pid(self) -> int:
        with open_store(self._daemon.url) as store:
            return gauges(store)["worker_pid"]

    def _check(self, store: Store, *, complete: bool) -> None:
        eventually(lambda: not gauges(store)["recovering"], "what was on record is back")
        for name, size in SIZES.items():
            space = open_space(store, page_bytes=size, model=name)
            known = self._known[name]
            for each in known.names("removed"):
                assert count_good(space, chain(each, PAGES)) == 0, f"{each} was removed"
            for each in known.names("unsure"):
                count_good(space, chain(each, PAGES))
            lost = [each for each in known.names("stored") if not _is_whole(space, each)]
            assert not (complete and lost), f"{len(lost)} chains of {name} are lost: {lost[:3]}"
        _check_usage(store, self._daemon)


def _is_whole(space: Space, name: str) -> bool:
    return count_good(space, chain(name, PAGES)) == PAGES


def _check_usage(store: Store, daemon: DaemonProcess) -> None:
    """Usage is what a recount finds, and no file lies about that nobody owns."""
    ids = [row[0] for row in store.inspect("namespaces")]
    held = sum([len(list(store.inspect("pages", each))) for each in ids if isinstance(each, bytes)])
    assert gauges(store)["pages"] == held
    assert counters(store)["internal_errors"] == 0
    assert "Traceback" not in daemon.log()
    names = sorted(os.listdir(daemon.segment_folder))
    assert [n for n in names if not n.startswith(FILES)] == [], "files nobody owns"
    assert len([n for n in names if n.startswith("data-")]) == 1, "one segment"


def _bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("slab-*"))


@pytest.fixture
def ssd_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on disk for copies; what lies there must stay within its capacity."""
    folder = tmp_path / "ssd"
    yield folder
    if folder.exists():
        assert _bytes_on_disk(folder) <= 64 * MIB + 64 * KIB


def _run(daemon: DaemonProcess, *, rounds: int, complete: bool) -> None:
    seed = SEED or random.randrange(2**32)
    print(f"seed {seed}")
    with ExitStack() as stack:
        run = Run(daemon, seed, stack)
        for _ in range(rounds):
            run.round(complete=complete)
        run.finish()


@pytest.mark.e2e
def test_whatever_is_killed_all_that_was_stored_is_served_and_nothing_that_was_removed(
    start_daemon: StartDaemon,
) -> None:
    _run(start_daemon(**ROOMY), rounds=6, complete=True)


@pytest.mark.e2e
def test_with_an_ssd_and_little_memory_no_kill_shows_a_wrong_or_removed_page(
    start_daemon: StartDaemon, ssd_folder: Path
) -> None:
    _run(start_daemon(**TIGHT, **SSD, ssd_dir=ssd_folder), rounds=6, complete=False)


@pytest.mark.soak
def test_a_hundred_kills_lose_nothing(start_daemon: StartDaemon) -> None:
    large = {**ROOMY, "host_memory": "2GiB", "chunk_bytes": "704MiB"}
    _run(start_daemon(**large), rounds=100, complete=True)


@pytest.mark.soak
def test_a_hundred_kills_with_an_ssd_show_no_wrong_byte(
    start_daemon: StartDaemon, ssd_folder: Path
) -> None:
    _run(start_daemon(**TIGHT, **SSD, ssd_dir=ssd_folder), rounds=100, complete=False)
