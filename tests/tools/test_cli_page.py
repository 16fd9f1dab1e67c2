"""Every command explains itself, and docs/cli.md is what they say."""

from dataclasses import fields
from pathlib import Path

import pytest

from nexuskv.config import Config
from nexuskv.tools.cli import build_parser, commands, main
from nexuskv.tools.commands.command import SETTING_GROUPS, Command
from nexuskv.tools.commands.page import actions_of, name, page

CLI_PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
SHOWN = [command for command in commands() if not command.hidden]

each_command = pytest.mark.parametrize("command", SHOWN, ids=name)


def test_the_page_is_what_the_commands_say() -> None:
    assert CLI_PAGE.read_text(encoding="utf-8") == page(commands()), (
        "run: nexuskv docs cli > docs/cli.md"
    )


@each_command
def test_a_command_has_a_section_in_the_page(command: Command) -> None:
    assert f"\n## {name(command)}\n" in CLI_PAGE.read_text(encoding="utf-8")


@each_command
def test_a_command_has_a_sentence_an_example_and_units(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.words, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert command.help.endswith(".")
    for part in (command.help, command.example, command.units):
        assert " ".join(part.split()) in shown


@each_command
def test_the_example_of_a_command_parses_and_runs_that_command(command: Command) -> None:
    words = command.example.split()
    assert words[0] == "nexuskv"
    assert build_parser().parse_args(words[1:]).run == command.run


@each_command
def test_every_flag_has_a_help(command: Command) -> None:
    assert [action.dest for action in actions_of(command) if not action.help] == []


@each_command
def test_all_but_serve_print_json_on_demand(command: Command) -> None:
    assert command.json is (command.words != ("serve",))


def test_each_group_of_settings_begins_with_a_setting() -> None:
    names = [spec.name for spec in fields(Config)]
    assert names[0] == next(iter(SETTING_GROUPS))
    assert [name for name in names if name in SETTING_GROUPS] == list(SETTING_GROUPS)
