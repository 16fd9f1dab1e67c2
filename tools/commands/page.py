"""docs/cli.md, made from the commands themselves."""

import argparse
from collections.abc import Sequence
from typing import TypeVar

from nexuskv.tools.commands.command import Command, add_settings

_Action = TypeVar("_Action", bound=argparse.Action)

_HEAD = """# The nexuskv command

This page is made by `nexuskv docs cli > docs/cli.md`; a test compares the two.

Data goes to stdout, words to stderr. Exit status: 0 done, 1 failed, 2 wrong usage or configuration,
3 no daemon answers, 130 interrupted. With `--json` a command prints JSON. Commands that talk to a
daemon take `--url`, else `NEXUSKV_URL`, else the socket of the instance `--name` on this machine.
"""


def page(commands: Sequence[Command]) -> str:
    """The whole page."""
    shown = [command for command in commands if not command.hidden]
    rows = [f"| [`{name(command)}`](#{_anchor(command)}) | {command.help} |" for command in shown]
    table = ["| command | what it does |", "|---|---|", *rows, ""]
    return "\n".join([_HEAD, *table, *[_section(command) for command in shown]])


def name(command: Command) -> str:
    """What a user types: `nexuskv page ls`."""
    return " ".join(("nexuskv", *command.words))


def _anchor(command: Command) -> str:
    return name(command).replace(" ", "-")


def _section(command: Command) -> str:
    lines = [f"## {name(command)}", "", command.help, "", "```console", f"$ {command.example}"]
    lines += ["```", "", f"Units: {command.units}", ""]
    options = [_option(action) for action in actions_of(command)]
    if command.words != ("serve",) and command.arguments is add_settings:
        lines += ["Flags: every setting, as in [`nexuskv serve`](#nexuskv-serve).", ""]
    elif options:
        lines += ["| flag | meaning |", "|---|---|", *options, ""]
    return "\n".join(lines)


class _Recorder(argparse.ArgumentParser):
    """A parser that remembers what was added to it."""

    def __init__(self) -> None:
        self.added: list[argparse.Action] = []
        super().__init__(add_help=False)

    def _add_action(self, action: _Action) -> _Action:
        self.added.append(action)
        return super()._add_action(action)


def actions_of(command: Command) -> Sequence[argparse.Action]:
    """The arguments of a command, without those that all have."""
    recorder = _Recorder()
    command.arguments(recorder)
    return recorder.added


def _option(action: argparse.Action) -> str:
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    takes_value = action.nargs != 0
    value = f" {action.metavar or action.dest.upper()}" if takes_value else ""
    return f"| {flags}{value} | {(action.help or '').replace('|', '/')} |"
