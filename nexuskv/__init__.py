"""NexusKV: a disaggregated KV-cache storage service for LLM inference.

This module holds the version, `UNKNOWN` and a lazy `connect`, nothing else: every
`import nexuskv.x` runs it, so an import here would become a cycle or a slow start everywhere.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nexuskv.client.store import connect as connect

__version__ = "0.1.0"


class Unknown:
    """The type of `UNKNOWN`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "nexuskv.UNKNOWN"


UNKNOWN: Final = Unknown()
"""The parent of pages whose preceding page is not known: they become a fragment of the index."""

__all__ = ["UNKNOWN", "Unknown", "__version__", "connect"]


def __getattr__(name: str) -> object:
    if name == "connect":
        from nexuskv.client.store import connect

        return connect
    raise AttributeError(f"module 'nexuskv' has no attribute {name!r}")
