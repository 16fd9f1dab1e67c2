"""`nexuskv page get`: the bytes of one page, checked."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nexuskv.errors import ConfigError, NexusError, Unavailable
from nexuskv.namespace import NamespaceRecord
from nexuskv.tools.commands.command import Command, add_url
from nexuskv.tools.commands.finding import add_namespace, namespaces_of, open_store
from nexuskv.tools.output import print_json, say
from nexuskv.types import PageStatus

if TYPE_CHECKING:
    from nexuskv.client.store import Store


def _get(arguments: argparse.Namespace) -> int:
    key = _key(arguments.key)
    to_stdout = not arguments.out and not arguments.json
    if to_stdout and sys.stdout.isatty():
        raise ConfigError("a page is no text: give --out FILE, or pipe the output")
    with open_store(arguments) as store:
        record, data = _find(store, namespaces_of(store, arguments.namespace), key)
    if arguments.out:
        _write(Path(arguments.out), data)
    if to_stdout:
        sys.stdout.buffer.write(data)
    if arguments.json:
        print_json({"key": key, "model": record.model, "tenant": record.tenant, "bytes": len(data)})
    return 0


def _key(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as exc:
        raise ConfigError(f"a key is hexadecimal, got {text!r}") from exc


def _write(path: Path, data: bytearray) -> None:
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc}") from exc


def _find(
    store: "Store", rows: Sequence[Sequence[object]], key: bytes
) -> tuple[NamespaceRecord, bytearray]:
    """The page, from the first of the namespaces that has it."""
    unreadable = ""
    for record in _records(rows, key):
        data = bytearray(record.page_bytes)
        status = _read(store, record, key, data)
        if status is PageStatus.HIT:
            return record, data
        if status is not PageStatus.MISS:
            say(f"{record.model!r} of tenant {record.tenant!r}: {status.name.lower()}")
            unreadable = status.name.lower()
    if unreadable == PageStatus.UNAVAILABLE.name.lower():
        raise Unavailable(f"page {key.hex()} could not be read")
    raise NexusError(f"page {key.hex()} is {unreadable or 'not held'}")


def _records(rows: Sequence[Sequence[object]], key: bytes) -> Iterator[NamespaceRecord]:
    for row in rows:
        assert isinstance(row[1], bytes)
        record = NamespaceRecord.decode(row[1])
        if record.key_bytes == len(key):
            yield record


def _read(store: "Store", record: NamespaceRecord, key: bytes, into: bytearray) -> PageStatus:
    """Get one page as the tenant that it is of: whoever may map the segments may read them all."""
    from nexuskv import connect

    if record.tenant == store.config.tenant:
        (status,) = store.open(record).get([key], into=[into])
        return status
    config = replace(store.config, tenant=record.tenant)
    with connect(store.url, config) as other:
        (status,) = other.open(record).get([key], into=[into])
        return status


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", help="the page's key, in hexadecimal")
    add_url(parser)
    add_namespace(parser)
    parser.add_argument(
        "--out", default="", metavar="FILE", help="write there; else to stdout when it is piped"
    )


COMMANDS: Final = (
    Command(
        words=("page", "get"),
        help="Get one page from whichever tier has it, checked against its checksum.",
        example="nexuskv page get 00112233445566778899aabbccddeeff --out page.bin",
        units="The page's bytes as they were stored; with --json bytes is their number.",
        run=_get,
        arguments=_arguments,
    ),
)
