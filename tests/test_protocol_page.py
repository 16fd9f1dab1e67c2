"""docs/protocol.md and nexuskv/protocol.py say the same, table by table."""

import re
from pathlib import Path

import pytest

from nexuskv.protocol import (
    ERROR,
    ERROR_CLASSES,
    EVENT_SHAPES,
    EVENT_TOPIC,
    INCARNATION_BYTES,
    ITEMS_MAX,
    REPLY,
    SHAPES,
    VERSION,
    WORDS,
    AcquireState,
    Code,
    Event,
    ParentState,
    Type,
)
from nexuskv.types import DESCRIPTOR_BYTES, PageStatus

PAGE = (Path(__file__).parents[1] / "docs/protocol.md").read_text(encoding="utf-8")
FLAT = " ".join(PAGE.split())
FIELD = re.compile(r"`(\w+)` (\w+)")


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def messages() -> dict[int, tuple[str, str]]:
    """Number → name and section of each message."""
    part = PAGE.split("\n## Messages\n")[1].split("\n## ")[0]
    found = re.split(r"\n### (\d+) (\w+)\n", part)[1:]
    return {int(n): (name, text) for n, name, text in zip(*[iter(found)] * 3, strict=True)}


def fields(section: str, which: str) -> tuple[tuple[str, str], ...]:
    line = re.search(rf"^{which}: (.*(?:\n(?!\n).*)*)", section, re.MULTILINE)
    assert line, f"no {which}"
    if line[1] == "(none)":
        return ()
    parts = [FIELD.fullmatch(part.strip()) for part in " ".join(line[1].split()).split(",")]
    assert all(parts), line[1]
    return tuple((part[1], part[2]) for part in parts if part)


def test_the_page_and_the_code_have_the_same_messages() -> None:
    assert {n: name for n, (name, _) in messages().items()} == {t: t.name.lower() for t in Type}
    assert set(SHAPES) == set(Type)


@pytest.mark.parametrize("kind", Type, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("which", ["request", "reply"])
def test_a_message_has_the_same_fields_on_the_page(kind: Type, which: str) -> None:
    shape = SHAPES[kind]
    expected = shape.request if which == "request" else shape.reply
    assert fields(messages()[kind][1], which) == expected


def test_the_words_of_the_tables_are_explained() -> None:
    assert {row[0] for row in table("Words used in the tables")} == set(WORDS)


def test_every_error_code_is_on_the_page_with_the_class_it_becomes() -> None:
    rows = {(int(row[0]), row[1], row[2].split(";")[0]) for row in table("Errors")}
    assert rows == {(int(c), c.name.lower(), cls.__name__) for c, cls in ERROR_CLASSES}
    assert {code for code, _ in ERROR_CLASSES} == set(Code)


def test_every_event_is_on_the_page_with_its_body() -> None:
    rows = {(int(row[0]), row[1]): row[2] for row in table("Events")}
    assert set(rows) == {(int(e), e.name.lower()) for e in Event}
    for (number, _), body in rows.items():
        assert len(body.strip("`[]").split(",")) == len(EVENT_SHAPES[Event(number)])


@pytest.mark.parametrize("status", PageStatus, ids=lambda status: status.name)
def test_every_status_is_on_the_page(status: PageStatus) -> None:
    listed = FLAT.split("**statuses**")[1].split(". In a reply")[0]
    assert re.search(rf"\b{int(status)} {status.name.lower().replace('_', ' ')}\b", listed)


@pytest.mark.parametrize("state", AcquireState, ids=lambda state: state.name)
def test_every_state_of_an_acquire_is_on_the_page(state: AcquireState) -> None:
    listed = FLAT.split("`state`: ")[1]
    assert re.search(rf"\b{int(state)} {state.name.lower()}\b", listed)


@pytest.mark.parametrize("state", ParentState, ids=lambda state: state.name)
def test_every_parent_state_is_on_the_page(state: ParentState) -> None:
    listed = FLAT.split("`parent_state` of the first key: ")[1]
    assert re.search(rf"\b{int(state)} (the )?{state.name.lower()}\b", listed)


@pytest.mark.parametrize(
    "said",
    [
        f"protocol, version {VERSION}",
        f"type of its request plus {REPLY}",
        f"error reply has type {ERROR}",
        f"{DESCRIPTOR_BYTES} bytes a page",
        f"{INCARNATION_BYTES} random bytes",
        f"the topic `{EVENT_TOPIC.decode()}`",
        f"more than {ITEMS_MAX} items",
    ],
)
def test_the_page_says_the_codes_numbers(said: str) -> None:
    assert said in FLAT
