"""The socket's frames: every record comes back as it was, and nothing else is taken."""

import contextlib
from dataclasses import fields
from typing import get_args, get_origin

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexuskv.errors import ProtocolError
from nexuskv.worker.codec import (
    LENGTH,
    NUMBERED,
    Finish,
    Ping,
    Pong,
    Record,
    WorkerSettings,
    decode,
    encode,
)
from nexuskv.worker.commands import Command, Result, WorkerLost

KINDS: list[type[Record]] = [
    *(each for each in get_args(Command | Result) if each is not WorkerLost),
    WorkerSettings,
    Ping,
    Pong,
    Finish,
]
NUMBERS = st.integers(0, (1 << 64) - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
WORDS: dict[object, st.SearchStrategy[object]] = {
    int: NUMBERS,
    str: TEXTS,
    bytes: st.binary(max_size=300),
    bool: st.booleans(),
    str | None: st.none() | TEXTS,
}


def values_of(annotation: object) -> st.SearchStrategy[object]:
    """Values that a field of this type may have."""
    if get_origin(annotation) is tuple:
        row = get_args(annotation)[0]
        rows = st.builds(row, *(WORDS[kind] for kind in row.__annotations__.values()))
        return st.lists(rows, max_size=4).map(tuple)
    return WORDS[annotation]


def records_of(kind: type[Record]) -> st.SearchStrategy[Record]:
    return st.builds(kind, *(values_of(spec.type) for spec in fields(kind)))


UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
RECORDS = st.sampled_from(KINDS).flatmap(records_of)


@UNHURRIED
@given(NUMBERS, RECORDS)
def test_a_record_comes_back_as_it_was(sequence: int, record: Record) -> None:
    frame = encode(sequence, record)
    assert LENGTH.unpack_from(frame)[0] == len(frame) - LENGTH.size
    found = decode(frame[LENGTH.size :])
    assert found == (sequence, record)
    assert type(found[1]) is type(record)


def test_every_record_of_the_contract_has_a_number() -> None:
    assert {*KINDS} == {*NUMBERED}


@UNHURRIED
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_a_protocol_error(raw: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert encode(*decode(raw))


@UNHURRIED
@given(RECORDS, st.data())
def test_a_damaged_message_is_another_message_or_a_protocol_error(
    record: Record, data: st.DataObject
) -> None:
    raw = bytearray(encode(1, record)[LENGTH.size :])
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ProtocolError):
        assert decode(bytes(raw)) != (1, record)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param([], id="empty"),
        pytest.param([1], id="no number"),
        pytest.param({}, id="no array"),
        pytest.param([1, 99], id="an unknown number"),
        pytest.param([1, []], id="a list for a number"),
        pytest.param([-1, 10, 3], id="a negative sequence"),
        pytest.param([1, 10], id="a field too few"),
        pytest.param([1, 10, 3, 4], id="a field too many"),
        pytest.param([1, 10, "3"], id="text for a number"),
        pytest.param([1, 10, True], id="a bool for a number"),
        pytest.param([1, 10, -3], id="a negative number"),
        pytest.param([1, 11, 3, 4], id="no rows"),
        pytest.param([1, 11, 3, [[b"", b""]]], id="a short row"),
        pytest.param([1, 11, 3, [[b"", b"", "key"]]], id="text for bytes"),
        pytest.param([1, 30, 3, b"why"], id="bytes for a reason"),
    ],
)
def test_a_malformed_message_is_a_protocol_error(message: object) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(message))
