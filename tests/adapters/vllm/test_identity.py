"""Namespaces differ in every fact that makes bytes different, and only there."""

from dataclasses import fields, replace

import pytest

from nexuskv.adapters.vllm.identity import EngineFacts, namespace_record
from nexuskv.namespace import namespace_id

FACTS = EngineFacts(
    tenant="default",
    model="org/model",
    weights_revision="content:00",
    compute_dtype="float32",
    kv_dtype="float32",
    quantization="",
    block_tokens=16,
    block_bytes=2048,
    layer_count=3,
    kv_heads=2,
    head_dim_k=8,
    head_dim_v=8,
    layout="LBHNC: H2 N16 C64",
    backend="0.32 cpu-vec",
    key_scheme="sha256",
    key_seed="vllm-none-hash",
    key_bytes=32,
    hash_tokens=16,
    tp_size=2,
    replicated=False,
    model_config="aa",
)


def identity(
    facts: EngineFacts, *, tp_rank: int = 0, lora: str = "", group_index: int = 0
) -> bytes:
    record = namespace_record(facts, tp_rank=tp_rank, lora=lora, group_index=group_index)
    return namespace_id(record.encode())


def other(value: object) -> object:
    if isinstance(value, bool):
        return not value
    return value * 2 if isinstance(value, int) else f"{value}x"


@pytest.mark.parametrize("name", [spec.name for spec in fields(EngineFacts)])
def test_every_fact_makes_another_namespace(name: str) -> None:
    changed = replace(FACTS, **{name: other(getattr(FACTS, name))})  # type: ignore[arg-type]  # any field
    assert identity(changed, tp_rank=1) != identity(FACTS, tp_rank=1)


def test_scheduler_and_worker_name_the_same_namespace() -> None:
    assert identity(replace(FACTS), tp_rank=1) == identity(FACTS, tp_rank=1)


def test_ranks_have_namespaces_of_their_own() -> None:
    assert identity(FACTS, tp_rank=0) != identity(FACTS, tp_rank=1)


def test_replicated_ranks_share_a_namespace() -> None:
    facts = replace(FACTS, replicated=True)
    assert identity(facts, tp_rank=0) == identity(facts, tp_rank=1)


def test_replicated_kv_is_shared_across_tensor_parallel_sizes() -> None:
    facts = replace(FACTS, replicated=True)
    assert identity(facts) == identity(replace(facts, tp_size=4))


def test_lora_content_makes_another_namespace() -> None:
    assert identity(FACTS, lora="content:01") != identity(FACTS)


def test_group_makes_another_namespace() -> None:
    assert identity(FACTS, group_index=1) != identity(FACTS)
