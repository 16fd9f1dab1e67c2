"""The scheduler's half: what to load before a step and what to save after it.

Decides by block counts alone and moves no bytes. Per request it keeps the place up to which blocks
are saved; that mark goes back when the engine rewinds a request (failed load, preemption) or a
worker reports that it did not store what was planned. Runs in the scheduler's thread.
"""

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nexuskv.adapters.vllm.identity import EngineFacts
from nexuskv.adapters.vllm.lookup import Lookups
from nexuskv.adapters.vllm.plan import LoadPlan, SavePlan, StepPlan, StepReport
from nexuskv.adapters.vllm.spaces import LoraFingerprints, RankSpaces
from nexuskv.errors import ConfigError, NexusError
from nexuskv.key import PageKey

if TYPE_CHECKING:
    from nexuskv.client.lease import Lease

_log: Final = logging.getLogger("vllm.nexuskv")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """How the scheduler's half works. `load` and `save` follow the engine's KV role."""

    adapters_max: int
    load: bool = True
    save: bool = True
    save_decoded: bool = True


@dataclass(slots=True)
class _Tracked:
    """A request that has been given blocks. `request` is the engine's own, read only."""

    request: Any
    lora: str
    saved_blocks: int


class SchedulerHalf:
    """Plans steps. Hooks of the same names in vLLM's connector interface call these."""

    def __init__(
        self, lookups: Lookups, spaces: RankSpaces, facts: EngineFacts, options: SchedulerOptions
    ) -> None:
        self._lookups = lookups
        self._spaces = spaces
        self._facts = facts
        self._options = options
        self._hashes_per_block = facts.block_tokens // facts.hash_tokens
        self._loras = LoraFingerprints(adapters_max=options.adapters_max)
        self._tracked: dict[str, _Tracked] = {}
        self._pending: dict[str, LoadPlan] = {}
        self._pending_leases: dict[str, Lease] = {}
        self._leases: deque[tuple[int, Lease]] = deque()  # by the step that reads under them
        self._step = 0
        self._load_step = 0
        self._confirmed_step = 0
        self._off = False
        self._lora_warned = False
        self.counters: dict[str, int] = dict.fromkeys(
            ("lookups", "planned_tokens", "hit_tokens", "failed_tokens", "saves_rewound"), 0
        )

    @property
    def off(self) -> bool:
        """Whether this half has given up for good."""
        return self._off

    # --- admission

    def matched_tokens(self, request: Any, local_tokens: int) -> int:
        """Tokens beyond the engine's own hit that all ranks can load; at least one is left."""
        block_tokens = self._facts.block_tokens
        known_tokens: int = request.num_tokens
        last = min(self._full_blocks(request), (known_tokens - 1) // block_tokens)
        local_blocks = local_tokens // block_tokens
        if self._off or not self._options.load or last <= local_blocks:
            self._lookups.drop(request.request_id)
            return 0
        lora = self._lora_of(request)
        if lora is None:
            return 0
        self.counters["lookups"] += 1
        answer = self._lookups.ask(
            request.request_id,
            self._spaces.of(lora),
            self._keys(request, 0, last),
            lora=lora,
            local_blocks=local_blocks,
        )
        return max(0, min(answer.held_blocks, last) - local_blocks) * block_tokens

    def admit_load(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """The engine gave a request its blocks and relies on `external_tokens` being loaded.

        Raises:
            ConfigError: nobody claimed that these tokens can be loaded.
        """
        request_id = request.request_id
        answer = self._lookups.take(request_id)
        if answer is None or answer.lease is None:
            raise ConfigError(f"{external_tokens} tokens to load that were never claimed")
        first = answer.local_blocks
        last = first + external_tokens // self._facts.block_tokens
        self._pending[request_id] = LoadPlan(
            request_id=request_id,
            lora=answer.lora,
            lease=answer.lease.token,
            keys=tuple(self._keys(request, first, last)),
            block_ids=tuple(block_ids[first:last]),
        )
        self._pending_leases[request_id] = answer.lease
        self.counters["planned_tokens"] += external_tokens
        self._track(request, answer.lora, last)

    def admit(self, request: Any) -> None:
        """The engine gave a request its blocks and computes all of it that it does not hold."""
        answer = self._lookups.take(request.request_id)
        if answer is None:
            self._track(request, self._lora_of(request), 0)
            return
        if answer.lease is not None:
            answer.lease.release()
        self._track(request, answer.lora, answer.held_blocks)

    def _track(self, request: Any, lora: str | None, saved_blocks: int) -> None:
        if lora is not None and self._options.save:
            self._tracked[request.request_id] = _Tracked(request, lora, saved_blocks)

    def forget(self, request_id: str) -> None:
        """The request has ended; what it still holds is given back."""
        self._lookups.drop(request_id)
        self._tracked.pop(request_id, None)
        self._pending.pop(request_id, None)
        lease = self._pending_leases.pop(request_id, None)
        if lease is not None:
            lease.release()

    # --- steps

    def begin_step(self) -> StepPlan:
        """The next step's plan, still without saves; the loads that were pending go with it."""
        self._step += 1
        loads = tuple(self._pending.values())
        if loads:
            self._load_step = self._step
        self._leases.extend((self._step, lease) for lease in self._pending_leases.values())
        self._pending, self._pending_leases = {}, {}
        return StepPlan(step=self._step, confirmed_step=self._confirmed_step, loads=loads)

    def _must_hold_saves(self) -> bool:
        """Whether a load of another rank may have failed in a step that is not reported yet.

        A worker knows of its own failed load in time, but not of another's, and ranks exchange
        activations: after one failed load no rank's new KV is good.
        """
        return self._off or (self._facts.tp_size > 1 and self._load_step > self._confirmed_step)

    def plan_saves(self, scheduled: Any) -> tuple[SavePlan, ...]:
        """What the step that has begun fills and the store may not have yet.

        Args:
            scheduled: `vllm.v1.core.sched.output.SchedulerOutput`, read only.
        """
        hold = self._must_hold_saves()
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        saves: list[SavePlan] = []
        for request_id, token_count in scheduled.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            before = computed[request_id]
            # Fewer computed than saved: the engine went back, and computes these blocks anew.
            tracked.saved_blocks = min(tracked.saved_blocks, before // self._facts.block_tokens)
            last = min(
                (before + token_count) // self._facts.block_tokens,
                self._savable_blocks(tracked.request),
            )
            if last > tracked.saved_blocks and not hold:
                saves += self._plan_save(tracked, last, scheduled.kv_connector_block_state)
        return tuple(saves)

    def _plan_save(self, tracked: _Tracked, last: int, block_state: Any) -> list[SavePlan]:
        """The blocks one request fills in this step, and older ones not stored yet."""
        request_id, first = tracked.request.request_id, tracked.saved_blocks
        groups = None if block_state is None else block_state.get_block_ids(request_id)
        if groups is None:
            return []
        tracked.saved_blocks = last
        keys = self._keys(tracked.request, max(0, first - 1), last)
        return [
            SavePlan(
                request_id=request_id,
                lora=tracked.lora,
                first_block=first,
                parent=keys[0] if first else None,
                keys=tuple(keys[1:] if first else keys),
                block_ids=tuple(groups[0][first:last]),
            )
        ]

    # --- reports

    def confirm(self, report: StepReport) -> None:
        """Act upon what the workers made of a step."""
        self._confirmed_step = max(self._confirmed_step, report.step)
        while self._leases and self._leases[0][0] <= report.step:
            self._leases.popleft()[1].release()
        loaded = sum(report.loaded.values()) * self._facts.block_tokens
        self.counters["hit_tokens"] += loaded
        self.counters["failed_tokens"] += report.failed_blocks * self._facts.block_tokens
        for request_id, first in report.unsaved.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.saved_blocks > first:
                tracked.saved_blocks = first
                self.counters["saves_rewound"] += 1
        if report.off and not self._off:
            self._off = True
            self._lookups.drop_all()
            _log.warning("NexusKV: a worker switched itself off, so nothing is loaded or saved")

    def clear(self) -> bool:
        """Forget everything stored for this engine; whether the store confirmed it.

        Of LoRA adapters those that were used and are still remembered.
        """
        self._lookups.drop_all()
        try:
            self._spaces.of("")  # also of an engine that has not looked anything up yet
            for space in self._spaces.opened():
                space.clear()
        except NexusError as exc:
            _log.warning("NexusKV: the cache could not be cleared: %s", exc)
            return False
        return True

    def close(self) -> None:
        """Give back every lease."""
        self._lookups.drop_all()
        for _, lease in self._leases:
            lease.release()
        for lease in self._pending_leases.values():
            lease.release()
        self._leases.clear()
        self._pending_leases.clear()

    # --- keys

    def _full_blocks(self, request: Any) -> int:
        """Blocks of the request whose tokens are all known."""
        return len(request.block_hashes) // self._hashes_per_block

    def _savable_blocks(self, request: Any) -> int:
        full_blocks = self._full_blocks(request)
        if self._options.save_decoded:
            return full_blocks
        prompt_tokens: int = request.num_prompt_tokens
        return min(full_blocks, prompt_tokens // self._facts.block_tokens)

    def _keys(self, request: Any, first: int, last: int) -> list[PageKey]:
        """Keys of blocks [first, last): each is the hash at its block's last boundary."""
        every = self._hashes_per_block
        return list(request.block_hashes[(first + 1) * every - 1 : last * every : every])

    def _lora_of(self, request: Any) -> str | None:
        """The content fingerprint of a request's adapter, empty without one, None if unknown."""
        if request.lora_request is None:
            return ""
        try:
            return self._loras.of(request.lora_request.lora_path)
        except ConfigError as exc:
            if not self._lora_warned:
                _log.warning("NexusKV: LoRA adapters that are no local folders miss: %s", exc)
            self._lora_warned = True
            return None
