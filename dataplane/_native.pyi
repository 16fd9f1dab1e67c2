from collections.abc import Sequence

from nexuskv.dataplane.batch import Buffer, Pages, Regions, Segment, SlotTable

INSTRUCTION_SET: str

def exchange(
    fd: int,
    request: Buffer | Sequence[Buffer],
    *,
    message_bytes_max: int,
    timeout_s: float,
    spin_s: float = ...,
) -> bytes: ...
def load(
    segment: Segment,
    table: SlotTable,
    pages: Pages,
    into: Sequence[Regions],
    *,
    threads: int = 1,
    deadline_s: float = ...,
) -> bytes: ...
def store(
    segment: Segment,
    pages: Pages,
    from_: Sequence[Regions],
    *,
    threads: int = 1,
    deadline_s: float = ...,
) -> tuple[bytes, bytes]: ...
def check(
    segment: Segment, pages: Pages, *, threads: int = 1, deadline_s: float = ...
) -> bytes: ...
def populate(address: int, length: int, *, write: bool) -> None: ...
def touch(address: int, length: int, *, write: bool) -> None: ...
def advise_huge(address: int, length: int) -> None: ...
def address_of(data: Buffer) -> int: ...
