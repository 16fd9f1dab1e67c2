"""The worker's half: bytes of one rank, between the store and the engine's own blocks.

Loads are done inside `load`, saves inside `save`: nothing reads or writes a block outside the
step whose plan names it. After a failed load the step has computed on garbage, so nothing is saved
until the scheduler has acted upon the report of that step. Runs in the worker's thread.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from nexuskv.adapters.vllm.identity import EngineFacts
from nexuskv.adapters.vllm.layout import PageMemory, TensorFacts, describe_tensor
from nexuskv.adapters.vllm.plan import LoadPlan, SavePlan, StepPlan, StepReport
from nexuskv.adapters.vllm.spaces import RankSpaces
from nexuskv.errors import ConfigError, NexusError
from nexuskv.types import PageStatus

if TYPE_CHECKING:
    from nexuskv.client.store import Store

_log: Final = logging.getLogger("vllm.nexuskv")


class WorkerHalf:
    """Fills and reads the registered tensors of one rank."""

    def __init__(
        self, store: "Store", spaces: RankSpaces, facts: EngineFacts, *, tp_rank: int
    ) -> None:
        self._store = store
        self._spaces = spaces
        self._facts = facts
        self._saves = tp_rank == 0 or not facts.replicated
        self._tensors: list[Any] = []  # keeps alive what `_memory` points into
        self._memory: PageMemory | None = None
        self._discard_through_step = 0
        self._failed_blocks: set[int] = set()
        self._planned_blocks = 0
        self._loaded: dict[str, int] = {}
        self._unsaved: dict[str, int] = {}
        self.counters: dict[str, int] = dict.fromkeys(
            ("pages_loaded", "pages_failed", "pages_stored", "pages_held", "pages_dropped"), 0
        )

    @property
    def off(self) -> bool:
        """Whether this half neither loads nor saves: no tensors, or not the promised ones."""
        return self._memory is None

    def register(self, tensors: Mapping[str, Any], layer_names: Sequence[str], blocks: int) -> None:
        """Take the engine's KV tensors, if they are what the namespace says.

        Args:
            tensors: layer name → torch tensor.
            layer_names: the layers of the KV group, in the order a page joins them.
            blocks: blocks of each tensor.
        """
        try:
            chosen = [tensors[name] for name in layer_names]
            facts = [
                tensor_facts(name, tensor) for name, tensor in zip(layer_names, chosen, strict=True)
            ]
            for each in facts:
                check_tensor(each, self._facts)
            memory = PageMemory(facts, block_count=blocks)
            if memory.page_bytes != self._facts.page_bytes:
                raise ConfigError(
                    f"a page has {memory.page_bytes} bytes, not {self._facts.page_bytes}"
                )
        except (ConfigError, KeyError) as exc:
            _log.warning("NexusKV is off: the registered KV tensors are not as promised: %s", exc)
            return
        self._tensors, self._memory = chosen, memory

    def load(self, plan: StepPlan) -> None:
        """Fill the blocks that this step's forward reads. Failed ones are kept for the report."""
        self._planned_blocks = sum(len(load.keys) for load in plan.loads)
        for load in plan.loads:
            # Failed until proved otherwise: an error on the way must not pass for a load.
            self._failed_blocks.update(load.block_ids)
            self._loaded[load.request_id] = 0
        for load in plan.loads:
            good = [bool(status) for status in self._get(load)]
            self._failed_blocks.difference_update(
                block for block, ok in zip(load.block_ids, good, strict=True) if ok
            )
            self._loaded[load.request_id] = [*good, False].index(False)
            self.counters["pages_loaded"] += sum(good)
            self.counters["pages_failed"] += len(good) - sum(good)

    def _get(self, load: LoadPlan) -> Sequence[PageStatus]:
        missed = [PageStatus.MISS] * len(load.keys)
        memory = self._memory
        if memory is None:
            return missed
        try:
            (space,) = self._spaces.of(load.lora)
            into = [memory.page(block_id) for block_id in load.block_ids]
            return self._store.lease(load.lease).get(space, load.keys, into=into)
        except NexusError as exc:
            _log.warning("NexusKV: a load failed and is recomputed: %s", exc)
            return missed

    def save(self, plan: StepPlan) -> None:
        """Copy out the blocks that this step has filled; done when it returns."""
        if self._failed_blocks:
            self._discard_through_step = plan.step
        for save in plan.saves:
            self._unsaved[save.request_id] = save.first_block
        for save in plan.saves:
            if plan.confirmed_step < self._discard_through_step:
                statuses = [PageStatus.DROPPED] * len(save.keys)
            else:
                statuses = list(self._put(save))
            self._account(save, statuses)

    def _put(self, save: SavePlan) -> Sequence[PageStatus]:
        if not self._saves:
            return [PageStatus.EXISTS] * len(save.keys)  # another rank stores the same bytes
        memory = self._memory
        if memory is None:
            return [PageStatus.DROPPED] * len(save.keys)
        try:
            (space,) = self._spaces.of(save.lora)
            pages = [memory.page(block_id) for block_id in save.block_ids]
            return space.put(save.keys, from_=pages, parent=save.parent)
        except NexusError as exc:
            _log.warning("NexusKV: a save failed and is tried again later: %s", exc)
            return [PageStatus.UNAVAILABLE] * len(save.keys)

    def _account(self, save: SavePlan, statuses: Sequence[PageStatus]) -> None:
        stored = [bool(status) for status in statuses]
        if all(stored):
            del self._unsaved[save.request_id]
        else:
            self._unsaved[save.request_id] = save.first_block + stored.index(False)
        self.counters["pages_stored"] += statuses.count(PageStatus.STORED)
        self.counters["pages_held"] += statuses.count(PageStatus.EXISTS)
        self.counters["pages_dropped"] += stored.count(False)

    def take_failed_blocks(self) -> set[int]:
        """Blocks of this step that were to be loaded and were not; asked once a step."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self, plan: StepPlan) -> StepReport | None:
        """What became of the step; None when there was nothing to do."""
        if not plan.loads and not plan.saves:
            return None
        report = StepReport(
            step=plan.step,
            planned_blocks=self._planned_blocks,
            loaded=self._loaded,
            unsaved=self._unsaved,
            off=self.off,
        )
        self._planned_blocks, self._loaded, self._unsaved = 0, {}, {}
        return report


def tensor_facts(name: str, tensor: Any) -> TensorFacts:
    """A torch tensor in plain values.

    Raises:
        ConfigError: it is not in this process's memory.
    """
    if tensor.device.type != "cpu":
        raise ConfigError(f"{name} is on {tensor.device}; only cpu is supported yet")
    return TensorFacts(
        layer=name,
        address=tensor.data_ptr(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        item_bytes=tensor.element_size(),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
    )


def check_tensor(tensor: TensorFacts, facts: EngineFacts) -> None:
    """Compare a registered tensor with what the namespace says of it.

    Raises:
        ConfigError: dtype, order or sizes differ.
    """
    found = (tensor.dtype, describe_tensor(tensor))
    promised = (facts.kv_dtype.rpartition(" ")[2], facts.layout.partition(": ")[2])
    if found != promised:
        raise ConfigError(f"{tensor.layer} is {found}, not {promised}")
