"""The claim about hit rates, on the first requests of the traces that ship with the project."""

import pytest

from nexuskv.tools.bench.hitrate import index_rate, load
from nexuskv.tools.bench.lru import lru_rate
from nexuskv.tools.trace import TRACES

REQUESTS = 700


@pytest.mark.parametrize("capacity", [300, 1_000, 3_000])
@pytest.mark.parametrize("trace", TRACES)
def test_the_index_hits_as_often_as_an_exact_lru_of_pages(trace: str, capacity: int):
    requests = load(trace, REQUESTS)
    assert index_rate(requests, capacity) >= lru_rate(requests, capacity) > 0


def test_the_reference_lru_counts_only_the_unbroken_run_from_the_start():
    assert lru_rate([(1, 2, 3), (1, 9, 3), (3,)], 10) == pytest.approx(2 / 7)


def test_the_reference_lru_keeps_the_head_of_a_request_longest():
    assert lru_rate([(1, 2, 3), (4,), (1, 2, 3)], 3) == pytest.approx(2 / 7)
