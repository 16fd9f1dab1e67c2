"""What a daemon's figures say of its tiers, in words."""

from nexuskv.tools.tiers import summary, tier_rows

GIB = 1024**3
GAUGES = {"used_bytes": GIB, "capacity_bytes": 2 * GIB, "worker_pid": 7, "recovering": 0}
PLAIN: dict[str, object] = {
    "gauges": GAUGES,
    "counters": {"worker_starts": 1},
    "ssd": "off",
}


def test_a_daemon_without_a_disk_has_one_tier() -> None:
    assert [row["tier"] for row in tier_rows(PLAIN)] == ["host"]
    assert dict(summary(PLAIN)) == {
        "host tier": "ready, 1GiB of 2GiB used",
        "worker": "process 7, 0 times replaced",
        "recovery": "nothing was on record",
    }


def test_a_disk_that_left_service_says_why() -> None:
    stats = {**PLAIN, "ssd": "failed: EIO"}
    assert dict(summary(stats))["ssd tier"].startswith("failed: EIO, ")


def test_what_waits_to_be_copied_is_named() -> None:
    gauges = {
        **GAUGES,
        "ssd_used_bytes": GIB,
        "ssd_capacity_bytes": 4 * GIB,
        "copy_queue_bytes": GIB // 2,
    }
    words = dict(summary({**PLAIN, "ssd": "ready", "gauges": gauges}))
    assert words["ssd tier"] == "ready, 1GiB of 4GiB used, 512MiB to be copied"


def test_a_replaced_worker_and_a_recovery_are_counted() -> None:
    stats = {
        "gauges": {
            "worker_pid": 0,
            "recovering": 1,
            "recovery_pages_done": 1,
            "recovery_pages_total": 4,
        },
        "counters": {"worker_starts": 3},
    }
    words = dict(summary(stats))
    assert words["worker"] == "none runs, 2 times replaced"
    assert words["recovery"] == "1 of 4 records read (25%)"
