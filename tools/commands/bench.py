"""`nexuskv bench TOPIC`: runs one benchmark and prints its rows beside their limits."""

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from nexuskv.tools.commands.command import Command
from nexuskv.tools.output import print_json, print_table, say

Rows = Callable[[bool], Sequence[Mapping[str, object]]]

TOPICS: Final = {
    "shm": (
        "Measure get, put and view through shared memory beside bare copies of the same bytes.",
        "GB/s are 10^9 bytes a second; busy rows are seconds a batch.",
    ),
    "copying": (
        "Measure the native copy-and-hash alone beside a plain memcpy of the same bytes.",
        "GB/s are 10^9 bytes a second; busy rows are seconds a batch.",
    ),
    "control": (
        "Measure match and acquire round trips beside bare echoes of the same bytes.",
        "Seconds, medians; p50 and p99 are in the JSON.",
    ),
    "index": (
        "Measure the prefix index alone: match, put, evict, memory and stalls.",
        "Seconds and bytes a page.",
    ),
    "ssd": (
        "Measure cold gets beside raw disk reads, puts beside copies, lookups beside a busy disk.",
        "GB/s are 10^9 bytes a second; bytes written are those a byte of pages costs.",
    ),
    "restart": (
        "Measure how long a daemon takes to serve what it held before it was killed.",
        "Seconds from its start to a hit of every page of every chain that is asked for.",
    ),
    "start": (
        "Measure how long a daemon takes to answer, and an import.",
        "Seconds.",
    ),
    "hitrate": (
        "Replay the request traces through the index and compare hit rates with an exact LRU.",
        "Hit rates are shares of all pages asked for.",
    ),
}


def _bench(topic: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        from nexuskv.tools.daemon_process import interrupt_on_sigterm

        interrupt_on_sigterm()
        measure: Rows = importlib.import_module(f"nexuskv.tools.bench.{topic}").rows
        return show(topic, measure(arguments.quick), as_json=arguments.json)

    return run


def show(topic: str, rows: Sequence[Mapping[str, object]], *, as_json: bool) -> int:
    """Print a benchmark's rows; 1 when a row beats its physical limit, else 0."""
    from nexuskv.tools.bench.report import broken_limits, report

    if as_json:
        print_json(report(topic, rows))
    else:
        _print(rows)
        for each in rows:
            if each.get("note"):
                say(f"{each['name']}: {each['note']}")
    for name in (broken := broken_limits(rows)):
        say(f"{name} beats its physical limit: the limit was measured wrongly")
    return 1 if broken else 0


def _print(rows: Sequence[Mapping[str, object]]) -> None:
    names = ("name", "value", "unit", "limit", "ratio", "target")
    print_table(names, [[_float(each.get(name)) for name in names] for each in rows])


def _float(cell: object) -> object:
    return float(cell) if isinstance(cell, int) and not isinstance(cell, bool) else cell


def _add_quick(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a figure")


COMMANDS: Final = tuple(
    Command(
        words=("bench", topic),
        help=sentence,
        example=f"nexuskv bench {topic} --quick --json",
        units=f"{units} ratio is speed against the limit: higher is better.",
        run=_bench(topic),
        arguments=_add_quick,
    )
    for topic, (sentence, units) in TOPICS.items()
)
