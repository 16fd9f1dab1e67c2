"""The shared nouns: statuses, kinds and descriptors."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexuskv.errors import ConfigError
from nexuskv.types import DESCRIPTOR_BYTES, PAGE_ALIGN_BYTES, Descriptor, PageStatus


@pytest.mark.parametrize("status", PageStatus, ids=lambda status: status.name)
def test_a_status_is_true_when_the_caller_has_what_it_asked_for(status: PageStatus) -> None:
    assert bool(status) == (status.name in {"HIT", "STORED", "EXISTS"})


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**51 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_a_descriptor_is_read_back_as_it_was(
    segment: int, place: int, size: int, checksum: int, generation: int
) -> None:
    descriptor = Descriptor(segment, place * PAGE_ALIGN_BYTES, size, checksum, generation)
    raw = descriptor.encode()
    assert len(raw) == DESCRIPTOR_BYTES
    assert Descriptor.decode(raw) == descriptor


def test_a_descriptor_lies_on_the_wire_as_the_protocol_page_says() -> None:
    raw = Descriptor(1, 8192, 3, 4, 5).encode()
    assert raw == struct.pack("<IIQQQ", 1, 3, 8192, 4, 5)


def test_an_unaligned_descriptor_is_refused() -> None:
    with pytest.raises(ConfigError, match="aligned"):
        Descriptor(0, 4097, 1, 0, 0)
