"""Leases: which slots may not be evicted or overwritten, for whom and until when.

Owns the table of leases and, for every slot, how many of them name it: a prefix that many requests
share is leased by each of them, so counting must not cost more when leases overlap. A lease ends by
release or by time. Pure: times come in as arguments. Bounds: `leases_max` leases, one heap entry a
lease plus as many again that are stale. Threading: one thread, the control loop.

The one module of the index that uses numpy: a batch of 512 slots is counted in one operation.
"""

import heapq
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from nexuskv.errors import LeaseExpired, OutOfSpace

_ONE: Final = np.uint32(1)
_NO_SLOTS: Final = np.zeros(0, dtype=np.uint32)

EXPIRE_LEASES_MAX: Final = 1024
"""Leases one call of `expire` ends."""


SlotArray = npt.NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class Lease:
    """A time-bounded right to read `slots`, until `expires_s`."""

    lease_id: int
    tenant: str
    request_id: bytes
    expires_s: float
    slots: SlotArray


class LeaseTable:
    """The leases of one daemon, each under the request id its tenant chose.

    Args:
        leases_max: leases held at a time.
        slot_count: slots are numbered from 0 below this.
        first_id: the first lease's id; the next ones count on.
    """

    def __init__(self, *, leases_max: int, slot_count: int, first_id: int = 1) -> None:
        self._leases_max = leases_max
        self._leases: dict[int, Lease] = {}
        self._ids: dict[tuple[str, bytes], int] = {}
        self._heap: list[tuple[float, int]] = []
        self._last_id = first_id - 1
        # Untouched parts take no memory. One number is read several times quicker from the view.
        self._counts = np.zeros(slot_count, dtype=np.uint32)
        self._count_of = self._counts.data

    def all(self) -> list[Lease]:
        """Every lease, oldest first."""
        return list(self._leases.values())

    @property
    def lease_count(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    @property
    def leased_count(self) -> int:
        """Slots that some lease names. Looks at every slot: for people, not for requests."""
        return int(np.count_nonzero(self._counts))

    def is_leased(self, slot: int) -> bool:
        """Whether some lease names a slot."""
        return self._count_of[slot] != 0

    def take(
        self, *, tenant: str, request_id: bytes, slots: Iterable[int], expires_s: float
    ) -> Lease:
        """Lease slots under a request id; the same id again adds to the same lease.

        Args:
            tenant: who may use, renew and release it.
            request_id: chosen by the tenant.
            slots: a slot named twice counts once.
            expires_s: when it ends; an earlier time than it has is ignored.

        Raises:
            OutOfSpace: `leases_max` leases are held.
        """
        lease = self._find(tenant, request_id)
        if lease is None:
            lease = self._open(tenant, request_id, expires_s)
        elif expires_s > lease.expires_s:
            lease.expires_s = expires_s
        fresh = _as_array(slots)
        if len(lease.slots):
            fresh = np.setdiff1d(fresh, lease.slots)
            lease.slots = np.concatenate((lease.slots, fresh))
        else:
            lease.slots = fresh
        # A slot that is named twice is counted once: both places are read before one is written.
        self._counts[fresh.astype(np.intp)] += _ONE  # numpy indexes by intp twice as fast
        return lease

    def _find(self, tenant: str, request_id: bytes) -> Lease | None:
        lease_id = self._ids.get((tenant, request_id))
        return None if lease_id is None else self._leases[lease_id]

    def _open(self, tenant: str, request_id: bytes, expires_s: float) -> Lease:
        if len(self._leases) >= self._leases_max:
            raise OutOfSpace(f"{self._leases_max} leases are held, the most allowed (leases_max)")
        self._last_id += 1
        lease = Lease(self._last_id, tenant, request_id, expires_s, _NO_SLOTS)
        self._leases[lease.lease_id] = lease
        self._ids[tenant, request_id] = lease.lease_id
        heapq.heappush(self._heap, (expires_s, lease.lease_id))
        if len(self._heap) > 2 * len(self._leases) + EXPIRE_LEASES_MAX:
            self._heap = [(held.expires_s, held.lease_id) for held in self._leases.values()]
            heapq.heapify(self._heap)
        return lease

    def get(self, lease_id: int, tenant: str) -> Lease:
        """The lease of an id.

        Raises:
            LeaseExpired: it is unknown, has ended, or is another tenant's; which is not told.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.tenant != tenant:
            raise LeaseExpired(f"lease {lease_id} is not held")
        return lease

    def renew(self, lease_id: int, tenant: str, expires_s: float) -> None:
        """Move the end of a lease; an earlier time than it has is ignored.

        Raises:
            LeaseExpired: it is unknown, has ended, or is another tenant's; which is not told.
        """
        lease = self.get(lease_id, tenant)
        lease.expires_s = max(lease.expires_s, expires_s)

    def release(self, lease_id: int, tenant: str, slots: Iterable[int] | None = None) -> SlotArray:
        """End a lease, or with `slots` take only these out of it.

        Returns:
            The slots that no lease names any more; twice where the lease was given them twice.

        Raises:
            LeaseExpired: it is unknown, has ended, or is another tenant's; which is not told.
        """
        lease = self.get(lease_id, tenant)
        if slots is None:
            return self._end(lease)
        gone = np.intersect1d(lease.slots, _as_array(slots))
        lease.slots = np.setdiff1d(lease.slots, gone)
        return self._free(gone)

    def expire(self, now_s: float) -> SlotArray:
        """End the leases whose time has come, at most `EXPIRE_LEASES_MAX` a call.

        Returns:
            The slots that no lease names any more.
        """
        freed: list[SlotArray] = []
        for _ in range(EXPIRE_LEASES_MAX):
            expires_s = self.next_expiry()
            if expires_s is None or expires_s > now_s:
                break
            freed.append(self._end(self._leases[self._heap[0][1]]))
        return np.concatenate(freed) if freed else _NO_SLOTS

    def next_expiry(self) -> float | None:
        """When the first lease ends, in seconds; None without leases."""
        heap = self._heap
        while heap:
            expires_s, lease_id = heap[0]
            lease = self._leases.get(lease_id)
            if lease is None:
                heapq.heappop(heap)
            elif lease.expires_s != expires_s:
                heapq.heapreplace(heap, (lease.expires_s, lease_id))
            else:
                return expires_s
        return None

    def _end(self, lease: Lease) -> SlotArray:
        del self._leases[lease.lease_id]
        del self._ids[lease.tenant, lease.request_id]
        return self._free(lease.slots)

    def _free(self, gone: SlotArray) -> SlotArray:
        at = gone.astype(np.intp)
        counts = self._counts[at]
        self._counts[at] = counts - _ONE
        freed: SlotArray = gone[counts == 1]
        return freed


def _as_array(slots: Iterable[int]) -> SlotArray:
    """The slots as numpy has them; an array of u32 is not copied."""
    if isinstance(slots, np.ndarray):
        return slots
    if isinstance(slots, array):
        return np.frombuffer(slots, dtype=np.uint32)
    return np.array(list(slots), dtype=np.uint32)
