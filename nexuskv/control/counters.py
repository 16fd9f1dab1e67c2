"""Counters of the control plane: names → whole numbers, shown by `stats` and /metrics."""

from typing import Final

COUNTERS: Final[dict[str, str]] = {
    "requests": "requests handled",
    "errors": "requests answered with an error",
    "protocol_errors": "malformed frames; each closed its session",
    "internal_errors": "unexpected faults caught at the edge of a request",
    "accept_failures": "connections that could not be accepted",
    "sessions_opened": "sessions that said hello",
    "sessions_refused": "connections refused because sessions_max are open",
    "sessions_overflowed": "sessions closed because they did not take their replies",
    "match_pages": "pages asked for by match",
    "match_hits": "pages found by match",
    "acquire_pages": "pages asked for by acquire",
    "acquire_hits": "pages found by acquire, at once or after a wait",
    "acquires_waiting_refused": "acquires that could not wait because too many do",
    "reserved_pages": "slots lent to writers",
    "committed_pages": "pages published",
    "commits_lost": "commits of pages that another writer had published",
    "commits_dropped": "commits discarded because the namespace was cleared",
    "aborted_pages": "slots given back unfilled",
    "no_space_pages": "pages refused because no slot could be had",
    "recovered_pages": "pages of an earlier run that are readable again",
    "recovery_dropped_pages": "pages of an earlier run that may not be, or are held twice",
    "evicted_pages": "pages evicted",
    "demoted_pages": "pages that left host memory for their copies on the ssd",
    "ssd_evicted_pages": "pages whose copies on the ssd were dropped to make room",
    "copies_done": "pages copied to the ssd",
    "copies_failed": "copies to the ssd that failed",
    "copies_dropped": "pages not copied to the ssd: too many waited, or no room could be had",
    "copies_skipped": "copies given up because the page had gone or changed",
    "loads_done": "pages loaded from the ssd into host memory",
    "loads_failed": "loads from the ssd that failed",
    "loads_corrupt": "pages found corrupt when they were loaded from the ssd",
    "ssd_errors": "commands of the ssd tier that failed",
    "verified_pages": "pages checked by verify",
    "verify_corrupt": "pages that verify found corrupt",
    "removed_pages": "pages removed or cleared by request",
    "corrupt_reports": "pages that a client reported as corrupt",
    "corrupt_pages": "pages dropped because a second reading found them corrupt",
    "chunks_moved": "chunks given to another slot size",
    "quarantined_slots": "slots whose writer was lost while it might still write",
    "quarantine_refusals": "reservations refused because quarantine is full",
    "worker_starts": "worker processes started",
    "worker_lost": "worker processes that ended or were killed while they should serve",
    "worker_queue_full": "commands dropped because the data plane's queue was full",
    "chunks_failed": "chunks that could not be populated",
    "events_sent": "events published",
}


class Counters:
    """One number a name of `COUNTERS`; they only grow."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more; an unlisted name is a KeyError."""
        self._values[name] += count

    def snapshot(self) -> dict[str, int]:
        """All counters by name."""
        return dict(self._values)
