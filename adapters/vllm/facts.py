"""What a vLLM configuration says about KV bytes, as plain `EngineFacts`.

The only module that reads vLLM's configuration objects. Whatever it does not understand it refuses
with a `ConfigError` that says so in one line: the connector then switches itself off.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, Final

from nexuskv.adapters.vllm.fingerprint import folder_fingerprint, is_commit
from nexuskv.adapters.vllm.identity import EngineFacts
from nexuskv.adapters.vllm.layout import describe_expected
from nexuskv.config import Config
from nexuskv.errors import ConfigError

VERSIONS: Final = ((0, 32), (0, 33))
_log: Final = logging.getLogger("vllm.nexuskv")


def engine_facts(
    vllm_config: Any, kv_cache_config: Any, *, config: Config, weights_revision: str
) -> EngineFacts:
    """Read the facts; equal in the scheduler's process and in every worker's.

    Args:
        vllm_config: `vllm.config.VllmConfig`.
        kv_cache_config: `vllm.v1.kv_cache_interface.KVCacheConfig`.
        config: for the tenant.
        weights_revision: given by the operator; empty asks for a fingerprint of the checkpoint.

    Raises:
        ConfigError: something is not supported or cannot be identified; one line, for people.
    """
    import vllm

    version = tuple(vllm.__version_tuple__[:2])
    if version not in VERSIONS:
        raise ConfigError(f"vLLM {vllm.__version__} is not one this connector was tested with")
    _refuse_unsupported(vllm_config, kv_cache_config)
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheme, seed, key_bytes = key_identity(cache.prefix_caching_hash_algo)
    replicated = _is_mla(spec)
    return EngineFacts(
        tenant=config.tenant,
        model=_model_name(model),
        weights_revision=weights_revision or _weights_revision(model),
        compute_dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=f"{cache.cache_dtype} {spec.dtype}".replace("torch.", ""),
        quantization=str(model.quantization or ""),
        block_tokens=spec.block_size,
        block_bytes=spec.unpadded_page_size_bytes,
        layer_count=len(kv_cache_config.kv_cache_groups[0].layer_names),
        kv_heads=spec.num_kv_heads,
        head_dim_k=spec.head_size,
        head_dim_v=spec.head_size_v,
        layout=expected_layout(cache.kv_cache_layout, spec),
        backend=f"vllm-{version[0]}.{version[1]} {_backend(vllm_config, spec)}",
        key_scheme=scheme,
        key_seed=seed,
        key_bytes=key_bytes,
        hash_tokens=hash_tokens(vllm_config, kv_cache_config),
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        replicated=replicated,
        model_config=_model_config_fingerprint(model),
    )


def key_identity(algorithm: str) -> tuple[str, str, int]:
    """Scheme, seed and length in bytes of the engine's block hashes.

    A seed that is random in each process is named so, once in the log: keys then never meet those
    of another process, which costs hits and nothing else.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    hash_of = get_hash_fn_by_name(algorithm)
    seed = str(resolve_none_hash_seed(hash_of))
    if seed != str(resolve_none_hash_seed(hash_of)):
        _log.warning(
            "NexusKV: block hashes of %s are random in each process, so nothing is shared; set "
            "PYTHONHASHSEED to one value everywhere or use --prefix-caching-hash-algo sha256_cbor",
            algorithm,
        )
        seed = "random"
    return algorithm, seed, len(hash_of("nexuskv"))


def expected_layout(name: str | None, spec: Any) -> str:
    """Order and sizes inside one block of one layer, as a layout's name promises them.

    Raises:
        ConfigError: the layout is not resolved, unknown, or interleaves layers.
    """
    from vllm.v1.kv_cache_layout import KVCacheLayout

    if name is None or name not in KVCacheLayout.__members__:
        raise ConfigError(f"KV cache layout {name!r} is not known")
    layout = KVCacheLayout[name]
    if not layout.is_layer_compact:
        raise ConfigError(f"KV cache layout {name}, whose blocks span layers, is not supported yet")
    order = [axis - 1 for axis in layout.layer_view_order if axis > 0]
    shape = (spec.num_heads, spec.num_states, spec.state_content_size_bytes)
    return f"{name}: {describe_expected(shape, order=order, item_bytes=1)}"


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens of one block hash: a block's key is the hash at its last boundary.

    Raises:
        ConfigError: a block is not a whole number of hashes.
    """
    block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    cache = vllm_config.cache_config
    tokens = kv_cache_config.hash_block_size or cache.hash_block_size or block_tokens
    if block_tokens % tokens:
        raise ConfigError(f"blocks of {block_tokens} tokens are not a multiple of {tokens}, a hash")
    return int(tokens)


def _refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Everything this form of the connector does not do, each with its own sentence."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    parallel = vllm_config.parallel_config
    refusals = {
        f"{len(groups)} KV cache groups (one is supported)": len(groups) != 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        "KV scales computed at run time": bool(
            getattr(vllm_config.cache_config, "calculate_kv_scales", False)
        ),
    }
    for what, refused in refusals.items():
        if refused:
            raise ConfigError(f"{what} is not supported yet")
    kind = type(groups[0].kv_cache_spec)
    if kind not in (FullAttentionSpec, MLAAttentionSpec):
        raise ConfigError(f"KV cache of kind {kind.__name__} is not supported yet")


def _is_mla(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return isinstance(spec, MLAAttentionSpec)


def _model_name(model: Any) -> str:
    """The model's name; of a local folder the last part, so that two hosts' paths agree."""
    return Path(model.model).resolve().name if Path(model.model).is_dir() else str(model.model)


def _weights_revision(model: Any) -> str:
    """Commit id or fingerprint of the checkpoint.

    Raises:
        ConfigError: neither can be made.
    """
    if Path(model.model).is_dir():
        return folder_fingerprint(Path(model.model))
    if is_commit(str(model.revision or "")):
        return f"commit:{model.revision}"
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    if isinstance(found, str) and is_commit(Path(found).parent.name):
        return f"commit:{Path(found).parent.name}"
    raise ConfigError(
        f"the weights of {model.model} cannot be told apart from others of that name; "
        "set weights_revision in kv_connector_extra_config"
    )


def _model_config_fingerprint(model: Any) -> str:
    """What else changes KV values: rope, overrides and the rest of the model's own config."""
    values = dict(model.hf_config.to_dict())
    for name in ("transformers_version", "_name_or_path"):
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    if "longrope" in text:  # chooses its factors by the longest context allowed
        text += f" {model.max_model_len}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _backend(vllm_config: Any, spec: Any) -> str:
    """What orders the bytes inside a block beyond its strides.

    CPU attention packs K by instruction set, so two machines may differ under one layout name.
    """
    device = str(vllm_config.device_config.device_type)
    if device != "cpu":
        raise ConfigError(f"KV caches on {device} are not supported yet, only on cpu")
    from vllm.v1.attention.backends import cpu_attn

    choose = getattr(cpu_attn, "_get_attn_isa", None)
    if choose is None:
        raise ConfigError("this vLLM does not say how its CPU attention packs blocks")
    cache = vllm_config.cache_config
    return f"cpu-{choose(spec.dtype, spec.block_size, spec.head_size, cache.cache_dtype)}"
