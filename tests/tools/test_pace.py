"""A rate is kept over the whole work, whatever the size of its pieces."""

import pytest

from nexuskv.errors import ConfigError
from nexuskv.tools.pace import Pace, parse_rate


@pytest.mark.parametrize(
    ("text", "rate"), [("200MiB/s", 200 << 20), ("1GiB", 1 << 30), (" 512B/s ", 512)]
)
def test_a_rate_is_a_size_a_second(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "0B/s", "1MiB/min", "/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_rate(text)


def test_work_that_is_ahead_of_its_rate_waits_until_it_is_not() -> None:
    now_s, waits = [10.0], list[float]()

    def wait(duration_s: float) -> None:
        waits.append(duration_s)
        now_s[0] += duration_s

    pace = Pace(1000, now_s=lambda: now_s[0], wait=wait)
    pace.did(500)
    now_s[0] += 2.0  # a slow piece: what follows may catch up
    pace.did(1500)
    pace.did(1500)
    assert waits == [0.5, 1.0]


def test_no_rate_never_waits() -> None:
    def never(_: float) -> None:
        pytest.fail("it waited")

    Pace(0, wait=never).did(1 << 40)
