"""The table header and the geometry of a segment."""

from pathlib import Path

import pytest

from nexuskv.errors import ConfigError
from nexuskv.tiers.host import HostTier
from nexuskv.tiers.record import RECORD_BYTES, decode
from nexuskv.tiers.segment import HEADER_BYTES, TableHeader
from tests.tiers.conftest import CHUNK_BYTES, INCARNATION, OpenTier

HEADER = TableHeader(1 << 20, 1 << 16, 4096 + 65536, INCARNATION, bytes(range(16)))


def read_header(tier: HostTier) -> TableHeader | None:
    return TableHeader.decode(Path(tier.segments()[0].table_path).read_bytes()[:HEADER_BYTES])


def test_a_header_is_read_as_it_was_written() -> None:
    assert TableHeader.decode(HEADER.encode().ljust(HEADER_BYTES, b"\0")) == HEADER


def test_any_flipped_byte_is_noticed() -> None:
    raw = HEADER.encode()
    unnoticed = [
        at
        for at in range(len(raw))
        if TableHeader.decode(raw[:at] + bytes((raw[at] ^ 1,)) + raw[at + 1 :]) is not None
    ]
    assert unnoticed == []


@pytest.mark.parametrize("length", [0, 7, 80])
def test_a_short_header_is_none(length: int) -> None:
    assert TableHeader.decode(HEADER.encode()[:length]) is None


def test_the_file_carries_its_header(tier: HostTier) -> None:
    row = tier.segments()[0]
    assert read_header(tier) == TableHeader(
        row.capacity_bytes, row.chunk_bytes, row.table_bytes, INCARNATION, tier.instance_id
    )


def test_hello_has_the_protocols_fields_in_order(tier: HostTier) -> None:
    row = tier.segments()[0]
    assert tier.segments_for_hello() == [
        [
            0, row.data_path, row.table_path, 8 * CHUNK_BYTES, CHUNK_BYTES,
            4096 + 8 * 16 * RECORD_BYTES, 4096, 256, 8, tier.instance_id,
        ]
    ]  # fmt: skip


def test_files_have_the_sizes_that_hello_tells(tier: HostTier) -> None:
    row = tier.segments()[0]
    sizes = [Path(path).stat().st_size for path in (row.data_path, row.table_path)]
    assert sizes == [row.capacity_bytes, row.table_bytes]


def test_two_incarnations_are_two_instances(open_tier: OpenTier) -> None:
    first = open_tier()
    first.close(unlink=True)
    assert open_tier(incarnation=bytes(8)).instance_id != first.instance_id


def test_capacity_is_rounded_down_to_whole_chunks(open_tier: OpenTier) -> None:
    tier = open_tier(capacity_bytes=3 * CHUNK_BYTES - 1)
    assert (tier.chunk_count, tier.capacity_bytes) == (2, 2 * CHUNK_BYTES)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes 0"),
        ({"chunk_bytes": 5000}, "chunk_bytes 5000"),
        ({"capacity_bytes": CHUNK_BYTES - 1}, "65535"),
        ({"capacity_bytes": 1 << 44}, "17592186044416"),
        ({"incarnation": b"short"}, "got 5"),
    ],
    ids=["no chunk", "odd chunk", "under a chunk", "more slots than ids", "incarnation"],
)
def test_impossible_sizes_are_refused(
    open_tier: OpenTier, sizes: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        open_tier(**sizes)


def test_records_lie_where_readers_compute_them(tier: HostTier) -> None:
    assert tier.carve(8192)
    assert tier.carve(4096)
    slots = [tier.take(size, 3, pid=1, start_time=1, session=1) for size in (8192, 4096)]
    raw = Path(tier.segments()[0].table_path).read_bytes()
    for slot in [int(slot) for part in slots for slot in part]:
        at = HEADER_BYTES + slot * RECORD_BYTES
        record = decode(raw[at : at + RECORD_BYTES])
        assert record is not None
        assert (record.slot, record.generation) == (slot, tier.generation_of(slot))
