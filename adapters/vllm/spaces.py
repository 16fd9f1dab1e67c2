"""Namespaces of an engine's ranks, one set per LoRA adapter, opened when first needed.

Owns a bounded cache, the coldest adapter leaves first. Not thread-safe: each half has its own.
"""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nexuskv.adapters.vllm.fingerprint import folder_fingerprint, folder_signature
from nexuskv.adapters.vllm.identity import EngineFacts, namespace_record

if TYPE_CHECKING:
    from nexuskv.client.space import Space
    from nexuskv.client.store import Store


class RankSpaces:
    """Spaces of given ranks: all of them in the scheduler, its own in a worker."""

    def __init__(self, store: "Store", facts: EngineFacts, *, ranks: range, adapters_max: int):
        self._store = store
        self._facts = facts
        self._ranks = ranks
        self._adapters_max = max(1, adapters_max)
        self._spaces: OrderedDict[str, tuple[Space, ...]] = OrderedDict()

    def of(self, lora: str) -> "tuple[Space, ...]":
        """The ranks' spaces for one adapter, in rank order.

        Raises:
            ConfigError: the facts make no valid record.
        """
        spaces = self._spaces.get(lora)
        if spaces is None:
            spaces = tuple(
                self._store.open(namespace_record(self._facts, tp_rank=rank, lora=lora))
                for rank in self._ranks
            )
            self._spaces[lora] = spaces
            if len(self._spaces) > self._adapters_max:
                self._spaces.popitem(last=False)
        self._spaces.move_to_end(lora)
        return spaces

    def opened(self) -> "list[Space]":
        """Every space opened and not forgotten."""
        return [space for spaces in self._spaces.values() for space in spaces]


class LoraFingerprints:
    """Content fingerprints of LoRA adapters, computed again when their files change."""

    def __init__(
        self, *, adapters_max: int, compute: Callable[[Path], str] = folder_fingerprint
    ) -> None:
        self._adapters_max = max(1, adapters_max)
        self._compute = compute
        self._known: OrderedDict[str, tuple[object, str]] = OrderedDict()

    def of(self, path: str) -> str:
        """The fingerprint of the adapter in a folder.

        Raises:
            ConfigError: no such folder, or it cannot be read.
        """
        signature = folder_signature(Path(path))
        known = self._known.get(path)
        if known is None or known[0] != signature:
            known = (signature, self._compute(Path(path)))
            self._known[path] = known
            if len(self._known) > self._adapters_max:
                self._known.popitem(last=False)
        self._known.move_to_end(path)
        return known[1]
