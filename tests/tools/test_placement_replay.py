"""The replay of two tiers agrees with what is known of one, on the first requests of the traces."""

import pytest

from nexuskv.config import SSD_POLICIES
from nexuskv.tools.bench.hitrate import index_rate, load
from nexuskv.tools.bench.lru import lru_rate
from nexuskv.tools.bench.placement import Tally, replay, rows
from nexuskv.tools.trace import TRACES

REQUESTS = 600
HOST, SSD = 400, 2_000


def run(trace: str, policy: str, *, ssd_pages: int = SSD, copies: int | None = None) -> Tally:
    return replay(
        load(trace, REQUESTS),
        policy=policy,
        host_pages=HOST,
        ssd_pages=ssd_pages,
        copies_per_request=copies,
    )


@pytest.mark.parametrize("policy", SSD_POLICIES)
@pytest.mark.parametrize("trace", TRACES)
def test_without_an_ssd_the_rate_is_that_of_one_tier(trace: str, policy: str) -> None:
    tally = run(trace, policy, ssd_pages=0)
    assert tally.hits / tally.asked == index_rate(load(trace, REQUESTS), HOST) > 0
    assert (tally.ssd_hits, tally.written, tally.dropped) == (0, 0, 0)


@pytest.mark.parametrize("trace", TRACES)
def test_write_through_hits_as_an_lru_of_the_ssd_s_size(trace: str) -> None:
    tally = run(trace, "write_through")
    assert tally.hits / tally.asked == pytest.approx(
        lru_rate(load(trace, REQUESTS), SSD), rel=0.005
    )


@pytest.mark.parametrize("trace", TRACES)
def test_write_through_hits_host_memory_as_an_lru_of_its_size(trace: str) -> None:
    tally = run(trace, "write_through")
    assert tally.host_hits / tally.asked == pytest.approx(
        lru_rate(load(trace, REQUESTS), HOST), rel=0.005
    )


def test_write_through_writes_each_page_missed_once() -> None:
    tally = run("synthetic", "write_through")
    assert tally.written == tally.asked - tally.hits


def test_on_second_use_writes_less_and_still_hits_the_ssd() -> None:
    through, second = run("synthetic", "write_through"), run("synthetic", "on_second_use")
    assert second.written < through.written / 2
    assert second.ssd_hits > 0


def test_on_evict_hits_as_write_through_where_copies_are_fast() -> None:
    through, evict = run("synthetic", "write_through"), run("synthetic", "on_evict")
    assert evict.hits == pytest.approx(through.hits, rel=0.005)


@pytest.mark.parametrize("policy", ["write_through", "on_evict"])
def test_a_slow_ssd_drops_copies_and_ends_no_more_than_it_can(policy: str) -> None:
    tally = run("synthetic", policy, copies=2)
    assert tally.dropped > 0
    assert tally.written <= 2 * REQUESTS


def test_all_hits_on_the_ssd_are_promoted() -> None:
    tally = run("synthetic", "write_through")
    assert tally.promoted == tally.ssd_hits > 0


def test_each_policy_has_a_row_for_hits_host_hits_and_writes() -> None:
    found = rows("synthetic", load("synthetic", 50), quick=True)
    assert [str(each["name"]) for each in found] == [
        f"synthetic 1000+10000 pages {policy}{what}"
        for policy in SSD_POLICIES
        for what in ("", ", host", ", written")
    ]
