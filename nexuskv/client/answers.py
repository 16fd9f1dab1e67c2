"""Reading what the daemon answers about pages, and distrusting it. Pure functions."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from nexuskv.errors import ConfigError, ProtocolError
from nexuskv.protocol import AcquireState
from nexuskv.types import DESCRIPTOR_BYTES, DESCRIPTOR_FORMAT, PageStatus

_STATUSES: Final = tuple(PageStatus)


def as_statuses(raw: bytes | bytearray) -> list[PageStatus]:
    """Status bytes as `PageStatus` values."""
    return list(map(_STATUSES.__getitem__, raw))


def state_of(value: object) -> AcquireState:
    """How an acquire stands.

    Raises:
        ProtocolError: no known state.
    """
    if value not in (0, 1, 2, 3):
        raise ProtocolError(f"an acquire cannot stand at {value!r:.20}")
    return AcquireState(int(str(value)))


def read_runs(runs: object, page_count: int, chain_index: int = 0) -> list[tuple[int, bytes]]:
    """The runs of one chain, as (first page, descriptors).

    Raises:
        ProtocolError: a run is malformed or leaves its chain.
    """
    found: list[tuple[int, bytes]] = []
    assert isinstance(runs, list)
    for run in runs:
        if not isinstance(run, list) or tuple(map(type, run)) != (int, int, bytes, bytes):
            raise ProtocolError(f"a run is [chain, page, descriptors, capability], got {run!r:.80}")
        chain, first, descriptors, _capability = run
        count, odd = divmod(len(descriptors), DESCRIPTOR_BYTES)
        if chain == chain_index:
            if odd or first < 0 or first + count > page_count:
                raise ProtocolError(f"a run of {count} pages at {first} in {page_count} asked for")
            found.append((first, descriptors))
    return found


@contextmanager
def blaming(descriptors: bytes, page_bytes: int) -> Generator[None]:
    """Tell a daemon's wrong page size from the caller's own mistake in a native call.

    Raises:
        ProtocolError: instead of a ConfigError, when a descriptor has another size than pages have.
    """
    try:
        yield
    except ConfigError as exc:
        for row in DESCRIPTOR_FORMAT.iter_unpack(descriptors):
            if row[1] not in (0, page_bytes):
                raise ProtocolError(f"a page of {row[1]} bytes, pages have {page_bytes}") from exc
        raise
