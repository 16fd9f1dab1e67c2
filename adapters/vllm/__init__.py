"""The vLLM connector: one class, two halves (scheduler and worker), loaded by the engine by name.

The class is imported when it is asked for, so that the pure parts of this package (identity,
layout, fingerprint) can be used and tested where vLLM is not installed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nexuskv.adapters.vllm.connector import NexusKVConnector as NexusKVConnector

__all__ = ["NexusKVConnector"]


def __getattr__(name: str) -> object:
    if name != "NexusKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from nexuskv.adapters.vllm.connector import NexusKVConnector
    except ModuleNotFoundError as exc:
        if (exc.name or "").split(".")[0] not in ("vllm", "torch"):
            raise
        raise ImportError(
            f"nexuskv.adapters.vllm needs vLLM 0.32 or 0.33 in this environment ({exc})"
        ) from exc
    return NexusKVConnector
