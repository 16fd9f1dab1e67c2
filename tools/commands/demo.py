"""`nexuskv demo`: shows the store at work on real requests, and says what the numbers mean."""

import argparse
import math
from typing import TYPE_CHECKING, Final

from nexuskv.config import format_size
from nexuskv.errors import ConfigError
from nexuskv.tools.commands.command import Command
from nexuskv.tools.output import print_json, print_table, say
from nexuskv.tools.replay import PAGE_TOKENS

if TYPE_CHECKING:
    from nexuskv.tools.demo import Outcome

SECONDS: Final = 90.0
_RUNS_SHOWN: Final = 20_000


def _demo(arguments: argparse.Namespace) -> int:
    from nexuskv.tools import demo
    from nexuskv.tools.commands.look import forest_of, print_forest
    from nexuskv.tools.daemon_process import interrupt_on_sigterm

    seconds = arguments.seconds
    if not (0 < seconds < math.inf):
        raise ConfigError(f"--seconds is {seconds}, must be positive")
    interrupt_on_sigterm()
    with demo.running(seconds=seconds) as (outcome, store):
        if arguments.json:
            print_json({**outcome.as_json(), "stats": store.stats()})
        else:
            _print(outcome)
            print()
            print_forest(forest_of(store, depth=0, limit=_RUNS_SHOWN))
    if not arguments.json:
        _explain(outcome)
    if wrong := outcome.tally.wrong + outcome.restart.wrong:
        say(f"{wrong} pages came back with other bytes than were stored")
        return 1
    return 0


def _print(outcome: "Outcome") -> None:
    tally = outcome.tally
    rows = [
        ("requests replayed", tally.requests),
        ("pages asked for", tally.pages),
        ("hit rate", f"{outcome.hit_rate:.3f}"),
        ("hit rate of a store without bounds", f"{outcome.infinite_hit_rate:.3f}"),
        ("of all hits, from disk", f"{tally.ssd_hits / max(tally.hits, 1):.3f}"),
        ("read and checked", f"{tally.get_bytes / 1e9:.2f} GB"),
        ("stored", f"{tally.put_bytes / 1e9:.2f} GB"),
        ("moved by all clients", f"{outcome.moved_bytes_per_s / 1e9:.2f} GB/s"),
        ("one get", f"{tally.get_bytes / 1e9 / max(tally.get_s, 1e-9):.2f} GB/s"),
        ("one put", f"{tally.put_bytes / 1e9 / max(tally.put_s, 1e-9):.2f} GB/s"),
        ("pages not got or not stored", tally.failed),
        ("pages with wrong bytes", tally.wrong + outcome.restart.wrong),
        ("killed; until the next daemon was ready", f"{outcome.restart.down_s:.2f} s"),
        ("pages held for the last requests then", outcome.restart.held),
        ("of those served again from memory", outcome.restart.host),
        ("of those served again from disk", outcome.restart.ssd),
    ]
    print_table(("what", "value"), [(name, str(value)) for name, value in rows])


def _explain(outcome: "Outcome") -> None:
    saved, restart = outcome.tally.hits * PAGE_TOKENS, outcome.restart
    disk = f" and {format_size(outcome.ssd_bytes)} of disk" if outcome.ssd_bytes else ""
    say(
        f"{outcome.clients} processes shared one store of "
        f"{format_size(outcome.host_memory_bytes)} of memory{disk}. Of every 100 pages their "
        f"requests needed, {100 * outcome.hit_rate:.0f} had been computed before and were still "
        f"there: {saved} tokens that an engine need not compute again."
    )
    say(
        f"A store without bounds would have served {100 * outcome.infinite_hit_rate:.0f} of 100: "
        "the rest was asked for the first time. More --host-memory and --ssd-capacity close the "
        "gap between the two."
    )
    say(
        f"In the middle the daemon was killed (SIGKILL) and started again: of {restart.held} pages "
        f"that it held of the last requests, the next one served {restart.host} from the memory it "
        f"found and {restart.ssd} from disk."
    )
    if not outcome.ssd_bytes:
        say("There was no room for pages on disk where TMPDIR says, so there were none.")
    say(
        "Each page that was read was compared with what was stored, byte by byte; "
        f"{outcome.tally.wrong + restart.wrong} differed."
    )


def _add_seconds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="N", help="longest replay (default 90)"
    )


COMMANDS: Final = (
    Command(
        words=("demo",),
        help="Replay a real request trace through a daemon of its own, kill it in the middle, and "
        "check every byte.",
        example="nexuskv demo --seconds 30",
        units="GB are 10^9 bytes; hit rates are shares of all pages asked for.",
        run=_demo,
        arguments=_add_seconds,
    ),
)
