"""The commands against a real daemon."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from nexuskv import connect
from nexuskv.client.store import Store
from nexuskv.config import Config
from nexuskv.tools.cli import NO_DAEMON, OK, WRONG_USAGE, main
from nexuskv.tools.daemon_process import DaemonProcess
from nexuskv.tools.rows import COLUMNS

pytestmark = pytest.mark.e2e

Capture = pytest.CaptureFixture[str]
KEYS = [bytes([n]) * 8 for n in range(1, 6)]


def _store_chain(store: Store, model: str = "m") -> None:
    space = store.namespace(
        model=model, dtype="uint8", page_tokens=16, page_bytes=4096, key_bytes=8
    )
    assert all(space.put(KEYS, from_=[bytes(4096)] * len(KEYS)))


@pytest.fixture
def store(daemon: DaemonProcess) -> Callable[[], Store]:
    return lambda: connect(daemon.url, Config())


def _json(capsys: Capture, daemon: DaemonProcess, *argv: str) -> dict[str, object]:
    assert main([*argv, "--json", "--url", daemon.url]) == OK
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_ping_answers(daemon: DaemonProcess, capsys: Capture) -> None:
    found = _json(capsys, daemon, "ping", "--count", "3")
    assert (found["url"], found["count"]) == (daemon.url, 3)


def test_status_names_the_process_and_the_native_module(
    daemon: DaemonProcess, capsys: Capture
) -> None:
    found = _json(capsys, daemon, "status")
    assert found["pid"] == daemon.pid
    assert "native" in found


def test_tree_shows_pages_and_runs(
    daemon: DaemonProcess, store: Callable[[], Store], capsys: Capture
) -> None:
    with store() as opened:
        _store_chain(opened)
    found = _json(capsys, daemon, "tree", "--depth", "2")["namespaces"]
    assert isinstance(found, list)
    (namespace,) = found
    assert (namespace["model"], namespace["pages"]) == ("m", 5)
    assert namespace["residency"] == {"host": 5 * 4096, "ssd": 0}
    (run,) = namespace["tree"]
    assert (run["first_key"], run["page_count"]) == (KEYS[0].hex(), 5)


def test_page_ls_lists_keys_with_their_parents(
    daemon: DaemonProcess, store: Callable[[], Store], capsys: Capture
) -> None:
    with store() as opened:
        _store_chain(opened)
    rows = _json(capsys, daemon, "page", "ls")["rows"]
    assert isinstance(rows, list)
    assert {row["key"]: row["parent"] for row in rows} == {
        KEYS[0].hex(): "",
        **{key.hex(): parent.hex() for parent, key in pairwise(KEYS)},
    }


def test_page_ls_wants_one_namespace_for_a_prefix(
    daemon: DaemonProcess, store: Callable[[], Store], capsys: Capture
) -> None:
    with store() as opened:
        _store_chain(opened)
    assert main(["page", "ls", "--namespace", "zz", "--url", daemon.url]) == WRONG_USAGE
    assert "no namespace's id starts with 'zz'" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["tree", "page ls", "lease ls"])
def test_an_empty_list_says_none_on_stderr(
    words: str, daemon: DaemonProcess, capsys: Capture
) -> None:
    assert main([*words.split(), "--url", daemon.url]) == OK
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "nexuskv: none\n")


def test_lease_ls_says_how_many_seconds_are_left(
    daemon: DaemonProcess, store: Callable[[], Store], capsys: Capture
) -> None:
    with store() as opened:
        _store_chain(opened)
        space = opened.namespace(
            model="m", dtype="uint8", page_tokens=16, page_bytes=4096, key_bytes=8
        )
        with opened.acquire([(space, KEYS)], request_id=b"r", ttl_s=500):
            rows = _json(capsys, daemon, "lease", "ls")["rows"]
    assert isinstance(rows, list)
    (lease,) = rows
    assert 0 < lease["left_s"] <= 500 + Config().lease_margin_s
    assert lease["left_s"] < lease["expires_s"]


@pytest.mark.parametrize("what", ["namespaces", "pages", "sessions", "leases", "chunks"])
def test_every_column_of_a_listing_has_a_name(
    what: str, daemon: DaemonProcess, store: Callable[[], Store]
) -> None:
    with store() as opened:
        _store_chain(opened)
        space = opened.namespace(
            model="m", dtype="uint8", page_tokens=16, page_bytes=4096, key_bytes=8
        )
        with opened.acquire([(space, KEYS)], request_id=b"r", ttl_s=30):
            row = next(opened.inspect(what, space.id if what == "pages" else b""))
    assert len(row) == len(COLUMNS[what])


@pytest.mark.parametrize("words", ["status", "tree", "page ls", "session ls", "chunk ls"])
def test_tables_are_for_people(
    words: str, daemon: DaemonProcess, store: Callable[[], Store], capsys: Capture
) -> None:
    with store() as opened:
        _store_chain(opened)
        assert main([*words.split(), "--url", daemon.url]) == OK
    assert len(capsys.readouterr().out.splitlines()) > 1


def test_a_frozen_daemon_is_status_3(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in ("NEXUSKV_CONNECT_TIMEOUT_S", "NEXUSKV_REQUEST_TIMEOUT_S"):
        monkeypatch.setenv(name, "0.2")
    daemon.freeze()
    assert main(["ping", "--url", daemon.url]) == NO_DAEMON
    assert capsys.readouterr().out == ""


def test_a_second_daemon_on_the_same_paths_is_status_2(daemon: DaemonProcess) -> None:
    second = DaemonProcess(daemon.folder)
    second.launch()
    assert second.wait() == WRONG_USAGE
    assert "Traceback" not in second.log()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_demo_leaves_nothing_behind(number: signal.Signals) -> None:
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-m", "nexuskv.tools", "demo", "--seconds", "60"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stderr is not None
        assert demo.stderr.readline().startswith("replay")
        demo.send_signal(number)
        words = demo.stderr.read()
    assert demo.returncode == 130
    assert "Traceback" not in words
    left = {path for path in set(Path("/dev/shm").iterdir()) - before if "demo" in path.name}
    assert left == set()


def test_the_demo_verifies_every_byte_and_says_what_it_measured(capsys: Capture) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nexuskv.tools", "demo", "--seconds", "3", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == OK, done.stderr
    found = json.loads(done.stdout)
    assert found["tally"]["wrong"] == 0
    assert found["tally"]["hits"] > 0
    assert found["hit_rate"] <= found["infinite_hit_rate"]
