"""Fingerprints of folders on disk: which weights, which LoRA adapter, by content.

Pure functions over the file system. A fingerprint takes names, sizes and sampled content of the
files, so it costs milliseconds for a checkpoint of any size and changes when the weights do.
"""

import hashlib
import re
from pathlib import Path
from typing import Final

from nexuskv.errors import ConfigError, translating

SAMPLE_BYTES: Final = 64 * 1024
FILES_MAX: Final = 10_000
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def is_commit(text: str) -> bool:
    """Whether a revision names content (a full commit id), not a branch or a tag."""
    return _COMMIT.fullmatch(text) is not None


def folder_fingerprint(folder: Path) -> str:
    """A text that changes with the folder's content.

    A hub snapshot (`…/snapshots/COMMIT`) is its commit; other folders are hashed: per file its
    name, size and three samples (start, middle, end).

    Raises:
        ConfigError: the folder is missing, empty, unreadable or has more than `FILES_MAX` files.
    """
    if folder.parent.name == "snapshots" and is_commit(folder.name):
        return f"commit:{folder.name}"
    digest = hashlib.blake2b(digest_size=16)
    for path in _files(folder):
        name = str(path.relative_to(folder)).encode("utf-8", "surrogateescape")
        size_bytes, samples = _sample(path)
        for piece in (name, str(size_bytes).encode(), *samples):
            digest.update(len(piece).to_bytes(8, "little") + piece)
    return f"content:{digest.hexdigest()}"


def folder_signature(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and change time of every file: cheap, to know when a fingerprint is outdated.

    Raises:
        ConfigError: as for `folder_fingerprint`.
    """
    with translating({OSError: ConfigError}):
        return tuple(
            (str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in _files(folder)
        )


def _files(folder: Path) -> list[Path]:
    """Every visible file below a folder, in one order on every machine."""
    with translating({OSError: ConfigError}):
        found = sorted(
            path
            for path in folder.rglob("*")
            if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
        )
    if not found or len(found) > FILES_MAX:
        raise ConfigError(f"{folder} has {len(found)} files, a checkpoint has 1-{FILES_MAX}")
    return found


def _sample(path: Path) -> tuple[int, list[bytes]]:
    """Size of a file and its samples."""
    with translating({OSError: ConfigError}), path.open("rb") as file:
        size_bytes = file.seek(0, 2)
        samples: list[bytes] = []
        for at in sorted({0, size_bytes // 2, max(0, size_bytes - SAMPLE_BYTES)}):
            file.seek(at)
            samples.append(file.read(SAMPLE_BYTES))
        return size_bytes, samples
