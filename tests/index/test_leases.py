"""Claims about the lease table."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nexuskv.errors import LeaseExpired, OutOfSpace
from nexuskv.index.leases import EXPIRE_LEASES_MAX, LeaseTable

SLOTS = 5000


def taken(table: LeaseTable, request: bytes, slots: list[int], expires_s: float = 10.0) -> int:
    return table.take(tenant="t", request_id=request, slots=slots, expires_s=expires_s).lease_id


def test_a_leased_slot_is_leased_until_its_last_lease_ends():
    table = LeaseTable(leases_max=8, slot_count=SLOTS)
    one, two = taken(table, b"1", [1, 2]), taken(table, b"2", [2, 3])
    assert list(table.release(one, "t")) == [1]
    assert table.is_leased(2)
    assert sorted(table.release(two, "t")) == [2, 3]
    assert (table.leased_count, table.lease_count) == (0, 0)


def test_the_same_request_id_twice_is_one_lease():
    table = LeaseTable(leases_max=8, slot_count=SLOTS)
    one = taken(table, b"1", [1, 2])
    assert taken(table, b"1", [2, 3]) == one
    assert table.lease_count == 1
    assert sorted(table.release(one, "t")) == [1, 2, 3]


def test_the_same_request_id_of_two_tenants_is_two_leases():
    table = LeaseTable(leases_max=8, slot_count=SLOTS)
    one = table.take(tenant="t", request_id=b"1", slots=[1], expires_s=1.0)
    two = table.take(tenant="u", request_id=b"1", slots=[1], expires_s=1.0)
    assert one.lease_id != two.lease_id


def test_a_slot_named_twice_in_a_lease_counts_once():
    table = LeaseTable(leases_max=8, slot_count=SLOTS)
    one = taken(table, b"1", [1, 1])
    assert set(table.release(one, "t", [1, 1])) == {1}
    assert not table.is_leased(1)


def test_release_of_some_slots_keeps_the_rest():
    table = LeaseTable(leases_max=8, slot_count=SLOTS)
    one = taken(table, b"1", [1, 2, 3])
    assert list(table.release(one, "t", [2, 99])) == [2]
    assert sorted(table.release(one, "t")) == [1, 3]


def test_a_shared_slot_named_twice_stays_leased_by_the_other_lease():
    table = LeaseTable(leases_max=8, slot_count=SLOTS)
    one, two = taken(table, b"1", [1, 1]), taken(table, b"2", [1])
    assert list(table.release(one, "t")) == []
    assert table.is_leased(1)
    assert list(table.release(two, "t")) == [1]


@pytest.mark.parametrize("call", ["renew", "release", "get"])
@pytest.mark.parametrize("how", ["unknown", "ended", "expired", "other tenant"])
def test_a_lease_that_is_not_held_is_refused_alike(call: str, how: str):
    table = LeaseTable(leases_max=8, slot_count=SLOTS)
    lease_id, tenant = taken(table, b"1", [1]), "t"
    if how == "unknown":
        lease_id += 1
    elif how == "ended":
        table.release(lease_id, "t")
    elif how == "expired":
        table.expire(10.0)
    else:
        tenant = "u"
    calls: dict[str, Callable[[], object]] = {
        "renew": lambda: table.renew(lease_id, tenant, 99.0),
        "release": lambda: table.release(lease_id, tenant),
        "get": lambda: table.get(lease_id, tenant),
    }
    with pytest.raises(LeaseExpired, match=f"lease {lease_id} is not held"):
        calls[call]()


def test_expire_ends_what_is_due_and_keeps_what_was_renewed():
    table = LeaseTable(leases_max=8, slot_count=SLOTS)
    taken(table, b"1", [1], expires_s=1.0)
    two = taken(table, b"2", [2], expires_s=2.0)
    table.renew(two, "t", 5.0)
    assert table.next_expiry() == 1.0
    assert list(table.expire(3.0)) == [1]
    assert table.next_expiry() == 5.0
    assert list(table.expire(5.0)) == [2]
    assert table.next_expiry() is None


def test_renew_never_shortens():
    table = LeaseTable(leases_max=8, slot_count=SLOTS)
    one = taken(table, b"1", [1], expires_s=9.0)
    table.renew(one, "t", 1.0)
    taken(table, b"1", [], expires_s=2.0)
    assert table.next_expiry() == 9.0


def test_more_leases_than_allowed_are_refused_and_none_is_left_behind():
    table = LeaseTable(leases_max=1, slot_count=SLOTS)
    one = taken(table, b"1", [1])
    with pytest.raises(OutOfSpace):
        taken(table, b"2", [2])
    assert not table.is_leased(2)
    assert taken(table, b"1", [3]) == one


def test_expire_ends_a_bounded_number_a_call():
    table = LeaseTable(leases_max=5000, slot_count=SLOTS)
    for at in range(EXPIRE_LEASES_MAX + 5):
        taken(table, at.to_bytes(2, "big"), [at], expires_s=1.0)
    assert len(table.expire(2.0)) == EXPIRE_LEASES_MAX
    assert len(table.expire(2.0)) == 5


class LeasesAgainstADict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(leases_max=4, slot_count=SLOTS)
        self.now = 0.0
        self.model: dict[int, tuple[int, set[int], float]] = {}  # id → request, slots, end
        self.returned: set[int] = set()

    requests = st.integers(0, 5)
    slots = st.lists(st.integers(0, 8), max_size=6)

    @rule(request=requests, slots=slots, ttl_s=st.integers(1, 5))
    def take(self, request: int, slots: list[int], ttl_s: int) -> None:
        known = [i for i, (asked, _, _) in self.model.items() if asked == request]
        name, ends = bytes([request]), self.now + ttl_s
        if not known and len(self.model) == 4:
            with pytest.raises(OutOfSpace):
                self.table.take(tenant="t", request_id=name, slots=slots, expires_s=ends)
            return
        lease = self.table.take(tenant="t", request_id=name, slots=slots, expires_s=ends)
        assert not known or known == [lease.lease_id]
        _, held, end = self.model.get(lease.lease_id, (request, set[int](), 0.0))
        self.model[lease.lease_id] = request, held | set(slots), max(end, self.now + ttl_s)

    @rule(pick=st.integers(0, 3), slots=st.none() | slots)
    def release(self, pick: int, slots: list[int] | None) -> None:
        if pick >= len(self.model):
            return
        lease_id = sorted(self.model)[pick]
        before = self.leased()
        freed = self.table.release(lease_id, "t", slots)
        name, held, end = self.model.pop(lease_id)
        if slots is not None:
            self.model[lease_id] = name, held - set(slots), end
        assert set(freed) == before - self.leased()

    @rule(pick=st.integers(0, 3), ttl_s=st.integers(1, 5))
    def renew(self, pick: int, ttl_s: int) -> None:
        if pick < len(self.model):
            lease_id = sorted(self.model)[pick]
            self.table.renew(lease_id, "t", self.now + ttl_s)
            name, held, end = self.model[lease_id]
            self.model[lease_id] = name, held, max(end, self.now + ttl_s)

    @rule(seconds=st.integers(0, 4))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        before = self.leased()
        freed = self.table.expire(self.now)
        self.model = {i: held for i, held in self.model.items() if held[2] > self.now}
        assert set(freed) == before - self.leased()

    def leased(self) -> set[int]:
        return set[int]().union(*(held for _, held, _ in self.model.values()))

    @invariant()
    def agrees(self) -> None:
        leased = self.leased()
        assert {slot for slot in range(9) if self.table.is_leased(slot)} == leased
        assert self.table.leased_count == len(leased)
        assert self.table.lease_count == len(self.model)
        ends = [end for _, _, end in self.model.values()]
        assert self.table.next_expiry() == (min(ends) if ends else None)


TestLeasesAgainstADict = LeasesAgainstADict.TestCase
TestLeasesAgainstADict.settings = settings(max_examples=30, deadline=None)
