"""docs/cli.md, made from the commands themselves."""

import argparse
from collections.abc import Mapping, Sequence

from nexuskv.tools.commands.command import SETTING_GROUPS, Command, add_settings

_HEAD = """# The nexuskv command

This page is made by `nexuskv docs cli > docs/cli.md`; a test compares the two.

Data goes to stdout, words to stderr. Exit status: 0 done, 1 failed, 2 wrong usage or configuration,
3 no daemon answers, 130 interrupted (Ctrl-C on `serve` is a clean stop: 0).

Every command takes `--config FILE`; all but `serve` take `--json`. A list without rows says "none"
on stderr. Commands that talk to a daemon find it by `--url`, else `--name` (the local instance of
that name), else the setting `url` (`NEXUSKV_URL`, or a file), else the setting `name`. `--tenant`
says for whom the command asks; it filters nothing.
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
    actions = actions_of(command)
    if command.words != ("serve",) and command.arguments is add_settings:
        lines += ["Flags: every setting, as in [`nexuskv serve`](#nexuskv-serve).", ""]
    elif actions:
        lines += _tables(actions, SETTING_GROUPS if command.arguments is add_settings else {})
    return "\n".join(lines)


def _tables(actions: Sequence[argparse.Action], titles: Mapping[str, str]) -> list[str]:
    """One table, or one under each title; a title stands before the action it is filed under."""
    head = ["| flag | meaning |", "|---|---|"]
    lines = [] if titles else list(head)
    for action in actions:
        if action.dest in titles:
            lines += [*[""][: len(lines)], titles[action.dest] + ":", "", *head]
        lines.append(_option(action))
    return [*lines, ""]


class _Recorder(argparse.ArgumentParser):
    """A parser that tells what was added to it and to its groups."""

    def __init__(self) -> None:
        super().__init__(add_help=False)

    @property
    def added(self) -> Sequence[argparse.Action]:
        """Everything, in the order it was added."""
        return tuple(self._actions)


def actions_of(command: Command) -> Sequence[argparse.Action]:
    """The arguments of a command, without those that all have."""
    recorder = _Recorder()
    command.arguments(recorder)
    return recorder.added


def _option(action: argparse.Action) -> str:
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    takes_value = action.nargs != 0 and flags
    flags = flags or f"`{action.metavar or action.dest.upper()}`"
    value = f" {action.metavar or action.dest.upper()}" if takes_value else ""
    return f"| {flags}{value} | {(action.help or '').replace('|', '/')} |"
