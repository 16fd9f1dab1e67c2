"""A daemon with tighter limits than its clients expect: they learn them, and hit all the same."""

from collections.abc import Mapping

import pytest

from tests.e2e.cache import (
    KIB,
    chain,
    count_good,
    counters,
    eventually,
    open_space,
    open_store,
    put,
)
from tests.e2e.conftest import StartDaemon

pytestmark = pytest.mark.e2e

COUNT = 3000


@pytest.mark.parametrize(
    "flags",
    [
        {"batch_pages_max": 7},
        {"message_bytes_max": "64KiB"},
        {"acquire_wait_max_s": 0.0},
        {"session_reserved_bytes": "1MiB"},
        {"send_backlog_bytes": "64KiB"},
        {"leases_max": 2},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_every_call_is_cut_to_what_the_daemon_takes(
    start_daemon: StartDaemon, flags: Mapping[str, object]
) -> None:
    daemon = start_daemon(**flags)
    with open_store(daemon.url) as store:
        space = open_space(store, page_bytes=4 * KIB)
        keys = chain("long", COUNT)
        assert all(put(space, keys))
        assert count_good(space, keys) == COUNT
        assert space.match(keys).page_count == COUNT
        space.prefetch(keys)
        assert space.pin(keys, ttl_s=60.0) == COUNT
        into = [bytearray(space.record.page_bytes)]
        assert not any(space.get(chain("not there", 1), into=into, wait_s=0.1))
        assert space.remove(keys) == COUNT
        assert store.counters["reconnects"] == 0
        assert counters(store)["protocol_errors"] == 0


def test_heartbeats_come_as_often_as_the_daemon_wants_them(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(listen="tcp://127.0.0.1:0", session_idle_s=0.6)
    with open_store(daemon.url_of("tcp")) as silent, open_store(daemon.url) as other:
        begun_s = float(str(other.stats()["uptime_s"]))
        eventually(lambda: float(str(other.stats()["uptime_s"])) > begun_s + 3.0, "time passes")
        assert silent.ping() >= 0
        assert silent.counters["reconnects"] == 0
        assert counters(other)["protocol_errors"] == 0
