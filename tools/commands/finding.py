"""Opening the daemon that a command means, and finding namespaces by the start of their ids."""

import argparse
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nexuskv.errors import ConfigError, DaemonUnreachable
from nexuskv.tools.commands.command import which_daemon

if TYPE_CHECKING:
    from nexuskv.client.store import Store


def open_store(arguments: argparse.Namespace) -> "Store":
    """The store of the daemon that the arguments name; see `add_url`.

    Raises:
        DaemonUnreachable: nothing answers there.
        ConfigError: as `which_daemon`.
    """
    from nexuskv import connect

    # The one line that a command ends with says it; the library's warnings are for engines' logs.
    logging.getLogger("nexuskv.client").addHandler(logging.NullHandler())
    store = connect(config=which_daemon(arguments))
    if not store.connected:
        store.close()
        raise DaemonUnreachable(f"no daemon answers at {store.url}")
    return store


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """`--namespace`: one namespace instead of all."""
    parser.add_argument(
        "--namespace", default="", metavar="HEX", help="start of a namespace's id; default: all"
    )


def namespaces_of(store: "Store", start: str) -> Sequence[list[object]]:
    """Rows of the one namespace whose id starts with `start`, in hex; of all when it is empty.

    Raises:
        ConfigError: none or several start so.
    """
    rows = list(store.inspect("namespaces"))
    if not start:
        return rows
    found = [row for row in rows if _id(row).hex().startswith(start.lower())]
    if not found:
        raise ConfigError(f"no namespace's id starts with {start!r}")
    if len(found) > 1:
        raise ConfigError(
            f"the ids of {len(found)} namespaces start with {start!r}: give more of it"
        )
    return found


def _id(row: Sequence[object]) -> bytes:
    raw = row[0]
    assert isinstance(raw, bytes)
    return raw
