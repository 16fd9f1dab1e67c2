"""Commands that look at a running daemon: `ping`, `status`, `tree`, and the lists of its tables.

Each opens one connection, asks, prints. None of them changes anything.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Final

from nexuskv.clock import MonotonicClock
from nexuskv.config import format_size
from nexuskv.errors import ConfigError
from nexuskv.tools.commands.command import Command, add_url
from nexuskv.tools.commands.finding import add_namespace, namespaces_of, open_store
from nexuskv.tools.output import print_json, print_table, say
from nexuskv.tools.rows import Row, named
from nexuskv.tools.tiers import summary, tier_rows
from nexuskv.tools.tree import Node, lines_of, tree_of

if TYPE_CHECKING:
    from nexuskv.client.store import Store

ROWS_SHOWN: Final = 1000
PINGS_MAX: Final = 100_000


def _listing(store: "Store", what: str, namespace_id: bytes = b"") -> Iterator[Row]:
    return (named(what, row) for row in store.inspect(what, namespace_id=namespace_id))


def _ping(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.count <= PINGS_MAX:
        raise ConfigError(f"--count is {arguments.count}, must be 1 to {PINGS_MAX}")
    with open_store(arguments) as store:
        times_s = [store.ping() for _ in range(arguments.count)]
        answer = {"url": store.url, "count": len(times_s), "median_s": median(times_s)}
    if arguments.json:
        print_json(answer)
    else:
        print(f"{answer['url']} answers in {median(times_s) * 1e6:.0f} us")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    with open_store(arguments) as store:
        stats = {"url": store.url, **store.stats()}
    if arguments.json:
        print_json(stats)
    else:
        print_table(("what", "value"), [*summary(stats), *_flat("", stats)])
    return 0


def _flat(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Nested maps as dotted names; sizes gain a reading for people."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        elif name.endswith("bytes") and isinstance(value, int):
            yield f"{prefix}{name}", f"{value} ({format_size(value)})"
        elif isinstance(value, float):
            yield f"{prefix}{name}", f"{value:.1f}"
        else:
            yield f"{prefix}{name}", str(value)


def _tree(arguments: argparse.Namespace) -> int:
    with open_store(arguments) as store:
        forest = forest_of(store, depth=arguments.depth, limit=arguments.limit)
        tiers = tier_rows(store.stats())
    if arguments.json:
        namespaces = [_tree_json(*each, arguments.depth) for each in forest]
        print_json({"namespaces": namespaces, "tiers": tiers})
    elif forest:
        _print_rows(tiers)
        print()
        print_forest(forest, depth=arguments.depth)
    else:
        _print_rows(())
    return 0


def _tree_json(namespace: Row, nodes: Sequence[Node], depth: int) -> Row:
    return {**namespace, "tree": [node.as_json(depth) for node in nodes]}


def forest_of(store: "Store", *, depth: int, limit: int) -> Sequence[tuple[Row, Sequence[Node]]]:
    """At most `limit` namespaces, each with the runs of at most `limit` pages if `depth` > 0."""
    namespaces = list(islice(_listing(store, "namespaces"), limit))
    if not depth:
        return [(row, ()) for row in namespaces]
    return [
        (row, tree_of(islice(_listing(store, "pages", _raw(row["id"])), limit)))
        for row in namespaces
    ]


def print_forest(forest: Sequence[tuple[Row, Sequence[Node]]], *, depth: int = 0) -> None:
    """A table of the namespaces, then the runs of each."""
    _print_rows([row for row, _ in forest])
    for row, nodes in forest:
        if nodes:
            print(f"\n{row['model']} {_hex(row['id'])}")
            print("\n".join(lines_of(nodes, depth=depth)))


def _raw(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value


def _hex(value: object) -> str:
    return _raw(value).hex()


def _list_of(what: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        with open_store(arguments) as store:
            _print_list(arguments, list(islice(_listing(store, what), arguments.limit)))
        return 0

    return run


def _pages(arguments: argparse.Namespace) -> int:
    with open_store(arguments) as store:
        wanted = [_raw(row[0]) for row in namespaces_of(store, arguments.namespace)]
        rows = [
            {"namespace": each, **row}
            for each in wanted
            for row in islice(_listing(store, "pages", each), arguments.limit)
        ]
    _print_list(arguments, rows[: arguments.limit])
    return 0


def _leases(arguments: argparse.Namespace) -> int:
    # A daemon is reached on its own machine only, where all processes share its clock.
    now_s = MonotonicClock().now()
    with open_store(arguments) as store:
        rows = [
            {**row, "left_s": _seconds(row["expires_s"]) - now_s}
            for row in islice(_listing(store, "leases"), arguments.limit)
        ]
    _print_list(arguments, rows)
    return 0


def _seconds(value: object) -> float:
    assert isinstance(value, float)
    return value


def _print_list(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    if arguments.json:
        print_json({"rows": rows})
    else:
        _print_rows(rows)


def _print_rows(rows: Sequence[Row]) -> None:
    if rows:
        print_table(list(rows[0]), [[_cell(row[name]) for name in rows[0]] for row in rows])
    else:
        say("none")


def _cell(value: object) -> object:
    if isinstance(value, Mapping):
        return " ".join(f"{name}:{count}" for name, count in value.items())
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


def _limit(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} rows; at least 1")
    return number


def _depth(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} levels; at least 0")
    return number


def _add_count(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--count", type=int, default=10, metavar="N", help="pings to send")


def _add_limit(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--limit", type=_limit, default=ROWS_SHOWN, metavar="N", help="most rows to show"
    )


def _add_depth(parser: argparse.ArgumentParser) -> None:
    _add_limit(parser)
    parser.add_argument(
        "--depth", type=_depth, default=0, metavar="N", help="levels of runs to show; 0: namespaces"
    )


def _add_namespace(parser: argparse.ArgumentParser) -> None:
    _add_limit(parser)
    add_namespace(parser)


COMMANDS: Final = (
    Command(
        words=("ping",),
        help="Ask a daemon for a sign of life and time the round trip.",
        example="nexuskv ping --url unix:///tmp/nexuskv.sock --count 100",
        units="Microseconds, the median of all pings (seconds in JSON).",
        run=_ping,
        arguments=_add_count,
    ),
    Command(
        words=("status",),
        help="Show a daemon's tiers, worker, recovery, sessions and counters.",
        example="nexuskv status --url unix:///tmp/nexuskv.sock",
        units="Names that end in bytes are bytes, in _s seconds; all others are counts.",
        run=_status,
        arguments=add_url,
    ),
    Command(
        words=("tree",),
        help="Show the tiers and the namespaces: pages, bytes, hits, residency, runs.",
        example="nexuskv tree --depth 3 --limit 10000",
        units="Counts of pages; residency in bytes a tier, where a page in two counts in both. "
        "One line of a tree is a run of pages without a branch. "
        "asked and hits: pages of all matches and of the first acquire of each lease.",
        run=_tree,
        arguments=_add_depth,
    ),
    Command(
        words=("page", "ls"),
        help="List pages with key, parent and place.",
        example="nexuskv page ls --namespace 3f --limit 20",
        units="Keys and ids in hexadecimal.",
        run=_pages,
        arguments=_add_namespace,
    ),
    Command(
        words=("lease", "ls"),
        help="List leases: who may read which number of pages for how long.",
        example="nexuskv lease ls --limit 20",
        units="left_s is in seconds from now, expires_s since the daemon's machine started.",
        run=_leases,
        arguments=_add_limit,
    ),
    Command(
        words=("session", "ls"),
        help="List open sessions.",
        example="nexuskv session ls",
        units="Names that end in bytes are bytes.",
        run=_list_of("sessions"),
        arguments=_add_limit,
    ),
    Command(
        words=("chunk", "ls"),
        help="List the chunks of host memory and what their slots are used for.",
        example="nexuskv chunk ls --limit 20",
        units="Slot sizes in bytes; used, writing and quarantined are counts of slots.",
        run=_list_of("chunks"),
        arguments=_add_limit,
    ),
)
