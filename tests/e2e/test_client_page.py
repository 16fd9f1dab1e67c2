"""The examples of the pages run as they stand, and docs/client.md has every page status."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nexuskv.tools.daemon_process import DaemonProcess
from nexuskv.types import PageStatus

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
CLIENT_PAGE = "docs/client.md"
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _program(page: str) -> str:
    """All examples of a page, each on its own lines of the page, so that errors name these."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = list(EXAMPLE.finditer(text))
    assert found
    lines: list[str] = []
    for example in found:
        lines += [""] * (text.count("\n", 0, example.start(1)) - len(lines))
        lines += example[1].splitlines()
    return "\n".join(lines)


@pytest.mark.parametrize("page", [CLIENT_PAGE, "README.md"])
def test_the_examples_of_a_page_run_against_a_daemon(
    page: str, start_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXUSKV_URL", start_daemon(events="tcp://127.0.0.1:0").url)
    exec(compile(_program(page), page, "exec"), {})


def test_every_status_is_on_the_page() -> None:
    page = (ROOT / CLIENT_PAGE).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \| (\d) \| (yes|no) \|", page, re.MULTILINE)
    assert rows == [(s.name, str(int(s)), "yes" if s else "no") for s in PageStatus]
