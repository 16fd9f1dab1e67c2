"""Everything at once: many clients that do anything, stopped and killed, under a daemon that dies.

Each round prints its seed; write it into `SEED` to disturb in the same order again.
"""

import os
import random
import select
import time
from collections import Counter
from contextlib import ExitStack, suppress

import pytest

from nexuskv.client.store import Store
from nexuskv.tools.daemon_process import DaemonProcess
from tests.e2e.cache import (
    MIB,
    chain,
    count_good,
    counters,
    eventually,
    gauges,
    open_space,
    open_store,
    put,
)
from tests.e2e.children import Child
from tests.e2e.conftest import StartDaemon

CLIENTS = 4
MEMORY = {
    "listen": "tcp://127.0.0.1:0",
    "host_memory": "12MiB",
    "chunk_bytes": "2MiB",
    "quarantine_bytes": "8MiB",
}
BOUNDS = {
    "fragments_max": 64,
    "pins_max": 64,
    "lease_ttl_max_s": 5.0,
    "leases_max": 512,
    "session_idle_s": 6.0,
}
DEEDS = {"stop": 8, "kill": 2, "end": 1, "hang up": 2, "freeze": 2, "restart": 1}  # with weights
SEED: int | None = None


class Round:
    """One round: clients come and go, the daemon too."""

    def __init__(self, daemon: DaemonProcess, seed: int) -> None:
        self._daemon = daemon
        self._random = random.Random(seed)
        self._next_seed = seed
        self._children: list[Child] = []
        self.seen = Counter[str]()
        self.wrong: list[str] = []

    def run(self, *, seconds: float, restarts: bool) -> None:
        """Disturb clients (and the daemon) for a while, then let all of them end."""
        with ExitStack() as stack:
            stack.callback(self._close)
            for _ in range(CLIENTS):
                self._start()
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                self._disturb(restarts=restarts)
            for child in list(self._children):
                self._finish(child)

    def _close(self) -> None:
        for child in self._children:
            child.close()

    def _start(self) -> None:
        self._next_seed += 1
        # A port is another one after a restart, so remote clients come anew only.
        url = self._daemon.url_of("tcp" if self._next_seed % 4 == 0 else "unix")
        child = Child("churn", url, seed=self._next_seed)
        self._children.append(child)
        assert child.read() == "ready"

    def _finish(self, child: Child) -> None:
        """Let one end by itself, and take note of what it saw."""
        child.go()
        outcome = child.outcome()
        assert isinstance(outcome, dict)
        self.seen.update(outcome["count"])
        self.wrong += outcome["violations"]
        child.end()
        self._forget(child)

    def _forget(self, child: Child) -> None:
        child.close()
        self._children.remove(child)

    def _disturb(self, *, restarts: bool) -> None:
        choice = self._random
        child = choice.choice(self._children)
        (what,) = choice.choices(list(DEEDS), list(DEEDS.values()))
        pause = time.monotonic() + choice.choice((0.05, 0.2, 0.5, 2.5))
        match what:
            case "stop":
                child.freeze()
                self._until(pause)
                child.thaw()
            case "kill":
                child.kill()
                self._forget(child)
                self._start()
            case "end":
                self._finish(child)
                self._start()
            case "hang up":
                child.hang_up()
            case "freeze":
                self._daemon.freeze()
                self._until(pause)
                self._daemon.thaw()
            case _ if restarts:
                choice.choice((self._daemon.kill, self._daemon.stop))()
                self._daemon.start()
            case _:
                self._until(pause)
        for each in self._children:
            assert not each.has_spoken(), f"a client ended by itself: {each.read()}"

    def _until(self, at_s: float) -> None:
        """Leave the others undisturbed until then, or until one of them ends."""
        with suppress(ValueError):  # the time is over
            select.select(self._children, [], [], at_s - time.monotonic())


def _check_end(daemon: DaemonProcess, store: Store) -> None:
    """All clients are gone: everything lent has come back, and all memory serves."""
    left = ("leases", "leased_slots", "unlinked_slots", "acquires_waiting", "writing_bytes")
    eventually(lambda: not any(gauges(store)[what] for what in left), f"nothing left of {left}")
    for what in ("quarantined_bytes", "unlinked_bytes"):
        assert gauges(store)[what] == 0, what
    eventually(lambda: gauges(store)["sessions"] <= 2, "only this client's sessions are open")
    ids = [row[0] for row in store.inspect("namespaces")]
    held = sum([len(list(store.inspect("pages", each))) for each in ids if isinstance(each, bytes)])
    assert gauges(store)["pages"] == held
    assert counters(store)["internal_errors"] == 0
    assert counters(store)["corrupt_reports"] == 0
    assert "Traceback" not in daemon.log()
    space = open_space(store, page_bytes=MIB, model="after")
    keys = chain("after", gauges(store)["capacity_bytes"] // MIB)
    assert all(put(space, keys)), "all memory can be had"
    assert count_good(space, keys) == len(keys)


def _chaos(start_daemon: StartDaemon, *, seconds: float, restarts: bool, seed: int) -> None:
    print(f"chaos seed {seed}")
    files = len(os.listdir("/proc/self/fd"))
    daemon = start_daemon(**MEMORY, **BOUNDS)
    chaos = Round(daemon, seed)
    chaos.run(seconds=seconds, restarts=restarts)
    print(dict(sorted(chaos.seen.items())))
    assert chaos.wrong == []
    for outcome in ("get HIT", "put STORED", "view held"):
        assert chaos.seen[outcome], f"{outcome} never happened: the test tests nothing"
    with open_store(daemon.url) as store:
        _check_end(daemon, store)
        descriptors = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        assert descriptors < 40, f"the daemon holds {descriptors} descriptors for one client"
    daemon.stop()
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.e2e
@pytest.mark.parametrize("restarts", [False, True], ids=["one daemon", "restarts"])
def test_chaos_shows_no_wrong_byte_and_everything_lent_comes_back(
    start_daemon: StartDaemon, restarts: bool
) -> None:
    _chaos(start_daemon, seconds=6.0, restarts=restarts, seed=SEED or random.randrange(2**32))


@pytest.mark.soak
def test_minutes_of_chaos(start_daemon: StartDaemon) -> None:
    for seed in (1, 2, 3, 4):
        _chaos(start_daemon, seconds=60.0, restarts=seed % 2 == 0, seed=seed)
