"""LoRA adapters are told apart by content, read again only when their files change."""

from pathlib import Path

import pytest

from nexuskv.adapters.vllm.spaces import LoraFingerprints
from nexuskv.errors import ConfigError


class Computed:
    """Counts fingerprints taken."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def __call__(self, folder: Path) -> str:
        self.paths.append(folder)
        return f"{(folder / 'weights').read_text()}"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in "abc"]
    for folder in made:
        folder.mkdir()
        (folder / "weights").write_text(folder.name)
    return made


def test_unchanged_adapter_is_read_once(folders: list[Path]) -> None:
    computed = Computed()
    loras = LoraFingerprints(adapters_max=2, compute=computed)
    assert [loras.of(str(folders[0])) for _ in range(3)] == ["a"] * 3
    assert computed.paths == folders[:1]


def test_changed_adapter_is_read_again(folders: list[Path]) -> None:
    loras = LoraFingerprints(adapters_max=2, compute=Computed())
    loras.of(str(folders[0]))
    (folders[0] / "weights").write_text("changed")
    assert loras.of(str(folders[0])) == "changed"


def test_only_the_warmest_adapters_are_remembered(folders: list[Path]) -> None:
    computed = Computed()
    loras = LoraFingerprints(adapters_max=2, compute=computed)
    for index in (0, 1, 0, 2, 0, 1):
        loras.of(str(folders[index]))
    assert [path.name for path in computed.paths] == ["a", "b", "c", "b"]


def test_adapter_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError):
        LoraFingerprints(adapters_max=1).of("hub/adapter")
