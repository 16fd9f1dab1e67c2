"""A folder's fingerprint follows its content."""

from pathlib import Path

import pytest

from nexuskv.adapters.vllm.fingerprint import (
    SAMPLE_BYTES,
    folder_fingerprint,
    folder_signature,
    is_commit,
)
from nexuskv.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(10 * SAMPLE_BYTES))
    return folder


def change_byte(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("at", [0, 5 * SAMPLE_BYTES, 10 * SAMPLE_BYTES - 1])
def test_changed_weights_have_another_fingerprint(checkpoint: Path, at: int) -> None:
    before = folder_fingerprint(checkpoint)
    change_byte(checkpoint / "model.safetensors", at)
    assert folder_fingerprint(checkpoint) != before


def test_renamed_file_makes_another_fingerprint(checkpoint: Path) -> None:
    before = folder_fingerprint(checkpoint)
    (checkpoint / "config.json").rename(checkpoint / "config2.json")
    assert folder_fingerprint(checkpoint) != before


def test_copy_elsewhere_has_the_same_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in checkpoint.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert folder_fingerprint(copy) == folder_fingerprint(checkpoint)


def test_hidden_files_do_not_count(checkpoint: Path) -> None:
    before = folder_fingerprint(checkpoint)
    (checkpoint / ".lock").write_text("x")
    assert folder_fingerprint(checkpoint) == before


def test_hub_snapshot_is_its_commit(tmp_path: Path) -> None:
    assert folder_fingerprint(tmp_path / "snapshots" / COMMIT) == f"commit:{COMMIT}"


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_folder_without_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="0 files"):
        folder_fingerprint(tmp_path / name)


def test_signature_changes_when_a_file_is_rewritten(checkpoint: Path) -> None:
    before = folder_signature(checkpoint)
    (checkpoint / "config.json").write_text("{ }")
    assert folder_signature(checkpoint) != before


@pytest.mark.parametrize(("text", "expected"), [(COMMIT, True), ("main", False), ("", False)])
def test_only_a_full_commit_id_names_content(text: str, expected: bool) -> None:
    assert is_commit(text) is expected
