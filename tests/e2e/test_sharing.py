"""What may share and what must not: namespaces, chains in pieces, kinds, pressure, page sizes."""

import random
from dataclasses import replace

import pytest

import nexuskv
from nexuskv.client.space import Space
from nexuskv.client.store import Store
from nexuskv.errors import ConfigError
from nexuskv.key import KEY_BYTES_MAX, KEY_BYTES_MIN
from nexuskv.namespace import NamespaceRecord
from nexuskv.tools.daemon_process import DaemonProcess
from nexuskv.types import Kind, PageStatus
from tests.e2e.cache import (
    KIB,
    MIB,
    chain,
    count_good,
    counters,
    gauges,
    open_space,
    open_store,
    page,
    pages,
    put,
    wait_populated,
)
from tests.e2e.conftest import StartDaemon

pytestmark = pytest.mark.e2e

BASE = NamespaceRecord(
    tenant="default",
    model="m",
    weights_revision="r1",
    dtype="bfloat16",
    quantization="none",
    scales="s",
    page_tokens=16,
    page_bytes=64 * KIB,
    layer_first=1,
    layer_count=2,
    kv_heads=8,
    head_dim_k=128,
    head_dim_v=128,
    layout="LBHNC",
    interface="test",
    key_scheme="sha256",
    key_seed="0",
    tp_rank=0,
    tp_size=2,
    pp_rank=0,
    pp_size=2,
    cp_rank=0,
    cp_size=2,
    dcp_rank=0,
    dcp_size=2,
    group_index=0,
    lora="l",
    extra=(("a", "b"),),
)
CHANGES: dict[str, dict[str, object]] = {
    "model": {"model": "m2"},
    "weights_revision": {"weights_revision": "r2"},
    "dtype": {"dtype": "float8"},
    "quantization": {"quantization": "int8"},
    "scales": {"scales": "t"},
    "page_tokens": {"page_tokens": 32},
    "page_bytes": {"page_bytes": 60 * KIB},
    "layer_first": {"layer_first": 0},
    "layer_count": {"layer_count": 3},
    "kv_heads": {"kv_heads": 4},
    "head_dim_k": {"head_dim_k": 64},
    "head_dim_v": {"head_dim_v": 64},
    "layout": {"layout": "LBNHC"},
    "interface": {"interface": "other"},
    "key_scheme": {"key_scheme": "xxh"},
    "key_seed": {"key_seed": "1"},
    "tp_rank": {"tp_rank": 1},
    "tp_size": {"tp_size": 4},
    "pp_rank": {"pp_rank": 1},
    "pp_size": {"pp_size": 4},
    "cp_rank": {"cp_rank": 1},
    "cp_size": {"cp_size": 4},
    "dcp_rank": {"dcp_rank": 1},
    "dcp_size": {"dcp_size": 4},
    "group_index": {"group_index": 1},
    "kind": {"kind": Kind.STATE},
    "window": {"kind": Kind.WINDOW, "window_pages": 2},
    "lora": {"lora": "k"},
    "extra": {"extra": (("a", "c"),)},
}
ODD_NAMES = [
    "",
    " ",
    "a/b",
    "../../x",
    "ünïcode ☃",
    "tab\tnew\nline",
    "nul\0byte",
    "\ud800",
    "a" * 1000,
]


def _space_of(store: Store, record: NamespaceRecord) -> Space:
    return store.namespace(**{name: getattr(record, name) for name in record.__slots__})


def test_namespaces_that_differ_in_one_field_never_share(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        keys = chain("fields", 4)
        assert all(put(_space_of(store, BASE), keys))
        for name, change in CHANGES.items():
            other = _space_of(store, replace(BASE, **change))  # type: ignore[arg-type]  # by table
            assert count_good(other, keys) == 0, name
            assert other.match(keys).page_count == 0, name
        assert count_good(_space_of(store, replace(BASE)), keys) == 4


def test_tenants_never_share(daemon: DaemonProcess) -> None:
    keys = chain("tenants", 4)
    with open_store(daemon.url, tenant="one") as one, open_store(daemon.url, tenant="two") as two:
        assert all(put(open_space(one), keys))
        assert count_good(open_space(two), keys) == 0
        assert count_good(open_space(one), keys) == 4


@pytest.mark.parametrize("name", ODD_NAMES, ids=repr)
def test_a_model_may_have_any_name(daemon: DaemonProcess, name: str) -> None:
    with open_store(daemon.url) as store:
        keys = chain("odd", 2)
        assert all(put(open_space(store, model=name), keys))
        assert count_good(open_space(store, model=name), keys) == 2
        assert count_good(open_space(store, model=name + "."), keys) == 0


@pytest.mark.parametrize("key_bytes", [KEY_BYTES_MIN, 20, KEY_BYTES_MAX])
def test_keys_of_every_allowed_length_work(daemon: DaemonProcess, key_bytes: int) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store, key_bytes=key_bytes)
        keys = chain("lengths", 40, key_bytes=key_bytes)
        assert all(put(space, keys))
        assert count_good(space, keys) == 40


@pytest.mark.parametrize("key_bytes", [0, 7, 65])
def test_other_key_lengths_are_refused_before_anything_is_sent(
    daemon: DaemonProcess, key_bytes: int
) -> None:
    with open_store(daemon.url) as store:
        with pytest.raises(ConfigError, match="8-64"):
            open_space(store, key_bytes=key_bytes)
        with pytest.raises(ConfigError, match=f"{key_bytes} bytes"):
            open_space(store).match([bytes(key_bytes)])


def test_a_key_twice_in_a_batch_is_stored_once_and_read_twice(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        first, second = chain("twice", 2)
        data = pages([first, second, first], space.record.page_bytes)
        assert all(space.put([first, second, first], from_=data))
        assert gauges(store)["pages"] == 2
        into = [bytearray(space.record.page_bytes) for _ in range(3)]
        assert all(space.get([first, second, first], into=into))
        assert into == data
        with pytest.raises(ConfigError):
            space.put([first, first], from_=data[:2])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["head first", "tail first"])
def test_a_chain_put_in_two_halves_matches_whole(
    daemon: DaemonProcess, order: tuple[int, int]
) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store, page_bytes=4 * KIB)
        keys = chain("halves", 256)
        halves = [(keys[:128], None), (keys[128:], nexuskv.UNKNOWN)]
        for number in order:
            half, parent = halves[number]
            assert all(put(space, half, parent=parent))
        assert space.match(keys).page_count == 256
        assert count_good(space, keys) == 256


def test_absent_lying_and_cyclic_parents_lose_no_page(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        a, b, c = chain("a", 4), chain("b", 4), chain("c", 4)
        assert all(put(space, a))
        assert all(put(space, b, parent=chain("never", 1)[0]))  # absent
        assert all(put(space, c, parent=a[3]))
        assert all(put(space, c[:1], parent=b[3]))  # lying: c follows a
        assert all(put(space, a[:1], parent=c[3]))  # cyclic: a is an ancestor of c
        for keys in (a, b, c, a + c):
            assert count_good(space, keys) == len(keys)
        assert space.match(a + c).page_count == 8
        assert space.match(a + b).page_count == 4


def test_fifty_thousand_keys_match_in_one_call(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        wait_populated(store)
        space = open_space(store, page_bytes=4 * KIB)
        keys = chain("long", 50_000)
        data = [bytes(4 * KIB)] * len(keys)
        assert all(space.put(keys, from_=data))
        assert space.match(keys).page_count == 50_000


def test_pages_that_fit_nowhere_are_one_clear_error(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        with pytest.raises(ConfigError, match="page_bytes"):
            open_space(store, page_bytes=0)
        space = open_space(store, page_bytes=32 * MIB)
        with pytest.raises(ConfigError, match=r"33554432 .* 16777216"):
            space.put(chain("huge", 1), from_=[bytes(32 * MIB)])
        assert all(put(open_space(store), chain("fine", 2)))


def test_memory_of_the_wrong_size_is_refused_before_anything_is_sent(
    daemon: DaemonProcess,
) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store)
        keys = chain("sizes", 2)
        size = space.record.page_bytes
        for wrong in (size - 1, size + 1):
            with pytest.raises(ConfigError):
                space.put(keys, from_=[bytes(size), bytes(wrong)])
            with pytest.raises(ConfigError):
                space.get(keys, into=[bytearray(size), bytearray(wrong)])
        assert gauges(store)["pages"] == 0


def test_match_all_joins_attention_window_and_state(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        full = open_space(store, page_tokens=16, group_index=0)
        window = open_space(store, page_tokens=16, group_index=1, kind=Kind.WINDOW, window_pages=2)
        state = open_space(store, page_tokens=32, group_index=2, kind=Kind.STATE)
        names = {"full": full, "window": window, "state": state}
        keys = {
            "full": chain("f", 16),
            "window": chain("w", 16),
            "state": chain("s", 8, key_bytes=32),
        }
        rng = random.Random(7)
        for _ in range(12):
            held: dict[str, set[int]] = {}
            for name, space in names.items():
                space.clear()
                count = len(keys[name])
                if name == "full":
                    held[name] = set(range(rng.randrange(count + 1)))
                else:
                    held[name] = {i for i in range(count) if rng.random() < 0.7}
                for index in sorted(held[name]):
                    parent = keys[name][index - 1] if index else None
                    assert all(put(space, [keys[name][index]], parent=parent))
            answer = store.match_all([(names[name], keys[name]) for name in names])
            assert answer.token_count == _longest(held)


def _longest(held: dict[str, set[int]]) -> int:
    for tokens in range(256, 0, -32):
        pages16, pages32 = tokens // 16, tokens // 32
        if (
            held["full"] >= set(range(pages16))
            and held["window"] >= set(range(max(0, pages16 - 2), pages16))
            and pages32 - 1 in held["state"]
        ):
            return tokens
    return 0


def test_under_pressure_every_page_that_stays_is_reachable(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(host_memory="16MiB", chunk_bytes="1MiB")
    with open_store(daemon.url) as store:
        wait_populated(store)
        space = open_space(store, page_bytes=16 * KIB)
        rng = random.Random(3)
        chains: list[list[bytes]] = []
        for number in range(120):
            stem = rng.choice(chains)[: rng.randrange(1, 20)] if chains and number % 3 else []
            keys = stem + chain(f"branch {number}", rng.randrange(1, 30))
            chains.append(keys)
            put(space, keys)
        held = {row[0] for row in store.inspect("pages", namespace_id=space.id)}
        assert 0 < len(held) <= 1024
        assert counters(store)["evicted_pages"] > 0
        reachable: set[bytes] = set()
        for keys in chains:
            count = space.match(keys).page_count
            assert count_good(space, keys[:count]) == count
            reachable.update(keys[:count])
        assert held <= reachable


def test_memory_for_a_second_page_size_costs_the_first_two_chunks_at_most(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(host_memory="32MiB", chunk_bytes="4MiB")
    with open_store(daemon.url) as store:
        wait_populated(store)
        small = open_space(store, page_bytes=64 * KIB)
        for number in range(64):
            assert all(put(small, chain(f"small {number}", 8)))
        assert gauges(store)["spare_chunks"] == 0
        before = counters(store)["evicted_pages"]
        large = open_space(store, page_bytes=MIB)
        assert all(put(large, chain("large", 2)))
        assert count_good(large, chain("large", 2)) == 2
        pages_of_a_chunk = 4 * MIB // (64 * KIB)
        descendants = pages_of_a_chunk  # chains of 8 lie in few chunks
        evicted = counters(store)["evicted_pages"] - before
        assert 0 < evicted <= 2 * pages_of_a_chunk + descendants
        assert counters(store)["chunks_moved"] == 1


def test_a_namespace_stays_under_its_cap(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(namespace_bytes_max="4MiB")
    with open_store(daemon.url) as store:
        wait_populated(store)
        capped, other = open_space(store), open_space(store, model="other")
        assert all(put(other, chain("other", 16)))
        for number in range(16):
            assert all(put(capped, chain(f"capped {number}", 16)))
        assert gauges(store)["pages"] == 64 + 16
        assert count_good(other, chain("other", 16)) == 16


def test_pinned_pages_outlive_pressure(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(host_memory="16MiB", chunk_bytes="1MiB")
    with open_store(daemon.url) as store:
        wait_populated(store)
        space = open_space(store)
        pinned = chain("pinned", 8)
        assert all(put(space, pinned))
        assert space.pin(pinned, ttl_s=600) == 8
        for number in range(64):
            put(space, chain(f"pressure {number}", 16))
        assert count_good(space, pinned) == 8


def test_a_page_read_in_pieces_is_the_page(daemon: DaemonProcess) -> None:
    with open_store(daemon.url) as store:
        space = open_space(store, page_bytes=100_000)
        keys = chain("pieces", 5)
        data = pages(keys, 100_000)
        cut = [[memoryview(d)[:1], memoryview(d)[1:70_001], memoryview(d)[70_001:]] for d in data]
        assert all(space.put(keys, from_=cut))
        into = [[bytearray(99_999), bytearray(1)] for _ in keys]
        assert set(space.get(keys, into=into)) == {PageStatus.HIT}
        assert [b"".join(item) for item in into] == [page(key, 100_000) for key in keys]
