"""The real engine, real daemon, real model: a prefix computed by one process serves another.

Starting an engine takes most of a minute, so three processes do everything, once: one without a
connector, A that stores, B that loads. What they answered is then looked at claim by claim.
"""

import contextlib
import json
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import nexuskv
from nexuskv.client.store import Store
from nexuskv.namespace import NamespaceRecord
from nexuskv.tools.daemon_process import DaemonProcess, scratch_folder

pytestmark = pytest.mark.engine

GENERATE = Path(__file__).parents[2] / "engines" / "vllm_generate.py"
ANSWER_TIMEOUT_S = 400.0
SEEDS = [0, 5]
MANY_SEEDS = [0, 5, 11, 17, 23, 31, 41, 47]  # twice as many as run at once
HIT_TOKENS = 96  # prompts have 100 tokens, blocks 32


class EngineProcess:
    """A `vllm_generate.py` child. Asked line by line; ends with its stdin."""

    def __init__(self, model: Path, kv_transfer: dict[str, Any], log: Path) -> None:
        self._log = log
        self._file = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(GENERATE), str(model), json.dumps(kv_transfer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            text=True,
        )

    def ask(self, **command: object) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith("RESULT "):
                    return dict(json.loads(line.removeprefix("RESULT ")))
        finally:
            late.cancel()
            late.join()
        raise AssertionError(f"the engine gave no answer:\n{self._log.read_text()[-4000:]}")

    def close(self) -> None:
        """End the child and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=ANSWER_TIMEOUT_S)
        self._file.close()

    @property
    def log(self) -> str:
        return self._log.read_text()


@dataclass
class Runs:
    """What each run answered."""

    plain: dict[str, Any]  # no connector
    plain_many: dict[str, Any]
    storing: dict[str, Any]  # process A, empty store
    loading: dict[str, Any]  # process B, fresh
    replaced: dict[str, Any]  # B, after other bytes were put under the same keys
    killed: dict[str, Any]  # B, the daemon killed in the middle
    log: str


def kv_transfer(url: str) -> dict[str, Any]:
    return {
        "kv_connector": "NexusKVConnector",
        "kv_connector_module_path": "nexuskv.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url},
    }


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    logs = tmp_path_factory.mktemp("logs")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("vllm"))
        flags = {"host_memory": "256MiB", "chunk_bytes": "16MiB"}
        daemon = stack.enter_context(DaemonProcess(folder, flags=flags))
        transfers: dict[str, dict[str, Any]] = {
            "plain": {},
            "a": kv_transfer(daemon.url),
            "b": kv_transfer(daemon.url),
        }
        engines = {
            name: EngineProcess(tiny_model, transfer, logs / name)
            for name, transfer in transfers.items()
        }
        for engine in engines.values():
            stack.callback(engine.close)
        plain = engines["plain"].ask(seeds=SEEDS)
        plain_many = engines["plain"].ask(seeds=MANY_SEEDS)
        storing = engines["a"].ask(seeds=SEEDS)
        loading = engines["b"].ask(seeds=SEEDS)
        replace_pages(daemon.url)
        replaced = engines["b"].ask(seeds=SEEDS)
        clear_pages(daemon.url)
        engines["a"].ask(seeds=MANY_SEEDS)
        assert engines["b"].ask(seeds=MANY_SEEDS, pause_after=2)["paused"]
        daemon.kill()
        killed = engines["b"].ask()
        yield Runs(plain, plain_many, storing, loading, replaced, killed, engines["b"].log)


def namespaces(store: Store) -> list[tuple[bytes, NamespaceRecord]]:
    """Every namespace of the daemon by id."""
    return [
        (bytes(row[0]), NamespaceRecord.decode(bytes(row[1])))  # type: ignore[call-overload]  # rows are untyped
        for row in store.inspect("namespaces")
    ]


def replace_pages(url: str) -> None:
    """Put other valid pages, of small random floats, under every key that is held."""
    chance = random.Random(7)
    with nexuskv.connect(url) as store:
        for namespace_id, record in namespaces(store):
            space = store.open(record)
            chains = chains_of([list(row) for row in store.inspect("pages", namespace_id)])
            for keys in chains:
                assert space.remove(keys) == len(keys)
                pages = [random_page(record.page_bytes, chance) for _ in keys]
                assert all(space.put(keys, from_=pages))


def chains_of(rows: list[list[Any]]) -> list[list[bytes]]:
    """Root-to-leaf chains of a listing without branches."""
    after = {bytes(row[1]): bytes(row[0]) for row in rows if row[2] == 1}
    chains: list[list[bytes]] = []
    for row in rows:
        if row[2] == 0:
            chain = [bytes(row[0])]
            while chain[-1] in after:
                chain.append(after[chain[-1]])
            chains.append(chain)
    return chains


def random_page(page_bytes: int, chance: random.Random) -> bytes:
    count = page_bytes // 4
    return struct.pack(f"<{count}f", *(chance.uniform(-1, 1) for _ in range(count)))


def clear_pages(url: str) -> None:
    with nexuskv.connect(url) as store:
        for _, record in namespaces(store):
            store.open(record).clear()


def test_first_process_finds_nothing(runs: Runs) -> None:
    assert runs.storing["cached"] == [0, 0]


def test_first_process_stores_its_full_blocks(runs: Runs) -> None:
    assert runs.storing["stats"]["pages_stored"] == len(SEEDS) * HIT_TOKENS // 32


def test_second_process_hits_what_the_first_stored(runs: Runs) -> None:
    assert runs.loading["cached"] == [HIT_TOKENS] * len(SEEDS)


def test_own_hit_count_equals_the_engines(runs: Runs) -> None:
    assert runs.loading["stats"]["hit_tokens"] == sum(runs.loading["cached"])


@pytest.mark.parametrize("run", ["storing", "loading"])
def test_tokens_are_those_of_an_engine_without_connector(runs: Runs, run: str) -> None:
    assert getattr(runs, run)["tokens"] == runs.plain["tokens"]


def test_loaded_bytes_are_used(runs: Runs) -> None:
    """The control: other bytes under the same keys are hit as well, and give other tokens."""
    assert (runs.replaced["cached"], runs.replaced["tokens"] != runs.plain["tokens"]) == (
        [HIT_TOKENS] * len(SEEDS),
        True,
    )


def test_daemon_killed_in_the_middle_changes_no_token(runs: Runs) -> None:
    assert runs.killed["tokens"] == runs.plain_many["tokens"]


def test_daemon_killed_in_the_middle_had_served_hits(runs: Runs) -> None:
    assert HIT_TOKENS in runs.killed["cached"]


def test_daemon_killed_in_the_middle_is_a_miss_afterwards(runs: Runs) -> None:
    assert 0 in runs.killed["cached"]


def test_no_hook_failed_unexpectedly(runs: Runs) -> None:
    assert "unexpected error" not in runs.log
