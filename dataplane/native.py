"""Moving bytes without the GIL: the C module if it was built, else its pure-Python twin.

Callers write `from nexuskv.dataplane import native` and call `native.load(…)`. Both hold the same
contract and pass the same tests; the twin gives the GIL up more often, so it is slow beside busy
threads. All functions are stateless and thread-safe, check everything before a byte moves, and hold
the buffers they were given until they return.

`exchange(fd, request, *, message_bytes_max, timeout_s, spin_s=0) -> bytes`
    Sends all of `request` (a buffer or a sequence of buffers: whole frames, or nothing), then
    receives one frame, a little-endian u32 length and its payload, and returns the payload. The
    socket may block or not. For `spin_s` it asks again and again before it sleeps, without the GIL
    and after everybody else. Takes no byte past the frame. Raises `TimeoutError`, `ConnectionError`
    (closed or reset), `ValueError` (announced length above `message_bytes_max`) and `OSError`;
    after any of these the stream is out of step and must be closed.

`load(segment, table, pages, into, *, threads=1, deadline_s=inf) -> bytes`
    Copies each page into its item of `into`, hashes what landed, then reads the slot's generation.
    One `PageStatus` byte a page: HIT, MISS (descriptor of size 0: item untouched), STALE (the slot
    changed owner; wins over CORRUPT), CORRUPT, UNAVAILABLE (not begun by `deadline_s` on
    CLOCK_MONOTONIC). Unless HIT or MISS, the item's bytes are undefined.

`store(segment, pages, from_, *, threads=1, deadline_s=inf) -> (statuses, checksums)`
    Hashes each item of `from_` step by step and copies it into its slot; descriptors' checksums and
    generations are ignored. STORED, MISS or UNAVAILABLE a page; checksums are little-endian u64,
    the namespace and key mixed in, 0 unless STORED. A source that changes meanwhile yields a page
    that fails its check later, never one that passes with torn bytes.

`check(segment, pages, *, threads=1, deadline_s=inf) -> bytes`
    Hashes pages where they lie: HIT, CORRUPT, MISS or UNAVAILABLE.

    All three raise `IndexError` when a descriptor leaves the segment or the slot table (whoever
    made the descriptor is wrong) and `ValueError` or `BufferError` for the caller's own mistakes:
    lengths that do not add up, read-only, overlapping or non-contiguous destinations.

`populate(address, length, *, write)`, `touch(…)`, `advise_huge(address, length)`
    Fill the page tables of a page-aligned mapping (`touch` is how old kernels do it), or ask for
    huge pages. Trouble is an `OSError`, never a SIGBUS.

`address_of(data) -> int`
    Where a buffer's bytes lie; whoever asks keeps the buffer alive.
"""

from typing import Final

try:
    from nexuskv.dataplane._native import (
        INSTRUCTION_SET,
        address_of,
        advise_huge,
        check,
        exchange,
        load,
        populate,
        store,
        touch,
    )
except ImportError:
    from nexuskv.dataplane.fallback import (
        INSTRUCTION_SET,
        address_of,
        advise_huge,
        check,
        exchange,
        load,
        populate,
        store,
        touch,
    )

NATIVE: Final = INSTRUCTION_SET != "none"
NAME: Final = f"native ({INSTRUCTION_SET})" if NATIVE else "fallback (pure Python)"
"""Which one is in use, for status lines and benchmark reports."""

__all__ = [
    "INSTRUCTION_SET",
    "NAME",
    "NATIVE",
    "address_of",
    "advise_huge",
    "check",
    "exchange",
    "load",
    "populate",
    "store",
    "touch",
]
