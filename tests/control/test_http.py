"""/metrics and /healthz: what they show, and that a loop that does not turn is unhealthy."""

import http.client
import re

import pytest

from nexuskv.control import http as served
from nexuskv.control.counters import COUNTERS
from nexuskv.errors import ConfigError
from tests.control.conftest import StartRig
from tests.control.raw import PAGE_BYTES, PATIENCE_S, chain
from tests.control.rig import Rig


@pytest.fixture
def rig(start_rig: StartRig) -> Rig:
    return start_rig(http="127.0.0.1:0")


def get(rig: Rig, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(rig.control.http_address, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def test_metrics_are_prometheus_text_with_every_counter(rig: Rig) -> None:
    client = rig.local()
    client.put(client.open(), chain("a", 3))
    status, text = get(rig, "/metrics")
    assert status == 200
    line = re.compile(r"# (TYPE|HELP) nexuskv_\w+ .+|nexuskv_\w+ \d+")
    assert all(line.fullmatch(each) for each in text.splitlines())
    shown = dict(each.split() for each in text.splitlines() if not each.startswith("#"))
    assert {f"nexuskv_{name}_total" for name in COUNTERS} <= shown.keys()
    assert shown["nexuskv_used_bytes"] == str(3 * PAGE_BYTES)


def test_a_turning_loop_is_healthy(rig: Rig) -> None:
    assert get(rig, "/healthz") == (200, "ok\n")


def test_a_stopped_loop_is_unhealthy_and_then_healthy_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "_ANSWER_TIMEOUT_S", 0.05)
    with rig.blocked():
        status, text = get(rig, "/healthz")
        assert status == 503
        assert "did not answer" in text
    assert get(rig, "/healthz")[0] == 200


def test_other_paths_are_not_there(rig: Rig) -> None:
    assert get(rig, "/")[0] == 404


def test_the_address_is_told_by_stats(rig: Rig) -> None:
    assert rig.local().stats()["http"] == rig.control.http_address


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:x", "127.0.0.1:99999", "127.0.0.1:²"])
def test_a_bad_address_is_refused(start_rig: StartRig, address: str) -> None:
    with pytest.raises(ConfigError, match="http address"):
        start_rig(http=address)


def test_a_taken_address_is_refused_with_its_name(start_rig: StartRig, rig: Rig) -> None:
    with pytest.raises(ConfigError, match=rig.control.http_address):
        start_rig(http=rig.control.http_address)


def test_head_gets_the_status_and_no_body(rig: Rig) -> None:
    connection = http.client.HTTPConnection(rig.control.http_address, timeout=PATIENCE_S)
    connection.request("HEAD", "/healthz")
    reply = connection.getresponse()
    assert (reply.status, reply.read()) == (200, b"")
    connection.close()


def test_an_address_that_others_could_reach_is_refused(start_rig: StartRig) -> None:
    with pytest.raises(ConfigError, match="loopback"):
        start_rig(http="0.0.0.0:0")
