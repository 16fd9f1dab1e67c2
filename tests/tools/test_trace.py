from itertools import pairwise

import pytest

from nexuskv.errors import ConfigError
from nexuskv.tools.trace import TOKENS_PER_ID, TRACES, Request, read_trace


@pytest.mark.parametrize(("name", "request_count"), [("conversation", 12031), ("synthetic", 3993)])
def test_a_trace_holds_every_published_request(name: str, request_count: int) -> None:
    assert sum(1 for _ in read_trace(name)) == request_count


def test_a_line_becomes_a_request() -> None:
    assert next(read_trace("conversation")) == Request(0, 6758, 500, tuple(range(14)))


@pytest.mark.parametrize("name", TRACES)
def test_each_id_stands_for_one_started_run_of_tokens(name: str) -> None:
    for request in read_trace(name, limit=500):
        assert len(request.hash_ids) == -(-request.input_tokens // TOKENS_PER_ID)


@pytest.mark.parametrize("name", TRACES)
def test_requests_come_in_order_of_arrival(name: str) -> None:
    times_ms = [request.timestamp_ms for request in read_trace(name)]
    assert all(earlier <= later for earlier, later in pairwise(times_ms))


@pytest.mark.parametrize("limit", [0, 1, 7])
def test_limit_stops_the_reading(limit: int) -> None:
    assert len(list(read_trace("synthetic", limit=limit))) == limit


def test_an_unknown_trace_is_refused_at_the_call() -> None:
    with pytest.raises(ConfigError, match="conversation, synthetic"):
        read_trace("../conversation")
