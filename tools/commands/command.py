"""What a command is, and the arguments that several share."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from nexuskv.config import Config, LoadedConfig, format_size, load_config, setting_of


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """Most commands have none of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of the command line.

    `help` is one sentence, `example` runs as it stands, `units` says what printed numbers mean.
    `run` returns the exit status; it raises `NexusError` for anything that went wrong.
    """

    words: tuple[str, ...]  # ("page", "ls")
    help: str
    example: str
    units: str
    run: Callable[[argparse.Namespace], int]
    arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
    json: bool = True
    hidden: bool = False  # works, but is in no list


def add_url(parser: argparse.ArgumentParser) -> None:
    """`--url` and `--tenant`: which daemon, and for whom."""
    parser.add_argument("--url", help=f"{setting_of('url').help} (or NEXUSKV_URL)")
    parser.add_argument("--tenant", help=setting_of("tenant").help)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Every setting as a flag: `host_memory` is `--host-memory`."""
    for spec in fields(Config):
        flag = "--" + spec.name.replace("_", "-")
        setting = setting_of(spec.name)
        if spec.type is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=None, help=setting.help
            )
        else:
            metavar = {"size": "SIZE", "s": "SECONDS", "count": "N"}.get(setting.unit, "TEXT")
            usual = shown(spec.name, spec.default)
            usual = f" (default {usual})" if spec.default != "" else ""
            parser.add_argument(flag, metavar=metavar, help=f"{setting.help}{usual}")


def shown(name: str, value: object) -> str:
    """A setting's value for people: `16GiB`, `5 s`, `true`, `""`."""
    unit = setting_of(name).unit
    if isinstance(value, bool):
        return str(value).lower()
    if unit == "size" and isinstance(value, int):
        return format_size(value)
    if unit == "s":
        return f"{value} s"
    return str(value) or '""'


def settings_of(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration: file, environment, then those arguments that are settings.

    Raises:
        ConfigError: an unreadable file, an unknown key or a bad value.
    """
    names = {spec.name for spec in fields(Config)}
    flags = {name: value for name, value in vars(arguments).items() if name in names}
    file = getattr(arguments, "config", None)
    return load_config(file=Path(file) if file else None, flags=flags)
