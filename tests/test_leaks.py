"""Each leak planted here fails its test, and nothing else does: conftest.py is checked too."""

import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

PLANTED = """
import os, subprocess, sys, tempfile, threading

KEPT = []

def test_clean(shm_dir):
    ending = threading.Event()
    threading.Thread(target=ending.wait, daemon=True).start()
    (shm_dir / "segment").touch()
    with open(os.devnull):
        ending.set()

def test_descriptor():
    KEPT.append(open(os.devnull))

def test_thread():
    started = threading.Thread(target=threading.Event().wait, name="stray", daemon=True)
    started.start()

def test_child_process():
    KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_shared_memory():
    tempfile.mkdtemp(prefix=f"nexuskv-test-{os.getpid()}-", dir="/dev/shm")
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the check said of each planted test; empty when it was content."""
    folder = tmp_path_factory.mktemp("planted")
    conftest = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    (folder / "conftest.py").write_text(conftest.replace("GRACE_S = 5.0", "GRACE_S = 0.2"))
    (folder / "test_planted.py").write_text(PLANTED)
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--rootdir={folder}", str(folder)],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    for left in Path("/dev/shm").glob("nexuskv-test-*-*"):
        if not Path("/proc", left.name.split("-")[2]).exists():
            shutil.rmtree(left)
    assert report.exists(), done.stdout
    said: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        words = [child.get("message", "") for child in case if child.tag in {"error", "failure"}]
        said[case.get("name", "")] = said.get(case.get("name", ""), "") + "".join(words)
    return said


def test_a_clean_test_passes(verdicts: dict[str, str]) -> None:
    assert verdicts["test_clean"] == ""


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("test_descriptor", "of /dev/null"),
        ("test_thread", "thread stray"),
        ("test_child_process", "child process"),
        ("test_shared_memory", "shared memory nexuskv-test-"),
    ],
)
def test_a_planted_leak_is_found(verdicts: dict[str, str], test: str, expected: str) -> None:
    assert expected in verdicts[test]
