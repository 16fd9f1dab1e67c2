"""The record layout: what is written is read, and nothing damaged is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexuskv.errors import ConfigError
from nexuskv.tiers.record import (
    GENERATION_OFFSET,
    RECORD_BYTES,
    RECORD_DTYPE,
    ParentState,
    Record,
    SlotState,
    decode,
    encode,
    new_batch,
    seal,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@st.composite
def records(draw: st.DrawFn) -> Record:
    key = draw(st.binary(max_size=64))
    parent_state = draw(st.sampled_from(ParentState))
    size = len(key) if parent_state is ParentState.KEY else 0
    return Record(
        slot=draw(U32),
        generation=draw(U64),
        state=draw(st.sampled_from(SlotState)),
        size_bytes=draw(U32),
        epoch=draw(U64),
        checksum=draw(U64),
        writer_pid=draw(U32),
        writer_start_time=draw(U64),
        writer_session=draw(U64),
        namespace_id=draw(st.binary(min_size=16, max_size=16)),
        key=key,
        parent_state=parent_state,
        parent=draw(st.binary(min_size=size, max_size=size)),
    )


EXAMPLE = Record(
    slot=7,
    generation=2**63 + 5,
    state=SlotState.READY,
    size_bytes=4096,
    epoch=3,
    checksum=2**64 - 1,
    namespace_id=bytes(range(16)),
    key=b"k" * 64,
    parent_state=ParentState.KEY,
    parent=b"p" * 64,
)


@given(records())
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    raw = encode(record)
    assert len(raw) == RECORD_BYTES
    assert decode(raw) == record


def flipped(raw: bytes, offset: int) -> bytes:
    return raw[:offset] + bytes((raw[offset] ^ 0x10,)) + raw[offset + 1 :]


def test_any_flipped_byte_is_noticed() -> None:
    raw = encode(EXAMPLE)
    assert decode(flipped(flipped(raw, 0), 0)) == EXAMPLE
    assert [at for at in range(RECORD_BYTES) if decode(flipped(raw, at)) is not None] == []


@pytest.mark.parametrize("size", [0, 255, 257])
def test_a_record_of_the_wrong_length_is_none(size: int) -> None:
    assert decode(encode(EXAMPLE).ljust(size, b"\0")[:size]) is None


def test_a_record_never_written_is_none() -> None:
    assert decode(bytes(RECORD_BYTES)) is None


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_random_bytes_are_none(raw: bytes) -> None:
    assert decode(raw) is None


@pytest.mark.parametrize(
    ("column", "value"),
    [("format_version", 1), ("state", 5), ("parent_state", 3), ("key_bytes", 65)],
)
def test_a_sealed_record_with_a_value_of_another_version_is_none(column: str, value: int) -> None:
    batch = new_batch(1)
    batch[column] = value
    seal(batch)
    assert decode(batch.tobytes()) is None


def test_a_sealed_batch_is_read_record_by_record() -> None:
    batch = np.frombuffer(encode(EXAMPLE) * 3, dtype=RECORD_DTYPE).copy()
    batch["slot"] = [1, 2, 3]
    seal(batch)
    raw = batch.tobytes()
    found = [decode(raw[at : at + RECORD_BYTES]) for at in range(0, len(raw), RECORD_BYTES)]
    assert [record.slot for record in found if record] == [1, 2, 3]


def test_columns_and_codec_agree_on_every_field() -> None:
    batch = np.frombuffer(encode(EXAMPLE), dtype=RECORD_DTYPE)[0]
    names = ("slot", "generation", "state", "size_bytes", "epoch", "checksum", "parent_state")
    assert [int(batch[name]) for name in names] == [int(getattr(EXAMPLE, name)) for name in names]
    assert (bytes(batch["key"]), bytes(batch["parent"])) == (EXAMPLE.key, EXAMPLE.parent)


def test_the_generation_is_aligned_for_whole_loads() -> None:
    assert GENERATION_OFFSET % 8 == 0
    assert RECORD_BYTES % 8 == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"slot": 2**32},
        {"generation": -1},
        {"namespace_id": b"short"},
        {"key": bytes(65)},
        {"key": bytes(8), "parent_state": ParentState.KEY, "parent": bytes(7)},
        {"parent": b"a parent of a root"},
    ],
    ids=["slot", "generation", "namespace id", "long key", "short parent", "parent of a root"],
)
def test_a_record_that_fits_no_field_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Record(**{"slot": 0, "generation": 0, **fields}).encode()  # type: ignore[arg-type]  # mixed
