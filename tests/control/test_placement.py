"""What each placement policy names, and that it remembers a bounded number of pages."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexuskv.config import SSD_POLICIES, Config
from nexuskv.control.placement import (
    OnEvict,
    OnSecondUse,
    Policy,
    Published,
    WriteThrough,
    make_policy,
    page_tags,
)
from nexuskv.errors import ConfigError
from nexuskv.tiers.chunks import SlotArray

ONE, OTHER = bytes(16), b"\1" * 16


def slots(*numbers: int) -> SlotArray:
    return np.array(numbers, dtype=np.uint32)


def joined(pages: Sequence[int], key_bytes: int = 32) -> bytes:
    """Keys that differ in their middle only."""
    return b"".join(page.to_bytes(key_bytes // 2, "big") + bytes(key_bytes // 2) for page in pages)


def make(name: str) -> Policy:
    return make_policy(name, second_use_pages_max=4096, ahead_pages_max=100)


def test_write_through_copies_what_is_published() -> None:
    assert WriteThrough(Published(pages_max=4096)).committed(
        ONE, joined([1, 2]), slots(7, 8)
    ).tolist() == [7, 8]


def test_write_through_under_pressure_copies_only_what_was_published_before() -> None:
    policy = WriteThrough(Published(pages_max=4096))
    policy.committed(ONE, joined([1]), slots(7))
    assert policy.committed(ONE, joined([1, 2]), slots(8, 9), pressed=True).tolist() == [8]


@pytest.mark.parametrize(
    "policy",
    [WriteThrough(Published(pages_max=4096)), OnSecondUse(Published(pages_max=8))],
    ids=["wt", "2nd"],
)
def test_a_use_names_pages_whose_copy_may_have_been_dropped(policy: Policy) -> None:
    assert policy.used(slots(3, 4)).tolist() == [3, 4]


def test_on_second_use_copies_nothing_that_is_published_for_the_first_time() -> None:
    policy = OnSecondUse(Published(pages_max=4096))
    assert policy.committed(ONE, joined([1, 2]), slots(7, 8)).tolist() == []


def test_on_second_use_copies_what_is_published_again_wherever_it_lies_now() -> None:
    policy = OnSecondUse(Published(pages_max=4096))
    policy.committed(ONE, joined([1, 2]), slots(7, 8))
    assert policy.committed(ONE, joined([1, 2, 3]), slots(19, 20, 21)).tolist() == [19, 20]


def test_on_second_use_copies_what_comes_before_a_page_that_it_remembers() -> None:
    policy = OnSecondUse(Published(pages_max=4096))
    policy.committed(ONE, joined([3]), slots(3))
    assert policy.committed(ONE, joined([1, 2, 3, 4]), slots(7, 8, 9, 10)).tolist() == [7, 8, 9]


def test_on_second_use_tells_namespaces_apart() -> None:
    policy = OnSecondUse(Published(pages_max=4096))
    policy.committed(ONE, joined([1]), slots(7))
    assert policy.committed(OTHER, joined([1]), slots(8)).tolist() == []


def remembered(policy: OnSecondUse, pages: Sequence[int]) -> int:
    """How many of these pages are seen as published before, each asked alone."""
    return sum(len(policy.committed(ONE, joined([page]), slots(page))) for page in pages)


def test_on_second_use_remembers_no_more_pages_than_it_may() -> None:
    policy, pages = OnSecondUse(Published(pages_max=64)), range(1000)
    policy.committed(ONE, joined(pages), slots(*pages))
    assert 1 <= remembered(policy, pages[::-1]) <= 64


def test_on_second_use_remembers_most_of_half_as_many_pages_as_it_may() -> None:
    policy, pages = OnSecondUse(Published(pages_max=4096)), range(2048)
    policy.committed(ONE, joined(pages), slots(*pages))
    assert remembered(policy, pages) > 0.6 * 2048


@pytest.mark.parametrize("name", SSD_POLICIES)
def test_no_pages_are_no_copies(name: str) -> None:
    policy = make(name)
    assert policy.committed(ONE, b"", slots()).tolist() == []
    assert policy.used(slots()).tolist() == []
    assert policy.leaving(0, free_count=0) == 0


def test_on_evict_names_no_hot_page() -> None:
    policy = OnEvict(ahead_pages_max=100)
    assert policy.committed(ONE, joined([1]), slots(7)).tolist() == []
    assert policy.used(slots(7)).tolist() == []


@pytest.mark.parametrize(
    ("committed", "free", "cold"),
    [(10, 0, 20), (10, 99, 20), (10, 100, 0), (80, 0, 100)],
    ids=["full", "nearly full", "room enough", "at most"],
)
def test_on_evict_copies_cold_pages_once_room_runs_out(
    committed: int, free: int, cold: int
) -> None:
    assert OnEvict(ahead_pages_max=100).leaving(committed, free_count=free) == cold


@pytest.mark.parametrize("name", ["write_through", "on_second_use"])
def test_only_on_evict_copies_cold_pages(name: str) -> None:
    assert make(name).leaving(10, free_count=0) == 0


@given(key_bytes=st.integers(8, 64), count=st.integers(1, 20), data=st.data())
def test_a_tag_depends_on_every_byte_of_a_key(
    key_bytes: int, count: int, data: st.DataObject
) -> None:
    keys = data.draw(st.binary(min_size=key_bytes * count, max_size=key_bytes * count))
    at = data.draw(st.integers(0, len(keys) - 1))
    changed = keys[:at] + bytes([keys[at] ^ 0x40]) + keys[at + 1 :]
    differs = page_tags(ONE, keys, count) != page_tags(ONE, changed, count)
    assert np.flatnonzero(differs).tolist() == [at // key_bytes]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="no placement policy 'lru'"):
        make("lru")


def test_an_unknown_policy_is_refused_before_anything_opens() -> None:
    with pytest.raises(ConfigError, match="ssd_policy cannot be 'lru'"):
        Config(ssd_policy="lru")
