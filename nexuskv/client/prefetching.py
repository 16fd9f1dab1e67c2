"""A prefetch: an acquire that gives every page back unread, so that loading it is all it does."""

from collections.abc import Sequence

from nexuskv.client.acquiring import Acquire, Claim, Run, Times
from nexuskv.client.batches import pages_per_message, spans
from nexuskv.client.identity import Identity
from nexuskv.client.link import Link
from nexuskv.client.process import ClientProcess
from nexuskv.errors import ConfigError, ProtocolError, Refused, Unavailable, translating
from nexuskv.types import DESCRIPTOR_FORMAT


def prefetch(process: ClientProcess, identity: Identity, keys: bytes) -> int:
    """Have the pages of a chain brought into host memory; how many were seen there.

    Store faults are logged and end it. Bounded by `transfer_timeout_s`.
    """
    times = Times(process.clock.now() + process.config.transfer_timeout_s)
    size = identity.key_bytes
    count = 0
    try:
        with process.pool.lend(times.deadline_s) as link, translating({ConfigError: Refused}):
            number = link.number_of(identity.id, identity.encoded, deadline_s=times.deadline_s)
            most = pages_per_message(
                link.session.limits, key_bytes=size, batch_pages=process.config.client_batch_pages
            )
            for start, stop in spans(len(keys), most * size):
                count += _pass(process, link, (number, keys[start:stop]), size, times)
    except (Unavailable, Refused, ProtocolError) as exc:
        process.counters.log_once(f"prefetch {type(exc).__name__}", f"no prefetch: {exc}")
    return count


def _pass(
    process: ClientProcess, link: Link, chain: tuple[int, bytes], key_bytes: int, times: Times
) -> int:
    """One acquire; the pages that came."""
    claim = Claim.own(process)
    acquire = Acquire(process, link, chain, key_bytes=key_bytes, claim=claim, times=times)
    runs = acquire.first()
    count = _count(runs)
    process.terms.watch(acquire.term)
    try:
        while acquire.goes_on:
            runs = acquire.next(runs)
            count += _count(runs)
    finally:
        process.terms.forget(acquire.term)
        acquire.end()
        if acquire.term.lease_id:
            process.releases.release(link.incarnation, acquire.term.lease_id)
    return count


def _count(runs: Sequence[Run]) -> int:
    return sum(bool(row[1]) for _, run in runs for row in DESCRIPTOR_FORMAT.iter_unpack(run))
