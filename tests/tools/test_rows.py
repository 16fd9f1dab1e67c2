"""The columns of `inspect`: named here, described in docs/protocol.md."""

import re
from pathlib import Path

import pytest

from nexuskv.tools.rows import COLUMNS

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


@pytest.mark.parametrize("what", COLUMNS)
def test_the_columns_of_a_listing_are_on_the_page(what: str) -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n### 16 inspect\n")[1].split("\n### ")[0]
    row = re.search(rf"^\| `{what}` \| (.*) \|$", section, re.MULTILINE)
    assert row, f"no row for {what}"
    assert tuple(re.findall(r"`(\w+)` \w+", row[1])) == COLUMNS[what]
