"""The fixture itself: daemons start, stop, die and come back on the same paths."""

import signal
from pathlib import Path

import pytest

from nexuskv import connect
from nexuskv.config import Config
from nexuskv.errors import ConfigError, DaemonUnreachable
from nexuskv.tools.daemon_process import DaemonProcess

pytestmark = pytest.mark.e2e


def _answers(daemon: DaemonProcess) -> bool:
    with connect(daemon.url, Config()) as store:
        return store.ping() > 0


def test_a_ready_daemon_answers(daemon: DaemonProcess) -> None:
    assert _answers(daemon)


def test_a_stopped_daemon_leaves_nothing_behind(daemon: DaemonProcess) -> None:
    assert daemon.stop() == 0
    assert daemon.leftovers() == []


def test_a_killed_daemon_comes_back_on_the_same_paths(daemon: DaemonProcess) -> None:
    daemon.kill()
    daemon.restart()
    assert _answers(daemon)


def test_a_frozen_daemon_answers_once_thawed(daemon: DaemonProcess) -> None:
    daemon.freeze()
    daemon.thaw()
    assert _answers(daemon)


def test_a_killed_daemon_says_by_which_signal(daemon: DaemonProcess) -> None:
    daemon.kill()
    assert daemon.wait() == -signal.SIGKILL


def test_a_daemon_that_cannot_start_says_why(daemon_folder: Path) -> None:
    daemon = DaemonProcess(daemon_folder, flags={"host_memory": "1KiB"})
    with pytest.raises(DaemonUnreachable, match="host_memory"):
        daemon.start()


def test_starting_twice_is_refused(daemon: DaemonProcess) -> None:
    with pytest.raises(ConfigError, match=str(daemon.pid)):
        daemon.start()
