"""A real vLLM scheduler and both halves of the connector, stepped without a model.

The stand-in for a model writes, for every token of a step, a number that depends on all tokens up
to it. So the engine's blocks can be checked before every step: whatever a request counts as
computed, loaded or not, must hold exactly what computing would have written.

Everything of vLLM is imported inside functions: without the marker `engine` nothing here runs.
"""

import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nexuskv.tools.daemon_process import DaemonProcess, scratch_folder

BLOCK_TOKENS = 16
STEP_TOKENS = 64
KV_HEADS, HEAD_DIM = 2, 8
LAYERS = ("layers.0", "layers.1")
STEPS_MAX = 200
MODEL_MAKER = Path(__file__).parents[2] / "engines" / "make_tiny_model.py"

StartDaemon = Callable[..., DaemonProcess]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, str(MODEL_MAKER), str(folder)], check=True)
    return folder


@pytest.fixture
def store_daemon() -> Iterator[DaemonProcess]:
    """A daemon that a test may kill or freeze."""
    with scratch_folder("vllm") as folder:
        daemon = DaemonProcess(folder, flags={"host_memory": "256MiB", "chunk_bytes": "16MiB"})
        with daemon:
            yield daemon
            if daemon.running:
                daemon.thaw()


@dataclass
class Step:
    """What one step of the harness did."""

    scheduled: dict[str, int]
    failed_blocks: set[int]
    preempted: bool


@dataclass
class Harness:
    """One engine as the connector sees it: a scheduler, a worker a rank, blocks, steps."""

    scheduler: Any
    workers: list[Any]
    rank_tensors: list[dict[str, Any]]
    before_load: Callable[[], None] | None = None
    steps: list[Step] = field(default_factory=list)

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def worker(self) -> Any:
        return self.workers[0]

    @property
    def tensors(self) -> dict[str, Any]:
        return self.rank_tensors[0]

    def add(
        self,
        name: str,
        tokens: list[int],
        *,
        salt: str | None = None,
        outputs: int = 3,
        lora: Path | None = None,
    ) -> Any:
        """Add a request; with `lora` it uses the adapter in that folder."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=outputs)
        sampling.update_from_generation_config({}, 1)
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            mm_features=None,
            cache_salt=salt,
            lora_request=None if lora is None else LoRARequest("adapter", 1, str(lora)),
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def run(self) -> list[Step]:
        """Step until every request has ended; the steps that computed something."""
        start = len(self.steps)
        for _ in range(STEPS_MAX):
            self.step()
            if not self.scheduler.has_unfinished_requests():
                return [step for step in self.steps[start:] if step.scheduled]
        raise AssertionError(f"requests have not ended after {STEPS_MAX} steps")

    def step(self) -> Step:
        """One step in the order of vLLM's model runner, all ranks side by side."""
        output = self.scheduler.schedule()
        for worker in self.workers:
            worker.bind_connector_metadata(output.kv_connector_metadata)
        if self.before_load is not None:
            self.before_load()
        if output.has_sync_kv_loads:
            self.load()
        self.compute(output)
        if not output.has_sync_kv_loads:
            self.load()
        for worker in self.workers:
            worker.wait_for_save()
        told = self.told(output)
        step = Step(
            dict(output.num_scheduled_tokens),
            set(told.invalid_block_ids),
            any(request.num_preemptions for request in self.scheduler.requests.values()),
        )
        self.steps.append(step)
        self.scheduler.update_from_output(output, self.sampled(output, told))
        return step

    def load(self) -> None:
        for worker in self.workers:
            worker.start_load_kv(None)

    def told(self, output: Any) -> Any:
        """What all workers tell the scheduler, joined as vLLM's executor does."""
        from vllm.v1.outputs import KVConnectorOutput

        failed: set[int] = set()
        report: Any = None
        for worker in self.workers:
            transfers = worker.get_transfer_results(output.finished_req_ids)
            assert not transfers.finished_sending
            assert not transfers.finished_recving
            failed |= worker.get_block_ids_with_load_errors()
            own = worker.build_connector_worker_meta()
            report = own if report is None or own is None else report.aggregate(own)
            worker.clear_connector_metadata()
        return KVConnectorOutput(invalid_block_ids=failed, kv_connector_worker_meta=report)

    def sampled(self, output: Any, told: Any) -> Any:
        """What a model runner returns: one token for every request whose prompt is complete."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for name in names:
            request = self.scheduler.requests[name]
            tokens.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=told,
        )

    def compute(self, output: Any) -> None:
        """Check what the step counts as computed, then write the step's own tokens."""
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        # Known to the workers now, to the engine at the step's end.
        failed: set[int] = set()
        for worker in self.workers:
            half, loads = worker._worker, output.kv_connector_metadata.loads
            failed |= half._failed_blocks if half else {b for x in loads for b in x.block_ids}
        for name, count in output.num_scheduled_tokens.items():
            blocks = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
            values = values_of(self.scheduler.requests[name].all_token_ids)
            if failed & set(blocks):
                # As a model would: what follows a block that was not loaded is garbage.
                values = [-1.0] * len(values)
            else:
                self.check(name, blocks, values[: before[name]])
            for at in range(before[name], before[name] + count):
                for offset, tensor in self.all_tensors():
                    cell = blocks[at // BLOCK_TOKENS], slice(None), at % BLOCK_TOKENS
                    tensor[cell] = values[at] + offset

    def check(self, name: str, blocks: list[int], values: list[float]) -> None:
        for at, value in enumerate(values):
            for offset, tensor in self.all_tensors():
                cell = tensor[blocks[at // BLOCK_TOKENS], :, at % BLOCK_TOKENS]
                assert bool((cell == value + offset).all()), f"{name} token {at}, {offset}"

    def all_tensors(self) -> Iterator[tuple[float, Any]]:
        """Every layer of every rank, with what tells its values from the others'."""
        for rank, tensors in enumerate(self.rank_tensors):
            for layer, tensor in enumerate(tensors.values()):
                yield layer + rank / 4, tensor

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


def values_of(tokens: Any) -> list[float]:
    """Per token a number that depends on it and all before it, exact in float32."""
    values: list[float] = []
    state = 0
    for token in tokens:
        state = zlib.crc32(int(token).to_bytes(4, "little"), state)
        values.append(float(state & 0xFFFFF))
    return values


StartEngine = Callable[..., Harness]


@pytest.fixture(scope="session")
def vllm_loaded() -> None:
    """Import vLLM once, outside any test, with what it starts for good."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler

    assert Scheduler
    init_none_hash(sha256)


@pytest.fixture(scope="session")
def make_configs(vllm_loaded: None, tiny_model: Path) -> Callable[..., tuple[Any, Any]]:
    """`build_configs` for the tiny model."""

    def make(url: str, **options: Any) -> tuple[Any, Any]:
        return build_configs(url, tiny_model, **options)

    return make


@pytest.fixture
def start_engine(vllm_loaded: None, tiny_model: Path) -> Iterator[StartEngine]:
    """Start engines: `start_engine(daemon.url, blocks=64, policy="recompute")`."""
    started: list[Harness] = []

    def start(url: str, **options: Any) -> Harness:
        harness = build_engine(url, tiny_model, **options)
        started.append(harness)
        return harness

    yield start
    for harness in started:
        harness.close()


def build_engine(
    url: str,
    model: Path,
    *,
    ranks: int = 1,
    tensor_dtype: Any = None,
    refused_rank: int | None = None,
    **options: Any,
) -> Harness:
    """A scheduler and its workers, as vLLM builds them; `options` are those of `build_configs`."""
    import copy

    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    config, groups = build_configs(url, model, **options)
    config.parallel_config.tensor_parallel_size = ranks
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=groups,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
    )
    harness = Harness(scheduler, [], [])
    shape = (groups.num_blocks, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
    for rank in range(ranks):
        of_rank = copy.deepcopy(config)
        of_rank.parallel_config.rank = rank
        if rank == refused_rank:
            of_rank.speculative_config = object()
        worker = KVConnectorFactory.create_connector(of_rank, KVConnectorRole.WORKER, groups)
        tensors = {name: torch.zeros(shape, dtype=tensor_dtype or torch.float32) for name in LAYERS}
        worker.register_kv_caches(tensors)
        harness.workers.append(worker)
        harness.rank_tensors.append(tensors)
    return harness


def build_configs(
    url: str, model: Path, *, blocks: int = 64, policy: str = "recompute", **extra: Any
) -> tuple[Any, Any]:
    """vLLM's two configuration objects of a small engine; `extra` goes to the connector."""
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache.kv_cache_layout, cache.num_gpu_blocks = "LBHNC", blocks
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", seed=0),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=512,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NexusKVConnector",
            kv_connector_module_path="nexuskv.adapters.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"url": url, **extra},
        ),
    )
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32
    )
    groups = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
    )
    return config, groups
