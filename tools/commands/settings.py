"""`nexuskv config show`: each setting and where it came from. Opens nothing."""

import argparse
from dataclasses import fields
from typing import Final

from nexuskv.config import Config, setting_of
from nexuskv.tools.commands.command import Command, add_settings, settings_of, shown
from nexuskv.tools.output import print_json, print_table


def _show(arguments: argparse.Namespace) -> int:
    loaded = settings_of(arguments)
    sources = [(spec.name, loaded.sources[spec.name]) for spec in fields(Config)]
    if arguments.json:
        rows = [
            {
                "name": name,
                "value": getattr(loaded.config, name),
                "source": source,
                "unit": setting_of(name).unit,
                "help": setting_of(name).help,
            }
            for name, source in sources
        ]
        print_json({"settings": rows})
    else:
        print_table(
            ("setting", "value", "source"),
            [(name, shown(name, getattr(loaded.config, name)), where) for name, where in sources],
        )
    return 0


COMMANDS: Final = (
    Command(
        words=("config", "show"),
        help="Show each setting and where its value came from: default, file, environment or flag.",
        example="nexuskv config show --host-memory 16GiB",
        units="Sizes in powers of 1024 (bytes in JSON), durations in seconds.",
        run=_show,
        arguments=add_settings,
    ),
)
