"""What every benchmark reports: rows beside their limits, the machine, the commit.

A row's `ratio` is speed against the limit, higher is better: value/limit for rates, limit/value
for seconds and bytes. A physical limit is what the hardware gave to a bare call in the same run: a
ratio over `BROKEN_RATIO` of one says that the limit was measured wrongly.
"""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from nexuskv.dataplane import native

Row = dict[str, object]
BROKEN_RATIO: Final = 1.05
_LESS_IS_BETTER: Final = frozenset({"s", "bytes"})


def row(
    name: str,
    value: float,
    unit: str,
    limit: float | None,
    *,
    target: float | None = None,
    physical: bool = False,
    **extra: object,
) -> Row:
    """One row.

    Args:
        name: such as `get 1MiB x32`, variants prefixed.
        value: what was measured.
        unit: of value and limit; `s` and `bytes` are better small, all else is better large.
        limit: what it is measured against, in the same unit; None: there is nothing to compare.
        target: the ratio to reach.
        physical: whether the limit is what the machine itself can do.
        extra: more keys for the JSON, such as `p99`.
    """
    ratio = None
    if limit is not None and limit > 0 and value > 0:
        ratio = limit / value if unit in _LESS_IS_BETTER else value / limit
    found: Row = {"name": name, "value": value, "unit": unit, "limit": limit, "ratio": ratio}
    return {**found, "target": target, "physical": physical, **extra}


def broken_limits(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Names of rows that beat a physical limit by more than noise."""
    return [
        str(each["name"])
        for each in rows
        if each.get("physical")
        and isinstance(ratio := each["ratio"], int | float)
        and ratio > BROKEN_RATIO
    ]


def report(topic: str, rows: Sequence[Mapping[str, object]]) -> Row:
    """The JSON of a benchmark."""
    return {
        "topic": topic,
        "machine": machine(),
        "commit": commit(),
        "native": native.NATIVE,
        "rows": list(rows),
    }


def machine() -> str:
    """Processor, cores, memory and kernel in one line."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {memory_gib:.0f} GiB, Linux {platform.release()}"


def commit() -> str:
    """The commit that is measured, with a + when files differ from it; empty outside a checkout."""
    try:
        found = subprocess.run(
            ("git", "describe", "--always", "--dirty=+", "--exclude=*"),
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
