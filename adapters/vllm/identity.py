"""Whose bytes may be whose: the one place that turns an engine's facts into a namespace record.

Pure: plain values in, a `NamespaceRecord` out. The scheduler calls it for every rank, each worker
for its own, so both name the same namespaces without talking to each other.
"""

from dataclasses import dataclass
from typing import Final

from nexuskv.namespace import NamespaceRecord
from nexuskv.types import Kind

FORMAT: Final = "vllm-connector-v1"
"""What a page of this connector is: all layers of one block, layer by layer, each in the order of
its strides. Changes when that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Everything of one engine that decides whether KV bytes are interchangeable.

    Equal on the scheduler and all ranks of an engine. Sizes are those of one rank.
    """

    tenant: str
    model: str
    weights_revision: str
    compute_dtype: str  # what the model computes in: KV of another precision differs
    kv_dtype: str
    quantization: str
    block_tokens: int
    block_bytes: int  # of one layer
    layer_count: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    layout: str  # order and sizes inside one layer's block
    backend: str  # engine version and attention implementation that chose the byte order
    key_scheme: str
    key_seed: str
    key_bytes: int
    hash_tokens: int  # of one hash in the engine's chain; a block's key is the last one in it
    tp_size: int
    replicated: bool  # every rank holds the same KV (MLA)
    model_config: str  # fingerprint of what else changes the values: rope, overrides

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: one block, all layers of a rank."""
        return self.block_bytes * self.layer_count

    @property
    def namespace_count(self) -> int:
        """Namespaces that together hold one token's KV: one a rank, or one for all."""
        return 1 if self.replicated else self.tp_size


def namespace_record(
    facts: EngineFacts, *, group_index: int = 0, tp_rank: int, lora: str = ""
) -> NamespaceRecord:
    """The namespace of one rank's pages.

    Args:
        facts: the engine.
        group_index: KV cache group; one group is supported.
        tp_rank: tensor-parallel rank; replicated KV has one namespace for all ranks.
        lora: content fingerprint of the request's LoRA adapter, empty without one.

    Raises:
        ConfigError: a value is out of the record's bounds.
    """
    return NamespaceRecord(
        tenant=facts.tenant,
        model=facts.model,
        weights_revision=facts.weights_revision,
        dtype=facts.kv_dtype,
        quantization=facts.quantization,
        page_tokens=facts.block_tokens,
        page_bytes=facts.page_bytes,
        layer_count=facts.layer_count,
        kv_heads=facts.kv_heads,
        head_dim_k=facts.head_dim_k,
        head_dim_v=facts.head_dim_v,
        layout=facts.layout,
        interface=f"{FORMAT} {facts.backend}",
        key_scheme=facts.key_scheme,
        key_seed=facts.key_seed,
        key_bytes=facts.key_bytes,
        tp_rank=0 if facts.replicated else tp_rank,
        tp_size=1 if facts.replicated else facts.tp_size,
        group_index=group_index,
        kind=Kind.ATTENTION,
        lora=lora,
        extra=(
            ("block_bytes", str(facts.block_bytes)),
            ("compute_dtype", facts.compute_dtype),
            ("hash_tokens", str(facts.hash_tokens)),
            ("model_config", facts.model_config),
        ),
    )
