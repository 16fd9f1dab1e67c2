"""Namespace records: the encoding is injective, readable again, and never crashes a reader."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexuskv.errors import ConfigError
from nexuskv.namespace import (
    FIELD_BYTES_MAX,
    PAGE_BYTES_MAX,
    PAGE_TOKENS_MAX,
    NamespaceRecord,
    namespace_id,
)
from nexuskv.types import Kind

# Surrogates and NUL too: a model's name is whatever a file system or a tokenizer hands us.
TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
NUMBER = st.integers(0, 2**63 - 1)
PLAIN: dict[str, st.SearchStrategy[object]] = {
    spec.name: TEXT if spec.type is str else NUMBER
    for spec in fields(NamespaceRecord)
    if spec.type in (str, int)
    and not spec.name.startswith(("tp_", "pp_", "cp_", "dcp_", "page_"))
    and spec.name not in ("key_bytes", "window_pages")
}
PAIRS = st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple)


@st.composite
def records(draw: st.DrawFn) -> NamespaceRecord:
    values = {name: draw(strategy) for name, strategy in PLAIN.items()}
    for axis in ("tp", "pp", "cp", "dcp"):
        values[f"{axis}_size"] = size = draw(st.integers(1, 64))
        values[f"{axis}_rank"] = draw(st.integers(0, size - 1))
    values["kind"] = kind = draw(st.sampled_from(Kind))
    values["window_pages"] = draw(st.integers(1, 2**40)) if kind is Kind.WINDOW else 0
    values["key_bytes"] = draw(st.integers(8, 64))
    values["page_tokens"] = draw(st.integers(1, PAGE_TOKENS_MAX))
    values["page_bytes"] = draw(st.integers(1, PAGE_BYTES_MAX))
    values["extra"] = draw(PAIRS)
    return NamespaceRecord(**values)  # type: ignore[arg-type]  # drawn by the fields' types


def base(**changes: object) -> NamespaceRecord:
    values: dict[str, object] = {
        "model": "m", "dtype": "bf16", "page_tokens": 16, "page_bytes": 65536,
    }  # fmt: skip
    return NamespaceRecord(**{**values, **changes})  # type: ignore[arg-type]  # by name


@given(records())
def test_a_record_is_read_back_as_it_was(record: NamespaceRecord) -> None:
    assert NamespaceRecord.decode(record.encode()) == record


@given(records(), records())
def test_records_encode_alike_only_if_they_are_equal(
    one: NamespaceRecord, two: NamespaceRecord
) -> None:
    assert (one.encode() == two.encode()) == (one == two)


DIFFERENT: dict[str, object] = {
    "tp_rank": 1, "pp_rank": 1, "cp_rank": 1, "dcp_rank": 1, "kind": Kind.STATE,
    "extra": (("a", "b"),), "key_bytes": 33, "page_tokens": 17, "page_bytes": 65537,
}  # fmt: skip


@pytest.mark.parametrize("name", [spec.name for spec in fields(NamespaceRecord)])
def test_records_that_differ_in_one_field_have_different_ids(name: str) -> None:
    wide = base(tp_size=2, pp_size=2, cp_size=2, dcp_size=2)
    if name == "window_pages":
        wide = replace(wide, kind=Kind.WINDOW, window_pages=1)
    old = getattr(wide, name)
    new = DIFFERENT.get(name, old + 1 if isinstance(old, int) else f"{old}x")
    changes: dict[str, Any] = {name: new}
    other = replace(wide, **changes)
    assert namespace_id(wide.encode()) != namespace_id(other.encode())


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"model": "ab", "weights_revision": ""}, {"model": "a", "weights_revision": "b"}),
        ({"model": "a\0"}, {"model": "a"}),
        ({"model": ""}, {"model": "\0"}),
        ({"model": "\ud800\udc00"}, {"model": "\U00010000"}),
        ({"extra": (("a", "bc"),)}, {"extra": (("ab", "c"),)}),
        ({"extra": (("a", ""), ("b", ""))}, {"extra": (("a", "b"),)}),
        ({"extra": (("a", "1"), ("a", "2"))}, {"extra": (("a", "12"),)}),
    ],
)
def test_values_that_look_alike_when_joined_stay_apart(
    one: dict[str, object], two: dict[str, object]
) -> None:
    assert base(**one).encode() != base(**two).encode()


def test_the_order_of_extra_pairs_means_nothing() -> None:
    one, two = base(extra=(("a", "1"), ("b", "2"))), base(extra=(("b", "2"), ("a", "1")))
    assert one == two
    assert one.encode() == two.encode()


@given(records(), st.data())
def test_damaged_bytes_are_refused_or_another_record(
    record: NamespaceRecord, data: st.DataObject
) -> None:
    raw = bytearray(record.encode())
    action = data.draw(st.sampled_from(["cut", "extend", "flip"]))
    at = data.draw(st.integers(0, len(raw) - 1))
    if action == "cut":
        del raw[at:]
    elif action == "extend":
        raw += data.draw(st.binary(min_size=1, max_size=20))
    else:
        raw[at] ^= data.draw(st.integers(1, 255))
    try:
        other = NamespaceRecord.decode(bytes(raw))
    except ConfigError:
        return
    assert action == "flip"
    assert other != record


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(ConfigError):
        NamespaceRecord.decode(raw)


@given(st.binary(max_size=400))
def test_random_bytes_of_the_right_version_are_refused(raw: bytes) -> None:
    with pytest.raises(ConfigError):
        NamespaceRecord.decode(b"\1" + raw)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"page_tokens": 0}, "page_tokens"),
        ({"page_tokens": 2**31}, "page_tokens"),
        ({"page_bytes": 0}, "page_bytes"),
        ({"page_bytes": 2**32}, "page_bytes"),
        ({"page_bytes": -1}, "page_bytes"),
        ({"page_bytes": True}, "page_bytes"),
        ({"page_bytes": 1.0}, "page_bytes"),
        ({"key_bytes": 7}, "8-64"),
        ({"key_bytes": 65}, "8-64"),
        ({"key_bytes": 0}, "8-64"),
        ({"tp_rank": 1}, "tp_rank"),
        ({"dcp_size": 0}, "dcp_rank"),
        ({"kind": 1}, "kind"),
        ({"kind": Kind.WINDOW}, "window_pages"),
        ({"window_pages": 1}, "window_pages"),
        ({"model": b"m"}, "model"),
        ({"model": "m" * (FIELD_BYTES_MAX + 1)}, "model"),
        ({"model": "m" * 4096, "layout": "m" * 4096, "lora": "m" * 4096, "key_seed": "m" * 4096},
         "16384"),
        ({"extra": [("a", "b")]}, "extra"),
        ({"extra": (("a",),)}, "extra"),
        ({"extra": (("a", 1),)}, "extra"),
        ({"layer_count": 2**63}, "layer_count"),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_refused_by_name(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        base(**changes)


def test_the_architecture_page_lists_the_fields_in_the_order_of_the_encoding() -> None:
    page = (Path(__file__).parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    listed = page.split("\n`tenant`, ")[1].split("\n\n")[0]
    names = re.findall(r"`(\w+)`", "`tenant`, " + listed)
    assert names == [spec.name for spec in fields(NamespaceRecord)]
