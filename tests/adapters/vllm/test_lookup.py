"""A waiting request is looked up as seldom as its answer can be trusted."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import nexuskv
from nexuskv.adapters.vllm.lookup import Lookups
from nexuskv.clock import ManualClock
from nexuskv.config import Config

if TYPE_CHECKING:
    from nexuskv.client.space import Space
    from nexuskv.client.store import Store
    from nexuskv.tools.daemon_process import DaemonProcess

pytestmark = pytest.mark.e2e

KEYS = [bytes([index]) * 32 for index in range(4)]
PAGE_BYTES = 4096
CONFIG = Config()


@pytest.fixture
def store(store_daemon: "DaemonProcess") -> "Iterator[Store]":
    with nexuskv.connect(store_daemon.url) as store:
        yield store


@pytest.fixture
def space(store: "Store") -> "Space":
    return store.namespace(model="m", dtype="float32", page_tokens=16, page_bytes=PAGE_BYTES)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def lookups(store: "Store", clock: ManualClock) -> Lookups:
    return Lookups(store, config=CONFIG, clock=clock, nonce=b"one")


def put(space: "Space", count: int) -> None:
    assert all(space.put(KEYS[:count], from_=[bytes(PAGE_BYTES)] * count))


def held(lookups: Lookups, space: "Space", *, local_blocks: int = 0) -> int:
    answer = lookups.ask("r", [space], KEYS, lora="", local_blocks=local_blocks)
    return answer.held_blocks


def lease_count(store: "Store", space: "Space") -> int:
    space.match(KEYS)  # an exchange, on which releases ride
    return len(list(store.inspect("leases")))


def test_miss_is_trusted_for_a_while(lookups: Lookups, space: "Space", clock: ManualClock) -> None:
    before = held(lookups, space)
    put(space, 2)
    clock.advance(CONFIG.adapter_miss_s * 0.9)
    assert (before, held(lookups, space)) == (0, 0)


def test_miss_is_asked_again_in_the_end(
    lookups: Lookups, space: "Space", clock: ManualClock
) -> None:
    held(lookups, space)
    put(space, 2)
    clock.advance(CONFIG.adapter_miss_s)
    assert held(lookups, space) == 2


def test_hit_is_leased_again_before_its_lease_ends(
    lookups: Lookups, space: "Space", clock: ManualClock
) -> None:
    put(space, 2)
    held(lookups, space)
    clock.advance(CONFIG.lease_ttl_s / 2)
    put(space, 3)
    assert held(lookups, space) == 3


def test_hit_asked_again_keeps_one_lease(
    lookups: Lookups, space: "Space", store: "Store", clock: ManualClock
) -> None:
    put(space, 2)
    held(lookups, space)
    clock.advance(CONFIG.lease_ttl_s / 2)
    held(lookups, space)
    assert lease_count(store, space) == 1


def test_hit_no_longer_than_the_engines_own_is_not_leased(
    lookups: Lookups, space: "Space", store: "Store"
) -> None:
    put(space, 2)
    held(lookups, space, local_blocks=2)
    assert lease_count(store, space) == 0


def test_dropped_request_gives_its_lease_back(
    lookups: Lookups, space: "Space", store: "Store"
) -> None:
    put(space, 2)
    held(lookups, space)
    lookups.drop("r")
    assert lease_count(store, space) == 0


def test_two_engines_with_one_request_id_have_leases_of_their_own(
    lookups: Lookups, space: "Space", store: "Store", clock: ManualClock
) -> None:
    put(space, 2)
    other = Lookups(store, config=CONFIG, clock=clock, nonce=b"two")
    held(lookups, space)
    held(other, space)
    assert lease_count(store, space) == 2


def test_joint_answer_is_the_shorter_one(lookups: Lookups, space: "Space", store: "Store") -> None:
    second = store.namespace(
        model="m", dtype="float32", page_tokens=16, page_bytes=PAGE_BYTES, tp_rank=1, tp_size=2
    )
    put(space, 3)
    put(second, 1)
    assert lookups.ask("r", [space, second], KEYS, lora="", local_blocks=0).held_blocks == 1
