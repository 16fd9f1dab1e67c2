"""One frozen configuration: file, then environment, then flags; every mistake names its place."""

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexuskv.config import (
    GIB,
    KIB,
    MIB,
    Config,
    default_url,
    format_size,
    load_config,
    parse_size,
    setting_of,
)
from nexuskv.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "env.toml"
    path.write_text('host_memory = "2GiB"\nleases_max = 7\nlease_ttl_s = 3\nhuge_pages = true\n')
    return path


def test_without_anything_all_is_default() -> None:
    loaded = load_config(env={})
    assert loaded.config == Config()
    assert set(loaded.sources.values()) == {"default"}


def test_a_file_is_read_and_named_as_the_source(file: Path) -> None:
    loaded = load_config(file=file, env={})
    config = loaded.config
    read = (config.host_memory, config.leases_max, config.lease_ttl_s, config.huge_pages)
    assert read == (2 * GIB, 7, 3.0, True)
    assert loaded.sources["leases_max"] == f"file {file}"


def test_the_environment_beats_the_file_and_a_flag_beats_both(file: Path) -> None:
    env = {"NEXUSKV_LEASES_MAX": "8", "NEXUSKV_HOST_MEMORY": "3GiB"}
    loaded = load_config(file=file, env=env, flags={"host_memory": "4GiB", "name": None})
    assert (loaded.config.leases_max, loaded.config.host_memory) == (8, 4 * GIB)
    assert loaded.sources["leases_max"] == "env NEXUSKV_LEASES_MAX"
    assert loaded.sources["host_memory"] == "flag"
    assert loaded.sources["name"] == "default"


def test_the_environment_may_name_the_file(file: Path) -> None:
    assert load_config(env={"NEXUSKV_CONFIG": str(file)}).config.leases_max == 7


def test_variables_of_others_are_left_alone() -> None:
    assert load_config(env={"HOME": "/", "NEXUSKV_NATIVE": "require"}).config == Config()


@pytest.mark.parametrize(
    ("env", "flags", "place"),
    [
        ({"NEXUSKV_LEASE_MAX": "1"}, {}, "env NEXUSKV_LEASE_MAX"),
        ({}, {"lease_max": 1}, "flag"),
        ({"NEXUSKV_LEASES_MAX": "many"}, {}, "leases_max from env NEXUSKV_LEASES_MAX"),
        ({"NEXUSKV_LEASES_MAX": "0"}, {}, "leases_max from env NEXUSKV_LEASES_MAX"),
        ({"NEXUSKV_LEASES_MAX": "1.5"}, {}, "leases_max from env"),
        ({"NEXUSKV_HUGE_PAGES": "perhaps"}, {}, "huge_pages from env"),
        ({}, {"host_memory": "16 apples"}, "host_memory from flag"),
        ({}, {"host_memory": "1KiB"}, "host_memory from flag"),
        ({}, {"host_memory": "99999999999TiB"}, "host_memory from flag"),
        ({}, {"lease_ttl_s": "nan"}, "lease_ttl_s from flag"),
        ({}, {"lease_ttl_s": "inf"}, "lease_ttl_s from flag"),
        ({}, {"lease_ttl_s": float("inf")}, "lease_ttl_s from flag"),
        ({}, {"lease_ttl_s": 10**400}, "lease_ttl_s from flag"),
        ({}, {"lease_ttl_s": "-1"}, "lease_ttl_s from flag"),
        ({}, {"events_backlog_max": 2**31}, "events_backlog_max from flag"),
        ({}, {"name": 3}, "name from flag"),
        ({}, {"leases_max": True}, "leases_max from flag"),
        ({}, {"leases_max": 2.0}, "leases_max from flag"),
        ({}, {"huge_pages": 1}, "huge_pages from flag"),
    ],
)
def test_a_mistake_is_one_error_that_names_the_place(
    env: dict[str, str], flags: dict[str, object], place: str
) -> None:
    with pytest.raises(ConfigError, match=place):
        load_config(env=env, flags=flags)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("leases_max = 'x'", "leases_max from file"),
        ("nonsense = 1", "'nonsense' from file"),
        ("[section]\nleases_max = 1", "'section' from file"),
        ("leases_max = ", "cannot read configuration"),
        ("leases_max = 1979-05-27", "leases_max from file"),
        ("\xff", "cannot read configuration"),
    ],
)
def test_a_mistake_in_the_file_names_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "nexuskv.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(file=path, env={})
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read configuration"):
        load_config(file=tmp_path / "none.toml", env={})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"host_memory": 2 * MIB, "chunk_bytes": 4 * MIB}, "chunk_bytes"),
        ({"chunk_bytes": MIB + 1}, "4096"),
        ({"backoff_min_s": 9.0}, "backoff_max_s"),
        ({"name": "../x"}, "name"),
        ({"name": ""}, "name"),
        ({"name": ".."}, "name"),
        ({"name": "a\0b"}, "name"),
    ],
)
def test_settings_that_contradict_are_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(env={}, flags=flags)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("4096", 4096), ("64KiB", 64 * KIB), ("64kib", 64 * KIB), ("1 MiB", MIB),
        ("16GiB", 16 * GIB), ("2TiB", 2048 * GIB), ("1.5MiB", 1536 * KIB), ("8K", 8 * KIB),
        ("8KB", 8 * KIB), ("7B", 7), (" 5 ", 5), ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_sizes_are_read_exactly(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "KiB", "1.5", "-1", "1e3", "1 PiB", "0x10", "1,5MiB", "\uff11", "1\u212a"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_a_clear_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ConfigError:
        return
    assert size >= 0


@given(st.integers(0, 10).flatmap(lambda power: st.integers(0, 9).map(lambda n: n << 4 * power)))
def test_a_shown_size_is_read_back(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size // 1000


@pytest.mark.parametrize("name", [spec.name for spec in fields(Config)])
def test_every_setting_is_explained_and_its_default_is_in_bounds(name: str) -> None:
    setting = setting_of(name)
    assert setting.help
    assert setting.unit in {"", "size", "s", "count"}
    load_config(env={}, flags={name: getattr(Config(), name)})


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().name = "other"  # type: ignore[misc]  # the point of the test


def test_the_default_address_is_the_users_and_the_instances_own() -> None:
    url = default_url(load_config(env={}, flags={"name": "two"}).config)
    assert url == f"unix:///dev/shm/nexuskv-{os.getuid()}/two/daemon.sock"


def test_importing_the_package_does_nothing_else() -> None:
    script = (
        "import sys, threading\n"
        "import nexuskv\n"
        "heavy = {'torch', 'zmq', 'numpy', 'msgpack', 'nexuskv.client'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
