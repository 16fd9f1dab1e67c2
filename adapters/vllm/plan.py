"""What scheduler and workers tell each other each step. Plain frozen records, small and picklable.

`StepPlan` goes from the scheduler to every worker, `StepReport` comes back from all, aggregated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from nexuskv.key import PageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Blocks of one request to fill before this step's forward."""

    request_id: str
    lora: str  # content fingerprint, empty without an adapter
    lease: bytes  # token of the scheduler's lease; the worker reads under it
    keys: tuple[PageKey, ...]  # one a block, in prefix order
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Blocks of one request that are full once this step's forward is done."""

    request_id: str
    lora: str
    first_block: int  # place of the first one in the request, counted in blocks
    parent: PageKey | None  # key of the block before it; None: it is the request's first
    keys: tuple[PageKey, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(KVConnectorMetadata):
    """One step's work. Steps count from 1 and grow."""

    step: int
    confirmed_step: int  # the last step whose report the scheduler has acted upon
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(KVConnectorWorkerMetadata):
    """What became of one step, of one worker or of all.

    `loaded` has, per request, the blocks loaded before the first failed one, and `planned_blocks`
    how many were to be loaded in all; `unsaved` the place of the first block that was planned and
    not stored. `off` tells that a worker switched off.
    """

    step: int
    planned_blocks: int = 0
    loaded: Mapping[str, int] = field(default_factory=dict)
    unsaved: Mapping[str, int] = field(default_factory=dict)
    off: bool = False

    @property
    def failed_blocks(self) -> int:
        """Blocks that the engine has to compute although their load was planned."""
        return self.planned_blocks - sum(self.loaded.values())

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """Join two ranks' reports: what all of them have."""
        assert isinstance(other, StepReport)
        return replace(
            self,
            step=max(self.step, other.step),
            planned_blocks=max(self.planned_blocks, other.planned_blocks),
            loaded=_least(self.loaded, other.loaded),
            unsaved=_least(self.unsaved, other.unsaved),
            off=self.off or other.off,
        )


def off_report(plan: StepPlan) -> StepReport | None:
    """The report of a worker that can do nothing; None when it was asked for nothing."""
    if not plan.loads and not plan.saves:
        return None
    return StepReport(
        step=plan.step,
        planned_blocks=sum(len(load.keys) for load in plan.loads),
        loaded={load.request_id: 0 for load in plan.loads},
        unsaved={save.request_id: save.first_block for save in plan.saves},
        off=True,
    )


def _least(one: Mapping[str, int], two: Mapping[str, int]) -> Mapping[str, int]:
    joined = dict(one)
    for name, value in two.items():
        joined[name] = min(value, joined.get(name, value))
    return joined
