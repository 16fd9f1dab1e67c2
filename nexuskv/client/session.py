"""What `hello` agreed on: the daemon's run, its limits and its segments. Values only."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nexuskv import __version__
from nexuskv.config import Config
from nexuskv.dataplane.shm import SegmentSpec
from nexuskv.errors import ProtocolError
from nexuskv.protocol import INCARNATION_BYTES

TRANSPORTS: Final = ("shm",)
SEGMENT_FIELDS: Final = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """What one message, lease or wait may be at most, the daemon's word and ours."""

    message_bytes_max: int
    batch_pages_max: int
    lease_ttl_max_s: float
    acquire_wait_max_s: float
    reserved_bytes_max: int  # what one session may hold reserved
    session_idle_s: float  # how long a remote session may be silent


@dataclass(frozen=True, slots=True)
class Session:
    """One accepted `hello`."""

    incarnation: bytes
    number: int
    server: str
    limits: Limits
    segments: tuple[SegmentSpec, ...]
    transport: str
    writable: bool


def hello_body(config: Config) -> tuple[object, ...]:
    """The fields of a `hello` request of this process."""
    return (f"nexuskv-client {__version__}", os.getpid(), config.tenant, b"", list(TRANSPORTS))


def read_hello(body: list[object], config: Config) -> Session:
    """Check and read a `hello` reply.

    Raises:
        ProtocolError: a field inside `limits` or `segments` is missing or of a wrong type.
    """
    incarnation, number, server, limits, segments, transport, writable = body
    assert isinstance(incarnation, bytes)
    assert isinstance(number, int)
    assert isinstance(server, str)
    assert isinstance(transport, str)
    assert isinstance(writable, bool)
    assert isinstance(limits, dict)
    assert isinstance(segments, list)
    if len(incarnation) != INCARNATION_BYTES:
        raise ProtocolError(f"incarnation of {len(incarnation)} bytes, not {INCARNATION_BYTES}")
    return Session(
        incarnation,
        number,
        server,
        _read_limits(limits, config),
        tuple(_read_segment(row, incarnation) for row in segments),
        transport,
        writable,
    )


def _read_limits(limits: Mapping[object, object], config: Config) -> Limits:
    def least(name: str, own: int, *, floor: int = 1) -> int:
        value = limits.get(name, own)
        if type(value) is not int or value < floor:
            raise ProtocolError(f"limit {name} cannot be {value!r:.40}")
        return min(value, own)

    return Limits(
        least("message_bytes_max", config.message_bytes_max),
        least("batch_pages_max", config.batch_pages_max),
        least("lease_ttl_max_ms", int(config.lease_ttl_max_s * 1000)) / 1000,
        least("acquire_wait_max_ms", int(config.acquire_wait_max_s * 1000), floor=0) / 1000,
        least("session_reserved_bytes", config.session_reserved_bytes),
        least("session_idle_ms", int(config.session_idle_s * 1000)) / 1000,
    )


def _read_segment(row: object, incarnation: bytes) -> SegmentSpec:
    kinds = (int, str, str, int, int, int, int, int, int, bytes)
    if not isinstance(row, list) or tuple(map(type, row)) != kinds:
        raise ProtocolError(f"a segment has {SEGMENT_FIELDS} fields, got {row!r:.200}")
    number, data, table, capacity, chunk, table_bytes, header, record, generation, _instance = row
    return SegmentSpec(
        segment_id=number,
        data_path=data,
        table_path=table,
        capacity_bytes=capacity,
        chunk_bytes=chunk,
        table_bytes=table_bytes,
        header_bytes=header,
        record_bytes=record,
        generation_offset=generation,
        incarnation=incarnation,
    )
