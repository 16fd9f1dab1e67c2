"""A daemon's tiers, its worker and its recovery in words, from what `stats` answers. Pure."""

from collections.abc import Iterator, Mapping

from nexuskv.config import format_size

Stats = Mapping[str, object]


def tier_rows(stats: Stats) -> list[dict[str, object]]:
    """One row a tier: `tier`, `state`, `used_bytes`, `capacity_bytes`, `queued_bytes`.

    `queued_bytes` are those that wait for a copy into the tier.
    """
    gauges = _numbers(stats, "gauges")
    rows: list[dict[str, object]] = [
        {
            "tier": "host",
            "state": "ready",
            "used_bytes": gauges.get("used_bytes", 0),
            "capacity_bytes": gauges.get("capacity_bytes", 0),
            "queued_bytes": 0,
        }
    ]
    if (state := str(stats.get("ssd", "off"))) != "off":
        rows.append(
            {
                "tier": "ssd",
                "state": state,
                "used_bytes": gauges.get("ssd_used_bytes", 0),
                "capacity_bytes": gauges.get("ssd_capacity_bytes", 0),
                "queued_bytes": gauges.get("copy_queue_bytes", 0),
            }
        )
    return rows


def summary(stats: Stats) -> Iterator[tuple[str, str]]:
    """What people look for first, as names and words."""
    gauges, counters = _numbers(stats, "gauges"), _numbers(stats, "counters")
    for row in tier_rows(stats):
        used, capacity, queued = row["used_bytes"], row["capacity_bytes"], row["queued_bytes"]
        assert isinstance(used, int)
        assert isinstance(capacity, int)
        assert isinstance(queued, int)
        waits = f", {format_size(queued)} to be copied" if queued else ""
        words = f"{format_size(used)} of {format_size(capacity)} used{waits}"
        yield f"{row['tier']} tier", f"{row['state']}, {words}"
    pid, starts = gauges.get("worker_pid", 0), counters.get("worker_starts", 0)
    running = f"process {pid}" if pid else "none runs"
    yield "worker", f"{running}, {max(0, starts - 1)} times replaced"
    yield "recovery", _recovery(gauges)


def _recovery(gauges: Mapping[str, int]) -> str:
    done, total = gauges.get("recovery_pages_done", 0), gauges.get("recovery_pages_total", 0)
    if gauges.get("recovering"):
        return f"{done} of {total} records read ({done / max(total, 1):.0%})"
    return f"done, {done} records read" if done else "nothing was on record"


def _numbers(stats: Stats, group: str) -> Mapping[str, int]:
    found = stats.get(group, {})
    assert isinstance(found, Mapping)
    return found
