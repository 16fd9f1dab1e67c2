"""`NexusKVConnector`: vLLM's connector interface, translated call by call into the two halves.

One instance in the scheduler, one in every worker. A store fault is a miss; an error nobody
expected is logged, counted and a miss too, here and nowhere else. What cannot be supported
switches the connector off with one line; the engine then runs as without it.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from nexuskv.adapters.vllm.facts import engine_facts
from nexuskv.adapters.vllm.lookup import Lookups
from nexuskv.adapters.vllm.plan import SavePlan, StepPlan, StepReport, off_report
from nexuskv.adapters.vllm.scheduler import SchedulerHalf, SchedulerOptions
from nexuskv.adapters.vllm.settings import ConnectorSettings, read_settings
from nexuskv.adapters.vllm.spaces import RankSpaces
from nexuskv.adapters.vllm.worker import WorkerHalf
from nexuskv.client.store import connect
from nexuskv.clock import MonotonicClock
from nexuskv.errors import ConfigError

if TYPE_CHECKING:
    from nexuskv.adapters.vllm.identity import EngineFacts
    from nexuskv.client.store import Store

_log: Final = logging.getLogger("vllm.nexuskv")
_NONCE_BYTES: Final = 16

T = TypeVar("T")


class NexusKVConnector(KVConnectorBase_V1):
    """Shares KV blocks of full attention and MLA models through a NexusKV daemon.

    Raises:
        ConfigError: `kv_connector_extra_config` has an unknown key or a bad value.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._hook_errors = 0
        self._store: Store | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        facts = self._guarded(
            "start",
            lambda: engine_facts(
                vllm_config,
                kv_cache_config,
                config=settings.config,
                weights_revision=settings.weights_revision,
            ),
            None,
        )
        if facts is None:
            return
        self._store = connect(config=settings.config)
        if role == KVConnectorRole.SCHEDULER:
            self._warn_of_settings()
            self._scheduler = self._scheduler_half(self._store, facts, settings)
        else:
            self._worker = self._worker_half(self._store, facts, settings)

    def stats(self) -> dict[str, int]:
        """What this half has done so far: tokens on the scheduler's side, pages on a worker's."""
        half = self._scheduler or self._worker
        counters = {} if half is None else half.counters
        off = half is None or half.off
        return {**counters, "hook_errors": self._hook_errors, "off": int(off)}

    # --- both sides

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache owes nobody its content: a dropped save is a later miss."""
        return False

    def shutdown(self) -> None:
        """Say what was done, give back leases, close the client. May be called again."""
        if self._store is None:
            return
        _log.info("NexusKV %s: %s", self.role.name.lower(), self.stats())
        if self._scheduler is not None:
            self._guarded("shutdown", self._scheduler.close, None)
        self._store.close()
        self._store = self._scheduler = self._worker = None

    # --- scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded; always before the step that needs them."""
        half = self._scheduler
        if half is None:
            return 0, False
        tokens = self._guarded(
            "match", lambda: half.matched_tokens(request, num_computed_tokens), 0
        )
        return tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note of an admitted request and, if it relies on one, of its load."""
        half = self._scheduler
        if half is None:
            return
        if num_external_tokens:
            # Unguarded: to swallow an error here would let the engine read blocks nobody fills.
            half.admit_load(request, blocks.get_block_ids()[0], num_external_tokens)
        else:
            self._guarded("admit", lambda: half.admit(request), None)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's plan. Loads go out whatever happens to the saves."""
        half = self._scheduler
        if half is None:
            return StepPlan(step=0, confirmed_step=0)
        plan = half.begin_step()
        nothing: tuple[SavePlan, ...] = ()
        saves = self._guarded("plan", lambda: half.plan_saves(scheduler_output), nothing)
        return replace(plan, saves=saves)

    def update_connector_output(self, connector_output: Any) -> None:
        """Hear what the workers made of a step."""
        half, report = self._scheduler, connector_output.kv_connector_worker_meta
        if half is not None and isinstance(report, StepReport):
            self._guarded("report", lambda: half.confirm(report), None)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks were saved in the steps that filled them."""
        half = self._scheduler
        if half is not None:
            self._guarded("finish", lambda: half.forget(request.request_id), None)
        return False, None

    def reset_cache(self) -> bool | None:
        """Clear what the store holds of this engine's namespaces."""
        half = self._scheduler
        return None if half is None else self._guarded("reset", half.clear, False)

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the engine's tensors, or switch off if they are not as promised."""
        half, kv_cache_config = self._worker, self._kv_cache_config
        if half is not None:
            names = kv_cache_config.kv_cache_groups[0].layer_names
            blocks = kv_cache_config.num_blocks
            self._guarded("register", lambda: half.register(kv_caches, names, blocks), None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the step's blocks; done when it returns."""
        half, plan = self._worker, self._plan()
        if half is not None:
            self._guarded("load", lambda: half.load(plan), None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: `start_load_kv` has finished its loads."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole blocks are saved at the end of the step."""

    def wait_for_save(self) -> None:
        """Copy out the step's full blocks; the engine may reuse them afterwards."""
        half, plan = self._worker, self._plan()
        if half is not None:
            self._guarded("save", lambda: half.save(plan), None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Exactly the blocks that this step was to load and did not."""
        half = self._worker
        if half is None:  # refused here and not in the scheduler: its loads must not pass for done
            return {block for load in self._plan().loads for block in load.block_ids}
        return half.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Tell the scheduler's half what became of the step."""
        half, plan = self._worker, self._plan()
        return off_report(plan) if half is None else half.report(plan)

    # --- inside

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    def _guarded(self, hook: str, call: Callable[[], T], otherwise: T) -> T:
        """Run a hook's work; an error becomes `otherwise`. The edge of this adapter."""
        try:
            return call()
        except ConfigError as exc:
            _log.warning("NexusKV: %s: %s", "is off" if hook == "start" else hook, exc)
        except Exception:  # noqa: BLE001  # the adapter's edge: a fault must not reach the engine
            _log.exception("NexusKV: unexpected error in %s; the engine goes on without", hook)
        self._hook_errors += 1
        return otherwise

    def _warn_of_settings(self) -> None:
        """What works, but not as its operator will expect."""
        transfer, cache = self._kv_transfer_config, self._vllm_config.cache_config
        if transfer.kv_load_failure_policy != "recompute":
            _log.warning(
                "NexusKV: kv_load_failure_policy is %r, so a page lost between lookup and load "
                'fails its request; set "recompute"',
                transfer.kv_load_failure_policy,
            )
        if self._vllm_config.lora_config is not None and cache.prefix_caching_hash_algo in (
            "sha256",
            "xxhash",
        ):
            _log.warning(
                "NexusKV: %s hashes pickled objects, so equal LoRA requests of two processes may "
                "miss each other; use --prefix-caching-hash-algo sha256_cbor",
                cache.prefix_caching_hash_algo,
            )

    def _scheduler_half(
        self, store: "Store", facts: "EngineFacts", settings: ConnectorSettings
    ) -> SchedulerHalf:
        config = settings.config
        spaces = RankSpaces(
            store,
            facts,
            ranks=range(facts.namespace_count),
            adapters_max=config.adapter_loras_max,
        )
        lookups = Lookups(
            store, config=config, clock=MonotonicClock(), nonce=os.urandom(_NONCE_BYTES)
        )
        options = SchedulerOptions(
            adapters_max=config.adapter_loras_max,
            load=self._kv_transfer_config.is_kv_consumer,
            save=self._kv_transfer_config.is_kv_producer,
            save_decoded=settings.save_decoded,
        )
        return SchedulerHalf(lookups, spaces, facts, options)

    def _worker_half(
        self, store: "Store", facts: "EngineFacts", settings: ConnectorSettings
    ) -> WorkerHalf:
        rank = 0 if facts.replicated else _tensor_parallel_rank(self._vllm_config)
        spaces = RankSpaces(
            store,
            facts,
            ranks=range(rank, rank + 1),
            adapters_max=settings.config.adapter_loras_max,
        )
        return WorkerHalf(store, spaces, facts, tp_rank=_tensor_parallel_rank(self._vllm_config))


def _tensor_parallel_rank(vllm_config: Any) -> int:
    """This worker's tensor-parallel rank."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return int(parallel_state.get_tensor_model_parallel_rank())
    parallel = vllm_config.parallel_config
    return int(parallel.rank % parallel.tensor_parallel_size)
