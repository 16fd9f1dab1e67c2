"""`nexuskv verify`: every page is read where it lies and checked; bad ones are dropped."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from nexuskv.config import format_size
from nexuskv.tools.commands.command import Command, add_url
from nexuskv.tools.commands.finding import add_namespace, namespaces_of, open_store
from nexuskv.tools.output import print_json, print_table, say
from nexuskv.tools.pace import Pace, parse_rate
from nexuskv.tools.progress import Progress
from nexuskv.tools.scrub import TIERS, Tally, scrub

_COLUMNS: Final = ("tier", "pages", "bytes", "good", "corrupt", "gone", "unreadable")


def _verify(arguments: argparse.Namespace) -> int:
    pace = Pace(parse_rate(arguments.rate) if arguments.rate else 0)
    tiers = TIERS if arguments.tier == "all" else (arguments.tier,)
    with open_store(arguments) as store:
        rows = namespaces_of(store, arguments.namespace)
        total = sum(row[2] for row in rows if isinstance(row[2], int))
        bar = Progress("verify")

        def show(seen: int, tallies: Sequence[Tally]) -> None:
            bar.show(seen / max(total, 1), _words(tallies))

        names = [row[0] for row in rows if isinstance(row[0], bytes)]
        found = scrub(store, names, tiers=tiers, pace=pace, progress=show)
        bar.show(1.0, _words(found))
        bar.close()
    if arguments.json:
        print_json({"tiers": [asdict(tally) for tally in found]})
    else:
        print_table(_COLUMNS, [[getattr(tally, name) for name in _COLUMNS] for tally in found])
    bad = sum(tally.bad for tally in found)
    if bad:
        say(f"{bad} bad pages: corrupt ones were dropped, unreadable ones stay until they are read")
    return 1 if bad else 0


def _words(tallies: Sequence[Tally]) -> str:
    pages = sum(tally.pages for tally in tallies)
    size = format_size(sum(tally.bytes for tally in tallies))
    return f"{pages} pages, {size} read, {sum(tally.bad for tally in tallies)} bad"


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    add_namespace(parser)
    parser.add_argument(
        "--tier", choices=(*TIERS, "all"), default="all", help="where to read (default all)"
    )
    parser.add_argument(
        "--rate", default="", metavar="SIZE/s", help="read no faster, such as 200MiB/s"
    )


COMMANDS: Final = (
    Command(
        words=("verify",),
        help="Read every page where it lies, check it and drop it if it is bad; fails if any is.",
        example="nexuskv verify --tier ssd --rate 200MiB/s",
        units="Counts of pages; bytes of pages that were read. gone: left the tier before their "
        "turn, which is no fault.",
        run=_verify,
        arguments=_arguments,
    ),
)
