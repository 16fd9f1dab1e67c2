"""Asking how much of some chains is held: `match`, and the matches that an acquire answers.

A miss is a result, and so is a daemon that is away: nothing here raises for a store fault.
"""

import math
from collections.abc import Sequence
from typing import Final

from nexuskv.client.answers import read_runs
from nexuskv.client.batches import FRAME_BYTES
from nexuskv.client.identity import Identity
from nexuskv.client.link import Link
from nexuskv.client.process import ClientProcess
from nexuskv.errors import ConfigError, ProtocolError, Refused, Unavailable, translating
from nexuskv.protocol import Type
from nexuskv.types import DESCRIPTOR_FORMAT, Match, MatchAll

TIERS: Final = ("host", "ssd")

Chain = tuple[Identity, bytes]
"""A namespace and the joined keys of one chain of it."""


def match_all(process: ClientProcess, chains: Sequence[Chain]) -> MatchAll:
    """The joint hit of all chains by their kinds, in one exchange.

    Raises:
        ConfigError: the chains name more pages than one message may.
    """
    check_chains(process, chains)
    if not chains:
        return MatchAll(0, ())
    deadline_s = process.clock.now() + process.config.request_timeout_s
    try:
        with process.pool.lend(deadline_s) as link, translating({ConfigError: Refused}):
            tokens, rows = link.call(
                Type.MATCH,
                (number_chains(link, chains, deadline_s=deadline_s),),
                deadline_s=deadline_s,
                riders=process.releases.frames_for(link),
            )
            return read_matches(process, chains, tokens, rows)
    except (Unavailable, Refused, ProtocolError) as exc:
        process.counters.log_once(f"match {type(exc).__name__}", f"nothing is matched: {exc}")
        return nothing(chains)


def match_chain(process: ClientProcess, identity: Identity, keys: bytes) -> Match:
    """The longest held prefix of one chain, however long the chain is."""
    most = _pages_max(process, identity) * identity.key_bytes
    if len(keys) <= most or not identity.chained:
        return match_all(process, [(identity, keys)]).matches[0]
    total = Match(0)
    for start in range(0, len(keys), most):
        part = keys[start : start + most]
        total = _joined(total, match_all(process, [(identity, part)]).matches[0])
        if total.page_count * identity.key_bytes < start + len(part):
            break
    return total


def nothing(chains: Sequence[Chain]) -> MatchAll:
    """What matches while the daemon is away."""
    return MatchAll(0, tuple([Match(0)] * len(chains)))


def check_chains(process: ClientProcess, chains: Sequence[Chain]) -> None:
    """Check that the chains fit into one message.

    Raises:
        ConfigError: they do not; names both numbers.
    """
    config = process.config
    pages = sum([len(keys) // identity.key_bytes for identity, keys in chains])
    size_bytes = sum([len(keys) + FRAME_BYTES for _, keys in chains])
    if pages > config.batch_pages_max:
        raise ConfigError(f"{pages} pages in one call, at most {config.batch_pages_max}")
    if size_bytes > config.message_bytes_max:
        raise ConfigError(
            f"{size_bytes} bytes of keys in one call, at most {config.message_bytes_max}"
        )


def number_chains(
    link: Link, chains: Sequence[Chain], *, deadline_s: float
) -> list[tuple[int, bytes]]:
    """The chains as the wire says them."""
    return [
        (link.number_of(identity.id, identity.encoded, deadline_s=deadline_s), keys)
        for identity, keys in chains
    ]


def read_matches(
    process: ClientProcess, chains: Sequence[Chain], tokens: object, rows: object
) -> MatchAll:
    """Check and read matches; the time to load them includes this process's copies.

    Raises:
        ProtocolError: another number of matches than chains, or a malformed one.
    """
    assert isinstance(tokens, int)
    assert isinstance(rows, list)
    if len(rows) != len(chains):
        raise ProtocolError(f"{len(rows)} matches for {len(chains)} chains")
    speed = process.counters.copy_bytes_per_s
    matches: list[Match] = []
    for (identity, _), row in zip(chains, rows, strict=True):
        page_count, by_tier, load_us = _read_row(row)
        copy_s = page_count * identity.page_bytes / speed
        matches.append(
            Match(page_count, dict(zip(TIERS, by_tier, strict=True)), load_us / 1e6 + copy_s)
        )
    return MatchAll(tokens, tuple(matches))


def in_host_memory(
    process: ClientProcess, chains: Sequence[Chain], matched: MatchAll, runs: object
) -> MatchAll:
    """What of an acquire's matches can be read without loading anything.

    Chains count up to their first page that is not in host memory. Windows and states are not
    counted from the start, so with one of them among the chains nothing is left.

    Raises:
        ProtocolError: a run is malformed.
    """
    if not all(identity.chained for identity, _ in chains):
        return nothing(chains)
    tokens, unit = matched.token_count, 1
    for index, (identity, keys) in enumerate(chains):
        there = leading(read_runs(runs, len(keys) // identity.key_bytes, index))
        tokens = min(tokens, there * identity.record.page_tokens)
        unit = math.lcm(unit, identity.record.page_tokens)
    tokens -= tokens % unit
    speed = process.counters.copy_bytes_per_s
    counts = [(identity, tokens // identity.record.page_tokens) for identity, _ in chains]
    matches = [
        Match(count, {"host": count, "ssd": 0}, count * identity.page_bytes / speed)
        for identity, count in counts
    ]
    return MatchAll(tokens, tuple(matches))


def leading(runs: Sequence[tuple[int, bytes]]) -> int:
    """Pages that are there before the first that is not, in the runs of one first reply."""
    count = 0
    for first, descriptors in runs:
        for row in DESCRIPTOR_FORMAT.iter_unpack(descriptors):
            if first != count or not row[1]:
                return count
            count = first = count + 1
    return count


def _read_row(row: object) -> tuple[int, list[int], int]:
    if (
        isinstance(row, list)
        and tuple(map(type, row)) == (int, list, int)
        and tuple(map(type, row[1])) == (int, int)
    ):
        return row[0], row[1], row[2]
    raise ProtocolError(f"a match is [pages, [host, ssd], load_us], got {row!r:.80}")


def _pages_max(process: ClientProcess, identity: Identity) -> int:
    limits = process.limits
    by_size = (limits.message_bytes_max - 2 * FRAME_BYTES) // identity.key_bytes
    return max(1, min(limits.batch_pages_max, by_size))


def _joined(first: Match, then: Match) -> Match:
    tiers = {name: first.tier_counts.get(name, 0) + then.tier_counts.get(name, 0) for name in TIERS}
    return Match(first.page_count + then.page_count, tiers, first.load_s + then.load_s)
