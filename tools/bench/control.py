"""`nexuskv bench control`: round trips of match and acquire beside bare echoes of as many bytes.

One daemon and one echo process a carrier, asked in turns by the same code. Rows named `client …`
are the same question asked through the client library: they have what Python adds in them.
"""

import os
from collections.abc import Callable
from statistics import median
from typing import Final

from nexuskv import connect
from nexuskv.client.space import Space
from nexuskv.config import MIB, load_config
from nexuskv.errors import NexusError
from nexuskv.namespace import NamespaceRecord
from nexuskv.protocol import Type, decode_reply, encode
from nexuskv.tools.bench.report import Row, row
from nexuskv.tools.bench.timing import alternate, percentile
from nexuskv.tools.bench.wire import Session, Wire, echo, echo_request
from nexuskv.tools.daemon_process import DaemonProcess, scratch_folder

PAGES: Final = 512
PAGE_BYTES: Final = 4096
KEY_BYTES: Final = 32
CARRIERS: Final = ("unix", "tcp")
MATCH_FACTOR: Final = 1.25  # of a bare echo
ACQUIRE_FACTOR: Final = 1.5
TTL_MS: Final = 30_000
AT_A_TIME: Final = 20  # requests before it is the echo's turn

RECORD: Final = NamespaceRecord(
    model="bench", dtype="uint8", page_tokens=16, page_bytes=PAGE_BYTES, key_bytes=KEY_BYTES
)


def rows(quick: bool) -> list[Row]:
    """All rows; `quick` takes fewer rounds."""
    rounds = 200 if quick else 2000
    keys = [os.urandom(KEY_BYTES) for _ in range(PAGES)]
    flags = {"host_memory": 64 * MIB, "chunk_bytes": 4 * MIB, "listen": "tcp://127.0.0.1:0"}
    with scratch_folder("bench") as folder, DaemonProcess(folder, flags=flags) as daemon:
        with connect(daemon.url, load_config(env={}).config) as store:
            space = store.namespace(
                model=RECORD.model,
                dtype=RECORD.dtype,
                page_tokens=RECORD.page_tokens,
                page_bytes=PAGE_BYTES,
                key_bytes=KEY_BYTES,
            )
            if not all(space.put(keys, from_=[bytes(PAGE_BYTES)] * PAGES)):
                raise NexusError("the pages to match could not be stored")
            found: list[Row] = []
            for scheme in CARRIERS:
                url = daemon.url_of(scheme)
                with Session(url, RECORD) as session, echo(scheme, folder) as bare:
                    through = _client(space, keys) if scheme == "unix" else None
                    found += _match(scheme, session, bare, b"".join(keys), rounds, through)
                    found += _acquire(scheme, session, bare, b"".join(keys), rounds)
        return found


def _client(space: Space, keys: list[bytes]) -> Callable[[int], None]:
    def match(_turn: int) -> None:
        if space.match(keys).page_count != PAGES:
            raise NexusError("a match through the client fell short")

    return match


def _match(
    scheme: str,
    session: Session,
    bare: Wire,
    keys: bytes,
    rounds: int,
    through: Callable[[int], None] | None,
) -> list[Row]:
    request = encode(Type.MATCH, 1, ([(session.namespace, keys)],))
    reply = session.ask(Type.MATCH, ([(session.namespace, keys)],))
    tokens, _ = reply.body
    if tokens != PAGES * RECORD.page_tokens:
        raise NexusError(f"a match found {tokens} tokens")
    same = echo_request(len(request), len(session.wire.exchange(request)))
    ours_s, echo_s, *client_s = alternate(
        rounds,
        lambda _: session.wire.exchange(request),
        lambda _: bare.exchange(same),
        *([through] if through else []),
        at_a_time=AT_A_TIME,
    )
    found = [_row(f"match x{PAGES} {scheme}", ours_s, echo_s, MATCH_FACTOR)]
    if client_s:
        found.append(_row(f"client match x{PAGES} {scheme}", client_s[0], echo_s, MATCH_FACTOR))
    return found


def _acquire(scheme: str, session: Session, bare: Wire, keys: bytes, rounds: int) -> list[Row]:
    chains = [(session.namespace, keys)]
    requests = [
        encode(Type.ACQUIRE, 1, (chains, turn.to_bytes(8, "little"), 0, TTL_MS, 0, 0))
        for turn in range(rounds + 1)
    ]
    replies: list[bytes] = []

    def ask(turn: int) -> None:
        replies.append(session.wire.exchange(requests[turn]))

    def release(_turn: int) -> None:
        """Its time is not used: it ends the leases just taken, so that they do not pile up."""
        if replies:
            leases = [decode_reply(reply).body[0] for reply in replies]
            session.ask(Type.RELEASE, (leases, [], []))
            replies.clear()

    ask(rounds)
    same = echo_request(len(requests[0]), len(replies[0]))
    ours_s, echo_s, _ = alternate(
        rounds, ask, lambda _: bare.exchange(same), release, at_a_time=AT_A_TIME
    )
    return [_row(f"acquire x{PAGES} {scheme}", ours_s, echo_s, ACQUIRE_FACTOR)]


def _row(name: str, times_s: list[float], echo_s: list[float], factor: float) -> Row:
    """Beside the bare echo, which is what the machine can do; `factor` of it is allowed."""
    return row(
        name,
        median(times_s),
        "s",
        median(echo_s),
        target=1 / factor,
        physical=True,
        p50=median(times_s),
        p99=percentile(times_s, 0.99),
        limit_p99=percentile(echo_s, 0.99),
    )
