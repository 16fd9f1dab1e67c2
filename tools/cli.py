"""The `nexuskv` command: joins the commands, runs one, turns errors into an exit status.

0 done · 1 failed · 2 wrong usage or configuration · 3 no daemon answers · 130 interrupted. Data
goes to stdout, words to stderr. Only the command that is run imports what it needs.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final

from nexuskv import __version__
from nexuskv.errors import ConfigError, NexusError, Unavailable
from nexuskv.tools.commands import bench, demo, look, page, page_get, settings, verify
from nexuskv.tools.commands.command import Command, add_settings, settings_of
from nexuskv.tools.output import say

OK: Final = 0
FAILED: Final = 1
WRONG_USAGE: Final = 2
NO_DAEMON: Final = 3
INTERRUPTED: Final = 130

SUMMARY: Final = "A store for the KV caches of LLM inference engines: its daemon, and its tools."
_GROUPS: Final = {
    "config": "Show the configuration.",
    "page": "Look at pages.",
    "lease": "Look at leases.",
    "chunk": "Look at chunks of host memory.",
    "session": "Look at sessions.",
    "bench": "Measure this machine beside its limits.",
    "docs": "Print generated documentation.",
}


def _serve(arguments: argparse.Namespace) -> int:
    from nexuskv.serve import serve

    serve(settings_of(arguments).config)
    return OK


def _page(_: argparse.Namespace) -> int:
    sys.stdout.write(page.page(commands()))
    return OK


def commands() -> tuple[Command, ...]:
    """Every command, in the order of the help."""
    return (
        Command(
            words=("serve",),
            help="Run a daemon in the foreground until SIGTERM or Ctrl-C.",
            example="nexuskv serve --listen unix:///tmp/nexuskv.sock --host-memory 4GiB",
            units="Sizes such as 64MiB or 16GiB in powers of 1024, durations in seconds.",
            run=_serve,
            arguments=add_settings,
            json=False,
        ),
        *look.COMMANDS,
        *page_get.COMMANDS,
        *verify.COMMANDS,
        *settings.COMMANDS,
        *bench.COMMANDS,
        *demo.COMMANDS,
        Command(
            words=("docs", "cli"),
            help="Print docs/cli.md, the list of all commands.",
            example="nexuskv docs cli > docs/cli.md",
            units="None.",
            run=_page,
            json=False,
            hidden=True,
        ),
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="nexuskv", description=SUMMARY, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"nexuskv {__version__}")
    nouns = parser.add_subparsers(metavar="COMMAND", required=True)
    groups = {"": nouns}
    for command in commands():
        noun = " ".join(command.words[:-1])
        if noun not in groups:
            # A group without a help is in no list.
            group = (
                nouns.add_parser(noun, description=_GROUPS[noun])
                if command.hidden
                else nouns.add_parser(noun, description=_GROUPS[noun], help=_GROUPS[noun])
            )
            groups[noun] = group.add_subparsers(metavar="COMMAND", required=True)
        _fill(
            groups[noun].add_parser(
                command.words[-1],
                help=command.help,
                description=command.help,
                epilog=f"Example:\n  {command.example}\n\nUnits: {command.units}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            ),
            command,
        )
    return parser


def _fill(parser: argparse.ArgumentParser, command: Command) -> None:
    command.arguments(parser)
    if command.json:
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.set_defaults(run=command.run)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has enough. Python flushes stdout again at exit: give it a sink.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except NexusError as exc:
        say(str(exc))
        return _status_of(exc)
    except Exception:
        logging.getLogger("nexuskv.tools").exception("a defect of this command")
        return FAILED
    return status


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as exc:  # argparse: help, version, wrong usage
        return exc.code if isinstance(exc.code, int) else WRONG_USAGE
    status: int = arguments.run(arguments)
    return status


def _status_of(error: NexusError) -> int:
    if isinstance(error, ConfigError):
        return WRONG_USAGE
    return NO_DAEMON if isinstance(error, Unavailable) else FAILED


if __name__ == "__main__":
    sys.exit(main())
