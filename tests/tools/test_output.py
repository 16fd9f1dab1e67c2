import io
import json

import pytest

from nexuskv.tools.output import print_json, print_table, table
from nexuskv.tools.progress import Progress


def test_numbers_stand_to_the_right_and_words_to_the_left() -> None:
    assert table(("name", "n"), [("a", 5), ("long", 1234)]) == "name     n\na        5\nlong  1234"


def test_a_table_without_rows_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name",), [])
    assert capsys.readouterr().out == ""


def test_bytes_are_hexadecimal_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"key": b"\x01\xff"})
    assert json.loads(capsys.readouterr().out) == {"key": "01ff"}


def test_progress_without_a_terminal_writes_whole_lines() -> None:
    stream = io.StringIO()
    progress = Progress("replay", stream)
    progress.show(0.5, "half")
    progress.close()
    assert stream.getvalue().count("\n") == 2
    assert "\r" not in stream.getvalue()


@pytest.mark.parametrize(("share", "shown"), [(-1.0, "0%"), (0.5, "50%"), (7.0, "100%")])
def test_progress_stays_between_nothing_and_all(share: float, shown: str) -> None:
    stream = io.StringIO()
    Progress("replay", stream).show(share, "")
    assert f" {shown} " in stream.getvalue()
