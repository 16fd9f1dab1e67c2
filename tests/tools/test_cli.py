"""The command line without a daemon: usage, configuration, exit status, what goes where."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nexuskv.tools.cli import FAILED, NO_DAEMON, OK, WRONG_USAGE, main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]  # autouse
    for name in ("NEXUSKV_URL", "NEXUSKV_CONFIG", "NEXUSKV_HOST_MEMORY"):
        monkeypatch.delenv(name, raising=False)


def _settings(capsys: Capture, *argv: str) -> dict[str, dict[str, object]]:
    assert main(["config", "show", "--json", *argv]) == OK
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["settings"]}


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["no-such-command"],
        ["page"],
        ["ping", "--no-such-flag"],
        ["ping", "--count", "0"],
        ["ping", "--count", "many"],
        ["ping", "--url", "http://nowhere"],
        ["page", "ls", "--limit", "0"],
        ["page", "get", "no-hex", "--out", "page"],
        ["verify", "--tier", "hbm"],
        ["verify", "--rate", "fast"],
        ["tree", "--depth", "-1"],
        ["bench", "no-such-topic"],
        ["demo", "--seconds", "0"],
        ["demo", "--seconds", "inf"],
        ["config", "show", "--host-memory", "lots"],
        ["config", "show", "--host-memory", "1KiB"],
        ["config", "show", "--config", "/no/such/file"],
        ["serve", "--host-memory", "-1"],
        ["serve", "--lease-ttl-s", "nan"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2_with_words_on_stderr(argv: list[str], capsys: Capture) -> None:
    assert main(argv) == WRONG_USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    assert said.err.strip()


@pytest.mark.parametrize(
    "words",
    [
        "ping",
        "status",
        "tree",
        "page ls",
        "page get 00 --json",
        "verify",
        "lease ls",
        "session ls",
        "chunk ls",
    ],
)
def test_without_a_daemon_a_command_is_status_3(
    words: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main([*words.split(), "--url", f"unix://{tmp_path}/none.sock"]) == NO_DAEMON
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("nexuskv: ")


def test_the_url_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("NEXUSKV_URL", f"unix://{tmp_path}/elsewhere.sock")
    assert main(["ping"]) == NO_DAEMON
    assert "elsewhere.sock" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "ping",
        "status",
        "tree",
        "page ls",
        "page get 00 --json",
        "verify",
        "lease ls",
        "session ls",
        "chunk ls",
    ],
)
def test_a_name_given_wins_over_the_url_of_the_environment(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("NEXUSKV_URL", f"unix://{tmp_path}/elsewhere.sock")
    assert main([*words.split(), "--name", "no-such-instance"]) == NO_DAEMON
    assert "/no-such-instance/daemon.sock" in capsys.readouterr().err


def test_a_url_given_wins_over_a_name_given(tmp_path: Path, capsys: Capture) -> None:
    url = f"unix://{tmp_path}/elsewhere.sock"
    assert main(["ping", "--name", "no-such-instance", "--url", url]) == NO_DAEMON
    assert url in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_are_status_0(flag: str, capsys: Capture) -> None:
    assert main([flag]) == OK
    assert "nexuskv" in capsys.readouterr().out


def test_a_setting_says_that_it_is_the_default(capsys: Capture) -> None:
    assert _settings(capsys)["host_memory"]["source"] == "default"


def test_a_setting_says_which_file_it_came_from(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "nexuskv.toml"
    file.write_text('host_memory = "2GiB"\n')
    found = _settings(capsys, "--config", str(file))["host_memory"]
    assert (found["value"], found["source"]) == (2 * 1024**3, f"file {file}")


def test_a_setting_says_which_variable_it_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("NEXUSKV_HOST_MEMORY", "3GiB")
    found = _settings(capsys)["host_memory"]
    assert (found["value"], found["source"]) == (3 * 1024**3, "env NEXUSKV_HOST_MEMORY")


def test_a_flag_wins_over_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    file = tmp_path / "nexuskv.toml"
    file.write_text('host_memory = "2GiB"\n')
    monkeypatch.setenv("NEXUSKV_HOST_MEMORY", "3GiB")
    found = _settings(capsys, "--config", str(file), "--host-memory", "4GiB")["host_memory"]
    assert (found["value"], found["source"]) == (4 * 1024**3, "flag")


@pytest.mark.parametrize(
    ("argv", "value"), [([], False), (["--huge-pages"], True), (["--no-huge-pages"], False)]
)
def test_a_yes_or_no_setting_is_a_pair_of_flags(
    argv: list[str], value: bool, capsys: Capture
) -> None:
    assert _settings(capsys, *argv)["huge_pages"]["value"] is value


def test_the_table_of_settings_reads_sizes_for_people(capsys: Capture) -> None:
    assert main(["config", "show", "--host-memory", "4GiB"]) == OK
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("host_memory"))
    assert line.split() == ["host_memory", "4GiB", "flag"]


def test_a_closed_pipe_is_no_error() -> None:
    command = [sys.executable, "-m", "nexuskv.tools", "serve", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == OK


def test_a_refusal_while_starting_leaves_no_traceback(tmp_path: Path, capsys: Capture) -> None:
    segments = tmp_path / "segments"
    argv = ["serve", "--listen", "ftp://nowhere", "--segment-dir", str(segments)]
    assert main(argv) in {FAILED, WRONG_USAGE}
    assert "Traceback" not in capsys.readouterr().err
