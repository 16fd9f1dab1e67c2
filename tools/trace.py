"""The request traces that ship with the project: what people asked, when, and what repeats.

Owns the reading of `tools/traces/*.jsonl.gz`. A trace names no tokens: each hash id stands for one
run of `TOKENS_PER_ID` tokens together with everything before it, so equal ids are equal prefixes.
Reading is lazy, holds one line at a time and is as thread-safe as any generator.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from typing import Final

from nexuskv.errors import ConfigError

TOKENS_PER_ID: Final = 512
"""Tokens one hash id stands for; the last id of a request may stand for fewer."""

TRACES: Final = ("conversation", "synthetic")
"""The names that `read_trace` knows."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    timestamp_ms: int  # since the start of the trace
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]  # one for each started run of TOKENS_PER_ID input tokens


def read_trace(name: str, *, limit: int | None = None) -> Iterator[Request]:
    """Yield the requests of a trace in order of arrival.

    Args:
        name: one of `TRACES`.
        limit: stop after so many requests; None reads them all.

    Raises:
        ConfigError: there is no such trace; raised by the call, before the first request.
    """
    if name not in TRACES:
        raise ConfigError(f"no trace {name!r}; there are {', '.join(TRACES)}")
    return islice(_requests(name), limit)


def _requests(name: str) -> Iterator[Request]:
    packed = resources.files("nexuskv.tools").joinpath("traces", f"{name}.jsonl.gz")
    with packed.open("rb") as file, gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Request(
                timestamp_ms=row["timestamp"],
                input_tokens=row["input_length"],
                output_tokens=row["output_length"],
                hash_ids=tuple(row["hash_ids"]),
            )
