"""Chains of pages on disk for benchmarks, and waiting until a daemon has copied them there."""

import hashlib
import time
from collections.abc import Mapping
from typing import Final

from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.errors import NexusError, TransferTimeout

KEY_BYTES: Final = 32
COPY_TIMEOUT_S: Final = 120.0


def space_of(store: Store, page_bytes: int, model: str = "bench/ssd") -> Space:
    """The space that these benchmarks use."""
    return store.namespace(
        model=model, dtype="uint8", page_tokens=16, page_bytes=page_bytes, key_bytes=KEY_BYTES
    )


def chain_keys(chain: int, pages: int) -> list[bytes]:
    """The keys of one chain; the same in every process."""
    last = chain.to_bytes(8, "little")
    keys: list[bytes] = []
    for _ in range(pages):
        last = hashlib.blake2b(last, digest_size=KEY_BYTES).digest()
        keys.append(last)
    return keys


def figures(store: Store, group: str) -> Mapping[str, int]:
    """The daemon's `gauges` or `counters` now."""
    found = store.stats()[group]
    assert isinstance(found, dict)
    return found


def check_ssd(store: Store) -> None:
    """Check that the daemon has its ssd tier.

    Raises:
        NexusError: it has none, or not within the time a copy may take.
    """
    end_s = time.monotonic() + COPY_TIMEOUT_S
    while (state := store.stats().get("ssd")) == "starting" and time.monotonic() < end_s:
        pass
    if state != "ready":
        raise NexusError(f"the daemon's ssd tier is {state}")


def wait_copied(store: Store, page_count: int) -> None:
    """Wait until the daemon has copied so many pages to disk since it started.

    Raises:
        TransferTimeout: it has not, within `COPY_TIMEOUT_S` without one more.
        NexusError: it has dropped some: it was not given time.
    """
    seen, end_s = -1, 0.0
    while True:
        counters = figures(store, "counters")
        done = counters.get("copies_done", 0)
        if done >= page_count:
            return
        if lost := counters.get("copies_dropped", 0) + counters.get("copies_failed", 0):
            raise NexusError(f"{lost} pages were not copied to disk")
        if done != seen:
            seen, end_s = done, time.monotonic() + COPY_TIMEOUT_S
        elif time.monotonic() > end_s:
            raise TransferTimeout(f"{done} of {page_count} pages copied, no more came")
