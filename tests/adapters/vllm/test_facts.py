"""What a vLLM configuration says of KV bytes: every difference is seen, the unknown is refused."""

import copy
import dataclasses
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nexuskv.adapters.vllm.facts import engine_facts, hash_tokens, key_identity
from nexuskv.adapters.vllm.identity import EngineFacts
from nexuskv.adapters.vllm.layout import TensorFacts
from nexuskv.config import Config
from nexuskv.errors import ConfigError

pytestmark = pytest.mark.engine

Change = Callable[[Any, Any], None]


@pytest.fixture(scope="module")
def built(make_configs: Callable[..., tuple[Any, Any]]) -> tuple[Any, Any]:
    return make_configs("unix:///nowhere")


@pytest.fixture
def configs(built: tuple[Any, Any]) -> tuple[Any, Any]:
    return copy.deepcopy(built)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the connector logs; vLLM's logger does not hand it on to the root's."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]  # one line, no class
    logger = logging.getLogger("vllm.nexuskv")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def facts_of(configs: tuple[Any, Any], *, weights_revision: str = "") -> EngineFacts:
    return engine_facts(*configs, config=Config(), weights_revision=weights_revision)


def change_spec(groups: Any, **values: Any) -> None:
    group = groups.kv_cache_groups[0]
    group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, **values)


def set_dtype(config: Any, groups: Any) -> None:
    import torch

    config.model_config.dtype = torch.bfloat16


def set_kv_dtype(config: Any, groups: Any) -> None:
    import torch

    change_spec(groups, dtype=torch.bfloat16)


def set_rope(config: Any, groups: Any) -> None:
    config.model_config.hf_config.rope_theta = 12345.0


def set_layout(config: Any, groups: Any) -> None:
    config.cache_config.kv_cache_layout = "LBNHC"


def set_hash(config: Any, groups: Any) -> None:
    config.cache_config.prefix_caching_hash_algo = "sha256_cbor"


def set_quantization(config: Any, groups: Any) -> None:
    config.model_config.quantization = "fp8"


DIFFERENCES: dict[str, Change] = {
    "model dtype": set_dtype,
    "KV dtype": set_kv_dtype,
    "KV cache dtype": lambda config, groups: setattr(config.cache_config, "cache_dtype", "fp8"),
    "rope": set_rope,
    "layout": set_layout,
    "hash algorithm": set_hash,
    "quantization": set_quantization,
    "block size": lambda config, groups: change_spec(groups, block_size=32),
    "KV heads": lambda config, groups: change_spec(groups, num_kv_heads=4),
    "head dim": lambda config, groups: change_spec(groups, head_size=16, head_size_v=16),
    "layers": lambda config, groups: groups.kv_cache_groups[0].layer_names.append("layers.2"),
    "tensor parallel size": lambda config, groups: setattr(
        config.parallel_config, "tensor_parallel_size", 2
    ),
}


@pytest.mark.parametrize("change", DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_difference_is_seen(
    configs: tuple[Any, Any], change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends import cpu_attn

    # Its refusal of fp8 on this processor is not what is asked here.
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "vec")
    before = facts_of(configs)
    change(*configs)
    assert facts_of(configs) != before


def test_other_weights_under_the_same_name_are_seen(
    configs: tuple[Any, Any], tmp_path: Path
) -> None:
    before = facts_of(configs)
    folder = tmp_path / Path(configs[0].model_config.model).name
    shutil.copytree(configs[0].model_config.model, folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    configs[0].model_config.model = str(folder)
    after = facts_of(configs)
    assert (after.model, after.weights_revision == before.weights_revision) == (before.model, False)


def test_copy_of_the_model_elsewhere_is_the_same(configs: tuple[Any, Any], tmp_path: Path) -> None:
    before = facts_of(configs)
    folder = tmp_path / Path(configs[0].model_config.model).name
    shutil.copytree(configs[0].model_config.model, folder)
    configs[0].model_config.model = str(folder)
    assert facts_of(configs) == before


def test_operators_revision_is_taken(configs: tuple[Any, Any]) -> None:
    assert facts_of(configs, weights_revision="r7").weights_revision == "r7"


def set_two_groups(config: Any, groups: Any) -> None:
    groups.kv_cache_groups.append(groups.kv_cache_groups[0])


def set_sliding(config: Any, groups: Any) -> None:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    groups.kv_cache_groups[0].kv_cache_spec = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=64
    )


REFUSALS: dict[str, Change] = {
    "2 KV cache groups": set_two_groups,
    "SlidingWindowSpec": set_sliding,
    "pipeline": lambda config, groups: setattr(config.parallel_config, "pipeline_parallel_size", 2),
    "decode context": lambda config, groups: setattr(
        config.parallel_config, "decode_context_parallel_size", 2
    ),
    "speculative": lambda config, groups: setattr(config, "speculative_config", object()),
    "span layers": lambda config, groups: setattr(config.cache_config, "kv_cache_layout", "BLHNC"),
    "None is not known": lambda config, groups: setattr(
        config.cache_config, "kv_cache_layout", None
    ),
    "on cuda": lambda config, groups: setattr(config.device_config, "device_type", "cuda"),
    "set weights_revision": lambda config, groups: setattr(
        config.model_config, "model", "nobody/has-this-model"
    ),
}


@pytest.mark.parametrize(("said", "change"), REFUSALS.items(), ids=REFUSALS.keys())
def test_what_is_not_understood_is_refused(
    configs: tuple[Any, Any], said: str, change: Change
) -> None:
    change(*configs)
    with pytest.raises(ConfigError, match=said):
        facts_of(configs)


def test_connector_that_refuses_says_so_in_one_line(
    configs: tuple[Any, Any], lines: list[str]
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from nexuskv.adapters.vllm import NexusKVConnector

    set_two_groups(*configs)
    connector = NexusKVConnector(configs[0], KVConnectorRole.SCHEDULER, configs[1])
    assert (connector.stats()["off"], [line for line in lines if "is off" in line]) == (
        1,
        ["NexusKV: is off: 2 KV cache groups (one is supported) is not supported yet"],
    )


def test_policy_that_fails_requests_is_warned_about(
    configs: tuple[Any, Any], lines: list[str]
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from nexuskv.adapters.vllm import NexusKVConnector

    configs[0].kv_transfer_config.kv_load_failure_policy = "fail"
    NexusKVConnector(configs[0], KVConnectorRole.SCHEDULER, configs[1]).shutdown()
    assert len([line for line in lines if "kv_load_failure_policy" in line]) == 1


def test_unknown_setting_stops_the_start(configs: tuple[Any, Any]) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from nexuskv.adapters.vllm import NexusKVConnector

    configs[0].kv_transfer_config.kv_connector_extra_config["hots_memory"] = "1GiB"
    with pytest.raises(ConfigError, match="hots_memory"):
        NexusKVConnector(configs[0], KVConnectorRole.SCHEDULER, configs[1])


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_secure_hashes_have_one_seed_everywhere(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert key_identity(algorithm) == (algorithm, "vllm-none-hash", 32)


def test_random_seed_is_warned_about(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert key_identity("xxhash") == ("xxhash", "random", 16)
    assert len([line for line in lines if "PYTHONHASHSEED" in line]) == 1


def test_given_seed_is_part_of_the_identity(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "41")
    assert (key_identity("xxhash"), lines) == (("xxhash", "41", 16), [])


def test_keys_are_the_hashes_at_block_boundaries(configs: tuple[Any, Any]) -> None:
    configs[1].hash_block_size = 4
    assert hash_tokens(*configs) == 4


def test_hash_that_does_not_divide_a_block_is_refused(configs: tuple[Any, Any]) -> None:
    configs[1].hash_block_size = 12
    with pytest.raises(ConfigError, match="not a multiple"):
        hash_tokens(*configs)


@pytest.mark.parametrize(
    ("dtype", "strides"),
    [("float16", (512, 256, 16, 1)), ("float32", (512, 16, 32, 1))],
    ids=["dtype", "strides"],
)
def test_tensor_that_differs_is_refused(
    configs: tuple[Any, Any], dtype: str, strides: tuple[int, ...]
) -> None:
    from nexuskv.adapters.vllm.worker import check_tensor

    tensor = TensorFacts(
        layer="layers.0",
        address=0,
        dtype=dtype,
        item_bytes=4,
        shape=(64, 2, 16, 16),
        strides=strides,
    )
    with pytest.raises(ConfigError, match=r"layers\.0"):
        check_tensor(tensor, facts_of(configs))
