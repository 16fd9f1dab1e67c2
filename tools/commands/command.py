"""What a command is, and the arguments that several share."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from nexuskv.config import Config, LoadedConfig, format_size, load_config, setting_of

SETTING_GROUPS: Final = {
    "url": "Where things are",
    "host_memory": "Host tier",
    "ssd_dir": "SSD tier",
    "worker_queue_max": "Worker",
    "sessions_max": "Bounds of the control plane",
    "connect_timeout_s": "Clients: read by the process that connects, without effect on a daemon",
    "adapter_miss_s": "Engine adapters: read by the engine, without effect on a daemon",
}
"""The first setting of each group of `Config` → the group's title."""


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
    """`--url` or `--name`, and `--tenant`: which daemon, and for whom."""
    parser.add_argument("--url", help="daemon address: unix:///path or tcp://host:port")
    parser.add_argument("--name", help="the local instance of this name, where --url is not given")
    parser.add_argument("--tenant", help="tenant to ask as; it filters nothing that is shown")


def which_daemon(arguments: argparse.Namespace) -> Config:
    """The configuration of a command that talks to a daemon; see `add_url`.

    Raises:
        ConfigError: as `settings_of`.
    """
    if arguments.name and arguments.url is None:
        # Whoever names an instance means it, whatever address the environment or a file has.
        arguments.url = ""
    return settings_of(arguments).config


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Every setting as a flag: `host_memory` is `--host-memory`."""
    add = parser.add_argument
    for spec in fields(Config):
        if spec.name in SETTING_GROUPS:
            add = parser.add_argument_group(SETTING_GROUPS[spec.name]).add_argument
        flag = "--" + spec.name.replace("_", "-")
        setting = setting_of(spec.name)
        if spec.type is bool:
            add(flag, action=argparse.BooleanOptionalAction, default=None, help=setting.help)
        else:
            metavar = {"size": "SIZE", "s": "SECONDS", "count": "N"}.get(setting.unit, "TEXT")
            usual = shown(spec.name, spec.default)
            usual = f" (default {usual})" if spec.default != "" else ""
            add(flag, metavar=metavar, help=f"{setting.help}{usual}")


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
