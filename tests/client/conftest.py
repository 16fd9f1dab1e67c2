import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nexuskv.client.space import Space
from nexuskv.client.store import Store, connect
from nexuskv.config import Config
from tests.client.fake_daemon import FakeDaemon

PAGE_BYTES = 6000


def quick(**changes: float) -> Config:
    """Short waits, so that a test of a timeout ends soon."""
    values: dict[str, float] = {
        "connect_timeout_s": 2.0,
        "request_timeout_s": 2.0,
        "backoff_min_s": 0.01,
        "backoff_max_s": 0.05,
        "release_delay_s": 30.0,
        **changes,
    }
    return Config(**values)  # type: ignore[arg-type]  # checked by Config


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    yield fake
    fake.stop()


@pytest.fixture
def store(daemon: FakeDaemon) -> Iterator[Store]:
    before = set(threading.enumerate())
    with connect(daemon.url, quick()) as opened:
        yield opened
    left = [t.name for t in set(threading.enumerate()) - before if t.name == "nexuskv-keeper"]
    assert left == []


@pytest.fixture
def space(store: Store) -> Space:
    return space_of(store)


def space_of(store: Store) -> Space:
    return store.namespace(
        model="m", dtype="bf16", page_tokens=16, page_bytes=PAGE_BYTES, key_bytes=8
    )


def keys_of(count: int, start: int = 0) -> list[bytes]:
    return [f"key{n:05d}".encode() for n in range(start, start + count)]


def page(seed: int) -> bytes:
    return bytes((seed * 31 + i) % 251 for i in range(PAGE_BYTES))


def room(count: int) -> list[bytearray]:
    return [bytearray(PAGE_BYTES) for _ in range(count)]


def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that another thread brings about."""
    turn = threading.Event()
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        turn.wait(0.005)
