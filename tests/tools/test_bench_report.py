import json

import pytest

from nexuskv.tools.bench.report import broken_limits, row
from nexuskv.tools.bench.timing import alternate, percentile
from nexuskv.tools.commands.bench import TOPICS, show


@pytest.mark.parametrize(
    ("unit", "ratio"), [("GB/s", 2.0), ("share", 2.0), ("s", 0.5), ("bytes", 0.5)]
)
def test_a_ratio_is_speed_against_the_limit(unit: str, ratio: float) -> None:
    assert row("get 1MiB x32", 4.0, unit, 2.0)["ratio"] == ratio


def test_a_row_without_a_limit_has_no_ratio() -> None:
    assert row("get", 4.0, "s", None)["ratio"] is None


def test_a_row_over_its_physical_limit_is_broken() -> None:
    rows = [
        row("fast", 1.06, "GB/s", 1.0, physical=True),
        row("noise", 1.04, "GB/s", 1.0, physical=True),
        row("target", 2.0, "GB/s", 1.0),
    ]
    assert broken_limits(rows) == ["fast"]


def test_a_broken_limit_fails_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("shm", [row("fast", 2.0, "GB/s", 1.0, physical=True)], as_json=False) == 1
    assert "fast" in capsys.readouterr().err


def test_json_has_machine_commit_native_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("shm", [row("get 1MiB x32", 1.0, "GB/s", 2.0)], as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"topic", "machine", "commit", "native", "rows"}
    assert {"name", "value", "unit", "limit", "ratio"} <= set(found["rows"][0])


def test_turns_alternate_and_swap_who_is_first() -> None:
    seen: list[str] = []
    alternate(2, lambda turn: seen.append(f"a{turn}"), lambda turn: seen.append(f"b{turn}"))
    assert seen == ["b0", "a0", "a1", "b1"]


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == value


def test_each_topic_is_known() -> None:
    known = {"shm", "copying", "control", "ssd", "index", "start", "restart", "hitrate"}
    assert set(TOPICS) == known
