"""acquire, renew and release: pages that are read are neither evicted nor overwritten (I5)."""

import pytest

from nexuskv.errors import ConfigError, LeaseExpired, OutOfSpace
from nexuskv.protocol import AcquireState, Type
from nexuskv.types import PageStatus
from tests.control.conftest import StartRig
from tests.control.raw import PAGE_BYTES, chain, is_status
from tests.control.rig import Rig

STORED, NO_SPACE = PageStatus.STORED, PageStatus.NO_SPACE
POOL_PAGES = 64


def test_acquire_answers_descriptors_of_held_pages_and_holes_for_the_rest(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 4)
    client.put(space, keys[:2])
    group = client.acquire(space, keys)
    assert sorted(group.pages()) == [0, 1]
    assert (group.state, group.tokens, group.counts) == (AcquireState.DEADLINE, 32, [2])


def test_acquire_of_nothing_held_takes_no_lease(rig: Rig) -> None:
    client = rig.local()
    assert client.acquire(client.open(), chain("a", 4)).lease == 0
    assert rig.gauges()["leases"] == 0


def test_leased_pages_are_not_evicted_under_pressure(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    client.put(space, chain("read", 16))
    before = client.acquire(space, chain("read", 16)).pages()
    for name in ("x", "y", "z"):
        client.put(space, chain(name, POOL_PAGES))
    assert client.acquire(space, chain("read", 16), request=b"again").pages() == before


def test_pages_are_evictable_again_once_their_lease_has_ended(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    client.put(space, chain("read", 16))
    client.acquire(space, chain("read", 16), ttl_ms=5000)
    rig.advance(5.4)
    assert rig.gauges()["leased_slots"] == 16  # the daemon keeps it for a margin longer
    rig.advance(0.2)
    assert rig.gauges()["leased_slots"] == 0
    assert is_status(client.put(space, chain("x", POOL_PAGES)), STORED)


def test_a_store_of_leased_pages_only_says_no_space_and_recovers(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    client.put(space, chain("read", POOL_PAGES))
    lease = client.acquire(space, chain("read", POOL_PAGES)).lease
    assert is_status(client.put(space, chain("x", 4)), NO_SPACE)
    client.release(lease)
    assert is_status(client.put(space, chain("x", 4)), STORED)


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_unlinked_pages_keep_their_slots_until_the_lease_ends(rig: Rig, how: str) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 8)
    client.put(space, keys)
    group = client.acquire(space, keys, ttl_ms=1000)
    body = (space, b"".join(keys)) if how == "remove" else (space,)
    client.call(Type.REMOVE if how == "remove" else Type.CLEAR, *body)
    assert client.match(space, keys) == 0
    assert rig.gauges()["unlinked_bytes"] == 8 * PAGE_BYTES
    leased = {d.offset_bytes for d in group.pages().values()}
    _, _, lent = client.reserve(space, chain("x", POOL_PAGES))
    assert not leased & {d.offset_bytes for d in lent if d.size_bytes}
    rig.advance(2.0)
    assert rig.gauges()["unlinked_bytes"] == 0


def test_the_last_of_two_leases_frees_an_unlinked_page(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    client.put(space, keys)
    leases = [client.acquire(space, keys, request=name).lease for name in (b"one", b"two")]
    client.call(Type.REMOVE, space, keys[0])
    client.release(leases[0])
    assert rig.gauges()["unlinked_slots"] == 1
    client.release(leases[1])
    assert rig.gauges()["unlinked_slots"] == 0


def test_a_page_removed_while_leased_can_still_be_released_by_its_key(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 2)
    client.put(space, keys)
    lease = client.acquire(space, keys).lease
    client.call(Type.REMOVE, space, keys[0])
    client.release_pages(lease, space, keys)
    gauges = rig.gauges()
    assert (gauges["unlinked_slots"], gauges["leased_slots"]) == (0, 0)


def test_a_release_by_key_leaves_a_newer_page_of_that_key_to_its_own_lease(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    client.put(space, keys)
    old = client.acquire(space, keys, request=b"old").lease
    client.call(Type.CLEAR, space)
    client.put(space, keys)
    client.acquire(space, keys, request=b"new")
    client.release_pages(old, space, keys)
    assert rig.gauges()["leased_slots"] == 1
    client.put(space, chain("x", POOL_PAGES))
    assert client.match(space, keys) == 1


def test_the_same_request_id_twice_is_one_lease(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 4)
    client.put(space, keys[:2])
    first = client.acquire(space, keys, request=b"mine")
    client.put(space, keys[2:], parent=keys[1])
    second = client.acquire(space, keys, request=b"mine")
    assert first.lease == second.lease
    assert rig.gauges()["leases"] == 1
    client.release(first.lease)
    assert rig.gauges()["leased_slots"] == 0


def test_the_same_request_id_of_another_tenant_is_another_lease(rig: Rig) -> None:
    leases: set[int] = set()
    for tenant in ("red", "blue"):
        client = rig.local(tenant=tenant)
        space = client.open(tenant=tenant)
        client.put(space, chain("a", 1))
        leases.add(client.acquire(space, chain("a", 1), request=b"mine").lease)
    assert len(leases) == 2


def test_a_lease_taken_by_one_session_is_renewed_and_released_by_another(rig: Rig) -> None:
    one, two = rig.local(), rig.remote()
    space = one.open()
    one.put(space, chain("a", 2))
    lease = one.acquire(space, chain("a", 2), ttl_ms=1000).lease
    assert two.call(Type.RENEW, lease, 60_000) == [60_000]
    one.close()
    rig.advance(30.0)
    assert rig.gauges()["leased_slots"] == 2
    assert two.release(lease) == 1
    assert rig.gauges()["leased_slots"] == 0


def test_a_lease_may_be_read_under_by_another_session_of_the_tenant(rig: Rig) -> None:
    one, two = rig.local(), rig.local()
    spaces, keys = (one.open(), two.open()), chain("a", 2)
    one.put(spaces[0], keys)
    lease = one.acquire(spaces[0], keys, request=b"r").lease
    group = two.acquire(spaces[1], keys, request=b"r", lease=lease)
    assert (group.lease, sorted(group.pages())) == (lease, [0, 1])


def test_another_tenants_lease_is_refused(rig: Rig) -> None:
    red, blue = rig.local(tenant="red"), rig.local(tenant="blue")
    space = red.open(tenant="red")
    red.put(space, chain("a", 1))
    lease = red.acquire(space, chain("a", 1)).lease
    other = blue.open(tenant="blue")
    with pytest.raises(LeaseExpired):
        blue.call(Type.RENEW, lease, 1000)
    with pytest.raises(LeaseExpired):
        blue.acquire(other, chain("a", 1), lease=lease)
    assert blue.release(lease) == 0
    assert rig.gauges()["leased_slots"] == 1


def test_an_acquire_under_a_lease_that_has_ended_is_refused(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    client.put(space, keys)
    lease = client.acquire(space, keys, ttl_ms=1000).lease
    rig.advance(2.0)
    with pytest.raises(LeaseExpired):
        client.acquire(space, keys, lease=lease)


def test_an_acquire_under_a_lease_of_another_request_id_is_refused(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    client.put(space, keys)
    lease = client.acquire(space, keys, request=b"one").lease
    with pytest.raises(ConfigError, match="request id"):
        client.acquire(space, keys, request=b"two", lease=lease)


def test_renewing_never_shortens_a_lease(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    client.put(space, keys)
    lease = client.acquire(space, keys, ttl_ms=60_000).lease
    client.call(Type.RENEW, lease, 1)
    rig.advance(30.0)
    assert rig.gauges()["leases"] == 1


@pytest.mark.parametrize("ttl_ms", [0, 600_001, 2**64 - 1])
def test_a_lease_time_out_of_bounds_is_refused(rig: Rig, ttl_ms: int) -> None:
    client = rig.local()
    with pytest.raises(ConfigError, match="lease_ttl_max_s"):
        client.acquire(client.open(), chain("a", 1), ttl_ms=ttl_ms)


@pytest.mark.parametrize("request_id", [b"", bytes(65)], ids=["0", "65"])
def test_a_request_id_of_wrong_length_is_refused(rig: Rig, request_id: bytes) -> None:
    client = rig.local()
    with pytest.raises(ConfigError, match="1-64 bytes"):
        client.acquire(client.open(), chain("a", 1), request=request_id)


def test_leases_beyond_the_limit_are_refused(start_rig: StartRig) -> None:
    rig = start_rig(leases_max=2)
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    client.put(space, keys)
    leases = [client.acquire(space, keys, request=name).lease for name in (b"a", b"b")]
    with pytest.raises(OutOfSpace, match="leases_max"):
        client.acquire(space, keys, request=b"c")
    client.release(leases[0])
    assert client.acquire(space, keys, request=b"c").lease


def test_leases_beyond_one_sweeps_share_all_end(start_rig: StartRig) -> None:
    rig = start_rig()
    client = rig.local()
    space, keys = client.open(), chain("a", 1)
    client.put(space, keys)
    for at in range(1500):
        client.acquire(space, keys, request=b"%d" % at, ttl_ms=1000)
    rig.advance(2.0)
    rig.until(lambda: rig.control.metrics.gauges()["leases"] == 0)


def test_parts_of_a_lease_are_released_one_by_one(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 4)
    client.put(space, keys)
    lease = client.acquire(space, keys).lease
    assert client.release_pages(lease, space, keys[:3]) == 3
    assert rig.gauges()["leased_slots"] == 1
    client.release(lease)


@pytest.mark.parametrize(
    "body",
    [
        (["1"], [], []),
        ([], [[1, 0]], []),
        ([], [[1, 0, "k"]], []),
        ([], ["x"], []),
        ([], [], [[0, b"k"]]),
        ([], [], [[9, bytes(32), 1, 1]]),
    ],
)
def test_a_malformed_release_is_refused(rig: Rig, body: tuple[object, ...]) -> None:
    client = rig.local()
    client.open()
    with pytest.raises(ConfigError):
        client.call(Type.RELEASE, *body)


def test_the_end_of_a_session_does_not_end_its_leases(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    client.put(space, chain("a", 2))
    client.acquire(space, chain("a", 2))
    client.close()
    rig.until(lambda: rig.control.metrics.gauges()["sessions"] == 0)
    assert rig.gauges()["leased_slots"] == 2
