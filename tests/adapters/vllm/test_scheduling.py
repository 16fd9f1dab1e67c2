"""The connector under a real vLLM scheduler and a real daemon.

In every step the harness checks that each token a request counts as computed, loaded or not, is in
the engine's blocks as computing would have left it; the claims below come on top of that.
"""

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import nexuskv
from nexuskv.namespace import NamespaceRecord

if TYPE_CHECKING:
    from nexuskv.client.store import Store
    from nexuskv.tools.daemon_process import DaemonProcess
    from tests.adapters.vllm.conftest import Harness, StartEngine

pytestmark = pytest.mark.engine

BLOCK_TOKENS = 16
PROMPT = list(range(2, 152))  # 9 blocks and 6 tokens; a step computes 64
OTHER_PROMPT = list(range(160, 310))
RECONNECT_S = 10.0


def prefills(steps: list[Any]) -> list[int]:
    """Tokens computed for each request in each step; decoding steps (one token) left out."""
    return [count for step in steps for count in step.scheduled.values() if count > 1]


def run(engine: "Harness", name: str, tokens: list[int] = PROMPT, **options: Any) -> list[int]:
    """Run one request to its end."""
    engine.add(name, tokens, **options)
    return prefills(engine.run())


def spaces(store: "Store") -> list[Any]:
    return [
        store.open(NamespaceRecord.decode(record))
        for _, record, *_ in store.inspect("namespaces")
        if isinstance(record, bytes)
    ]


def remove_page(url: str, key: bytes) -> None:
    with nexuskv.connect(url) as store:
        assert sum(space.remove([key]) for space in spaces(store)) == 1


def held_pages(url: str, keys: list[bytes]) -> int:
    with nexuskv.connect(url) as store:
        return max((space.match(keys).page_count for space in spaces(store)), default=0)


def corrupt_page(daemon: "DaemonProcess", page: bytes) -> None:
    """Flip one byte of a resident page, found by its content."""
    for path in daemon.segment_folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                at = memory.find(page)
                if at >= 0:
                    memory[at + 100] ^= 1
                    return
    raise AssertionError("the page is in no segment")


def page_of(engine: "Harness", block: int) -> bytes:
    return b"".join(tensor[block].numpy().tobytes() for tensor in engine.tensors.values())


# --- hits and misses


def test_cold_prompt_is_computed_in_chunks(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    assert run(start_engine(store_daemon.url), "r") == [64, 64, 22]


def test_every_prefill_chunk_is_saved(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    engine = start_engine(store_daemon.url)
    request = engine.add("r", PROMPT)
    engine.run()
    assert held_pages(store_daemon.url, request.block_hashes) == 9


def test_warm_prompt_computes_only_its_open_block(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r")
    assert run(start_engine(store_daemon.url), "r") == [6]


def test_other_salt_is_a_full_miss(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r")
    assert run(start_engine(store_daemon.url), "r", salt="s") == [64, 64, 22]


def test_prompt_of_whole_blocks_leaves_a_block_to_compute(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r", PROMPT[:144])
    assert run(start_engine(store_daemon.url), "r", PROMPT[:144]) == [16]


def test_load_begins_after_the_engines_own_hit(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r")
    engine = start_engine(store_daemon.url)
    run(engine, "short", PROMPT[:70])
    run(engine, "long")
    assert engine.worker.stats()["pages_loaded"] == 9  # 4 for the short one, 5 for the rest


def test_two_requests_share_a_prefix_at_once(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r")
    engine = start_engine(store_daemon.url)
    engine.add("one", PROMPT)
    engine.add("two", PROMPT)
    assert prefills(engine.run()) == [6, 6]


@pytest.mark.parametrize(("save_decoded", "blocks"), [(True, 10), (False, 9)])
def test_decoded_blocks_are_saved_if_wanted(
    start_engine: "StartEngine",
    store_daemon: "DaemonProcess",
    *,
    save_decoded: bool,
    blocks: int,
) -> None:
    engine = start_engine(store_daemon.url, save_decoded=save_decoded)
    request = engine.add("r", PROMPT, outputs=20)
    engine.run()
    assert held_pages(store_daemon.url, request.block_hashes) == blocks


def test_no_block_is_saved_twice(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    engine = start_engine(store_daemon.url)
    run(engine, "r", outputs=20)
    stats = engine.worker.stats()
    assert (stats["pages_stored"], stats["pages_held"]) == (10, 0)


def test_adapter_with_other_content_under_the_same_name_is_a_miss(
    start_engine: "StartEngine", store_daemon: "DaemonProcess", tmp_path: Path
) -> None:
    weights = tmp_path / "adapter.safetensors"
    weights.write_bytes(b"first")
    run(start_engine(store_daemon.url), "r", lora=tmp_path)
    weights.write_bytes(b"other")
    assert run(start_engine(store_daemon.url), "r", lora=tmp_path) == [64, 64, 22]


def test_adapter_with_the_same_content_hits(
    start_engine: "StartEngine", store_daemon: "DaemonProcess", tmp_path: Path
) -> None:
    (tmp_path / "adapter.safetensors").write_bytes(b"first")
    run(start_engine(store_daemon.url), "r", lora=tmp_path)
    assert run(start_engine(store_daemon.url), "r", lora=tmp_path) == [6]


# --- waiting, preemption


def test_asking_again_takes_no_further_lease(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r")
    engine = start_engine(store_daemon.url)
    request = engine.add("r", PROMPT)
    answers = {engine.connector.get_num_new_matched_tokens(request, 0) for _ in range(3)}
    with nexuskv.connect(store_daemon.url) as store:
        leases = list(store.inspect("leases"))
    assert (answers, len(leases)) == ({(144, False)}, 1)


def test_lease_of_an_aborted_request_is_given_back(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    from vllm.v1.request import RequestStatus

    run(start_engine(store_daemon.url), "r")
    engine = start_engine(store_daemon.url)
    request = engine.add("r", PROMPT)
    engine.connector.get_num_new_matched_tokens(request, 0)
    engine.scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    run(engine, "next", OTHER_PROMPT)  # its first exchange carries the release
    with nexuskv.connect(store_daemon.url) as store:
        assert list(store.inspect("leases")) == []


def test_lease_of_a_load_is_given_back(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r")
    engine = start_engine(store_daemon.url)
    run(engine, "r")
    run(engine, "next", OTHER_PROMPT)  # its first exchange carries the release
    with nexuskv.connect(store_daemon.url) as store:
        assert list(store.inspect("leases")) == []


def test_preempted_request_loads_what_it_saved(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    engine = start_engine(store_daemon.url, blocks=22)
    engine.add("one", PROMPT, outputs=40)
    engine.add("two", OTHER_PROMPT, outputs=40)
    steps = engine.run()
    assert (any(step.preempted for step in steps), engine.worker.stats()["pages_loaded"] > 0) == (
        True,
        True,
    )


def test_no_block_of_the_engine_is_leaked(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    engine = start_engine(store_daemon.url, blocks=22)
    free_before = engine.free_blocks
    engine.add("one", PROMPT, outputs=40)
    engine.add("two", OTHER_PROMPT, outputs=40)
    engine.run()
    assert engine.free_blocks == free_before


# --- ranks


def test_every_rank_stores_and_loads_its_own_pages(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url, ranks=2), "r")
    engine = start_engine(store_daemon.url, ranks=2)
    assert (run(engine, "r"), [each.stats()["pages_loaded"] for each in engine.workers]) == (
        [6],
        [9, 9],
    )


def test_only_what_all_ranks_hold_is_claimed(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    first = start_engine(store_daemon.url, ranks=2)
    request = first.add("r", PROMPT)
    first.run()
    remove_of_one_rank(store_daemon.url, request.block_hashes[4])
    assert run(start_engine(store_daemon.url, ranks=2), "r") == [64, 22]


def remove_of_one_rank(url: str, key: bytes) -> None:
    with nexuskv.connect(url) as store:
        (space,) = [space for space in spaces(store) if space.record.tp_rank == 1]
        assert space.remove([key]) == 1


def test_no_rank_saves_what_followed_another_ranks_failed_load(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url, ranks=2), "r", PROMPT[:100])
    engine = start_engine(store_daemon.url, ranks=2)
    request = engine.add("r", PROMPT)
    once(engine, lambda: remove_of_one_rank(store_daemon.url, request.block_hashes[2]))
    assert engine.step().scheduled == {"r": 54}  # fills three blocks with garbage
    assert engine.worker.stats()["pages_stored"] == 0
    engine.run()
    assert run(start_engine(store_daemon.url, ranks=2), "r") == [6]


def test_other_tensor_parallel_size_shares_nothing(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url, ranks=2), "r")
    assert run(start_engine(store_daemon.url), "r") == [64, 64, 22]


# --- faults


def test_engine_without_daemon_is_cold(start_engine: "StartEngine", tmp_path: Path) -> None:
    assert run(start_engine(f"unix://{tmp_path}/none.sock"), "r") == [64, 64, 22]


def test_daemon_killed_between_match_and_load_is_recomputed(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r")
    engine = start_engine(store_daemon.url)
    once(engine, store_daemon.kill)
    assert run(engine, "r") == [6, 64, 64, 22]


def once(engine: "Harness", act: Any) -> None:
    """Do something in the next step, after the scheduler's plan and before the worker's load."""

    def hook() -> None:
        engine.before_load = None
        act()

    engine.before_load = hook


def test_only_the_removed_page_fails(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r")
    engine = start_engine(store_daemon.url)
    request = engine.add("r", PROMPT)
    once(engine, lambda: remove_page(store_daemon.url, request.block_hashes[4]))
    block = engine.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()[4]
    assert engine.step().failed_blocks == {block.block_id}


def test_request_goes_back_to_the_removed_page(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r")
    engine = start_engine(store_daemon.url)
    request = engine.add("r", PROMPT)
    once(engine, lambda: remove_page(store_daemon.url, request.block_hashes[4]))
    assert prefills(engine.run()) == [6, 64, 22]


def test_removed_page_is_saved_again(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r")
    engine = start_engine(store_daemon.url)
    request = engine.add("r", PROMPT)
    once(engine, lambda: remove_page(store_daemon.url, request.block_hashes[4]))
    engine.run()
    assert held_pages(store_daemon.url, request.block_hashes) == 9


def test_corrupted_page_is_recomputed(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    first = start_engine(store_daemon.url)
    first.add("r", PROMPT)
    first.step()  # computes the blocks 0-3 of the request
    page = page_of(first, first.scheduler.kv_cache_manager.get_block_ids("r")[0][2])
    first.run()
    corrupt_page(store_daemon, page)
    assert run(start_engine(store_daemon.url), "r") == [6, 64, 54]


def test_hit_count_is_right_after_a_failed_load(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r")
    engine = start_engine(store_daemon.url)
    request = engine.add("r", PROMPT)
    once(engine, lambda: remove_page(store_daemon.url, request.block_hashes[4]))
    engine.run()
    stats = engine.connector.stats()
    assert (stats["planned_tokens"], stats["hit_tokens"], stats["failed_tokens"]) == (144, 64, 80)


def test_nothing_computed_after_a_failed_load_is_saved(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    """The failed step fills blocks with garbage; a third engine would load and notice them."""
    run(start_engine(store_daemon.url), "r", PROMPT[:100])
    engine = start_engine(store_daemon.url)
    request = engine.add("r", PROMPT)
    once(engine, lambda: remove_page(store_daemon.url, request.block_hashes[2]))
    failed = engine.step()
    assert (failed.scheduled, engine.worker.stats()["pages_dropped"]) == ({"r": 54}, 3)
    engine.run()
    assert run(start_engine(store_daemon.url), "r") == [6]


def test_request_that_shares_a_failed_block_saves_nothing_of_that_step(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    run(start_engine(store_daemon.url), "r", PROMPT[:100])
    engine = start_engine(store_daemon.url)
    request = engine.add("one", PROMPT[:98])
    other = engine.add("two", [*PROMPT[:96], *OTHER_PROMPT[:40]])
    once(engine, lambda: remove_page(store_daemon.url, request.block_hashes[2]))
    engine.run()
    third = start_engine(store_daemon.url)
    assert run(third, "r", [*PROMPT[:96], *OTHER_PROMPT[:40]]) == [136 - 128]
    assert held_pages(store_daemon.url, other.block_hashes) == 8


def test_saves_missed_while_the_daemon_was_away_are_made_up(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    engine = start_engine(store_daemon.url, backoff_max_s=0.1)
    request = engine.add("r", PROMPT)
    store_daemon.kill()
    engine.step()
    store_daemon.start()
    wait_until_connected(engine)
    engine.run()
    assert held_pages(store_daemon.url, request.block_hashes) == 9


def wait_until_connected(engine: "Harness") -> None:
    import threading

    tick = threading.Event()
    for _ in range(int(RECONNECT_S / 0.01)):
        if engine.worker._store.connected:
            return
        tick.wait(0.01)
    raise AssertionError(f"the worker has not reconnected within {RECONNECT_S} s")


def test_other_tensors_than_promised_switch_the_worker_off(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    import torch

    engine = start_engine(store_daemon.url, tensor_dtype=torch.float64)
    assert (engine.worker.stats()["off"], run(engine, "r")) == (1, [64, 64, 22])


@pytest.mark.parametrize("ranks", [1, 2])
def test_load_for_a_worker_that_refused_to_start_is_recomputed(
    start_engine: "StartEngine", store_daemon: "DaemonProcess", ranks: int
) -> None:
    run(start_engine(store_daemon.url, ranks=ranks), "r")
    engine = start_engine(store_daemon.url, ranks=ranks, refused_rank=ranks - 1)
    assert (run(engine, "r"), engine.connector.stats()["off"]) == ([6, 64, 64, 22], 1)


def test_scheduler_stops_asking_for_a_worker_that_is_off(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    import torch

    engine = start_engine(store_daemon.url, tensor_dtype=torch.float64)
    run(engine, "r")
    assert engine.connector.stats()["off"] == 1


def test_reset_clears_what_was_stored(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    engine = start_engine(store_daemon.url)
    request = engine.add("r", PROMPT)
    engine.run()
    # By another one, which has not looked anything up yet.
    assert start_engine(store_daemon.url).connector.reset_cache() is True
    assert held_pages(store_daemon.url, request.block_hashes) == 0


def test_no_hook_fails_in_an_ordinary_run(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    engine = start_engine(store_daemon.url)
    run(engine, "r")
    assert engine.connector.stats()["hook_errors"] + engine.worker.stats()["hook_errors"] == 0
