"""Pages and stores for whole-system tests: bytes that follow from their key, and clients."""

import hashlib
import time
from collections.abc import Callable, Mapping

from nexuskv.client.space import Space
from nexuskv.client.store import Store, connect
from nexuskv.config import load_config

KIB = 1024
MIB = 1024 * 1024
PATIENCE_S = 60.0


def open_store(url: str, **settings: object) -> Store:
    """A store with short waits, so that a test of a dead daemon ends soon."""
    fast = {"request_timeout_s": 2.0, "connect_timeout_s": 1.0, "backoff_max_s": 0.2}
    return connect(url, load_config(env={}, flags={**fast, **settings}).config)


def open_space(store: Store, *, page_bytes: int = 64 * KIB, **fields: object) -> Space:
    """A namespace of a model nobody else uses."""
    base = {"model": "e2e", "dtype": "bfloat16", "page_tokens": 16, "page_bytes": page_bytes}
    return store.namespace(**{**base, **fields})  # type: ignore[arg-type]  # plain keywords


def chain(name: str, count: int, *, key_bytes: int = 32) -> list[bytes]:
    """Keys of a chain: each commits to the name and all before it."""
    keys: list[bytes] = []
    last = name.encode()
    for _ in range(count):
        last = hashlib.blake2b(last, digest_size=key_bytes).digest()
        keys.append(last)
    return keys


def page(key: bytes, size_bytes: int, *, version: int = 0) -> bytes:
    """The page of a key: a block that follows from it, repeated."""
    seed = key + version.to_bytes(4, "little")
    block = b"".join(hashlib.sha512(seed + bytes([i])).digest() for i in range(64))
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def pages(keys: list[bytes], size_bytes: int, *, version: int = 0) -> list[bytes]:
    """The pages of some keys."""
    return [page(key, size_bytes, version=version) for key in keys]


def put(space: Space, keys: list[bytes], *, parent: object = None, version: int = 0) -> list[bool]:
    """Store the pages of a chain; truth a page."""
    data = pages(keys, space.record.page_bytes, version=version)
    return [bool(status) for status in space.put(keys, from_=data, parent=parent)]


def count_good(space: Space, keys: list[bytes], *, version: int = 0) -> int:
    """How many pages hit; a hit with other bytes than the key's fails the test."""
    size_bytes = space.record.page_bytes
    into = [bytearray(size_bytes) for _ in keys]
    good = 0
    for key, status, got in zip(keys, space.get(keys, into=into), into, strict=True):
        if status:
            assert got == page(key, size_bytes, version=version), f"wrong bytes for {key.hex()}"
            good += 1
    return good


def gauges(store: Store) -> Mapping[str, int]:
    """The daemon's gauges now."""
    found = store.stats()["gauges"]
    assert isinstance(found, dict)
    return found


def wait_populated(store: Store) -> None:
    """Wait until the daemon has all its memory: before that it evicts, and refuses, early."""
    eventually(
        lambda: gauges(store)["populated_bytes"] == gauges(store)["capacity_bytes"],
        "all memory is populated",
    )


def counters(store: Store) -> Mapping[str, int]:
    """The daemon's counters now."""
    found = store.stats()["counters"]
    assert isinstance(found, dict)
    return found


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Ask again and again, each question a round trip, until it holds or patience ends."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S} s: {what}"
