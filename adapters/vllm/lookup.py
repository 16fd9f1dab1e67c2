"""What the store holds of a waiting request: one leased look, kept while the request waits.

The engine may ask for the same request at every step until it finds room, so an answer is kept for
as long as it can be trusted: a hit for half its lease, a miss for `adapter_miss_s`. Owns the
leases until a load takes them over. Used by the scheduler's thread alone.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.key import PageKey

if TYPE_CHECKING:
    from nexuskv.client.lease import Lease
    from nexuskv.client.space import Space
    from nexuskv.client.store import Store

REQUEST_ID_BYTES: Final = 16


@dataclass(slots=True)
class Lookup:
    """One answer. `lease` is None when there is nothing to load."""

    lora: str
    held_blocks: int  # from the request's start, held by all ranks
    until_s: float
    local_blocks: int = 0  # the engine's own hit when it asked last
    lease: "Lease | None" = None


class Lookups:
    """Answers by engine request id."""

    def __init__(self, store: "Store", *, config: Config, clock: Clock, nonce: bytes) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._nonce = nonce
        self._asked_count = 0
        self._answers: dict[str, Lookup] = {}

    def ask(
        self,
        request_id: str,
        spaces: "Sequence[Space]",
        keys: Sequence[PageKey],
        *,
        lora: str,
        local_blocks: int,
    ) -> Lookup:
        """How many blocks from the start all spaces hold; leased if that is more than the engine's.

        Asking again while the last answer can be trusted asks nobody.
        """
        answer = self._answers.get(request_id)
        if answer is None or self._clock.now() >= answer.until_s:
            self.drop(request_id)
            answer = self._acquire(request_id, spaces, keys, lora=lora, local_blocks=local_blocks)
            self._answers[request_id] = answer
        answer.local_blocks = local_blocks
        if answer.held_blocks <= local_blocks and answer.lease is not None:
            answer.lease.release()
            answer.lease = None
        return answer

    def take(self, request_id: str) -> Lookup | None:
        """Hand the last answer, and its lease, to the caller."""
        return self._answers.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        """Forget a request and give its lease back."""
        answer = self._answers.pop(request_id, None)
        if answer is not None and answer.lease is not None:
            answer.lease.release()

    def drop_all(self) -> None:
        """Forget every request."""
        for request_id in list(self._answers):
            self.drop(request_id)

    def _acquire(
        self,
        request_id: str,
        spaces: "Sequence[Space]",
        keys: Sequence[PageKey],
        *,
        lora: str,
        local_blocks: int,
    ) -> Lookup:
        now_s = self._clock.now()
        lease = self._store.acquire(
            [(space, keys) for space in spaces],
            request_id=self._lease_id(request_id),
            ttl_s=self._config.lease_ttl_s,
            load=self._config.adapter_load_ssd,
        )
        held = min((match.page_count for match in lease.matches), default=0)
        if held <= local_blocks:
            lease.release()
            return Lookup(lora, held, now_s + self._config.adapter_miss_s, local_blocks)
        until_s = now_s + self._config.lease_ttl_s / 2
        return Lookup(lora, held, until_s, local_blocks, lease)

    def _lease_id(self, request_id: str) -> bytes:
        """An id no other engine uses: leases of one tenant are shared by their id."""
        self._asked_count += 1
        text = f"{self._asked_count} {request_id}".encode()
        return hashlib.blake2b(self._nonce + text, digest_size=REQUEST_ID_BYTES).digest()
