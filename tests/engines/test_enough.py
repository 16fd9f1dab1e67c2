import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("enough", Path(__file__).with_name("enough.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ('tests="3"', ""),
        ('tests="2"', "2 tests passed, at least 3"),
        ('tests="0"', "0 tests passed"),
        ('tests="9" skipped="1"', "1 tests were skipped"),
        ('tests="9" failures="2"', "2 tests failed and 0"),
        ('tests="9" errors="1"', "0 tests failed and 1 had errors"),
    ],
    ids=["enough", "too-few", "none", "skipped", "failed", "errors"],
)
def test_only_enough_passes_and_no_skip_satisfies(counts: str, verdict: str) -> None:
    report = f"<testsuites><testsuite {counts}/></testsuites>"
    found = load().shortfall(report, least=3)
    assert found.startswith(verdict)
    assert bool(found) == bool(verdict)
