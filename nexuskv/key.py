"""Page keys: 8-64 opaque bytes that commit to the whole prefix up to and including a page.

All keys of a namespace have one length, so a chain travels and is matched as one joined blob.
"""

from collections.abc import Sequence
from typing import Final

from nexuskv.errors import ConfigError

KEY_BYTES_MIN: Final = 8
KEY_BYTES_MAX: Final = 64

PageKey = bytes


def check_key_bytes(key_bytes: int) -> None:
    """Check a namespace's key length in bytes.

    Raises:
        ConfigError: it is outside 8-64.
    """
    if not KEY_BYTES_MIN <= key_bytes <= KEY_BYTES_MAX:
        raise ConfigError(
            f"page keys have {KEY_BYTES_MIN}-{KEY_BYTES_MAX} bytes, got a key of {key_bytes} bytes"
        )


def join_keys(keys: Sequence[PageKey], key_bytes: int) -> bytes:
    """Join the keys of a chain, in prefix order, into one blob of `len(keys) * key_bytes` bytes.

    Raises:
        ConfigError: a key is not `key_bytes` long.
    """
    blob = b"".join(keys)
    if keys and set(map(len, keys)) != {key_bytes}:
        at, bad = next((i, k) for i, k in enumerate(keys) if len(k) != key_bytes)
        raise ConfigError(
            f"keys of this namespace have {key_bytes} bytes, key {at} has {len(bad)} bytes"
        )
    return blob


def split_keys(blob: bytes, key_bytes: int) -> list[PageKey]:
    """Cut a joined blob back into its keys; the inverse of `join_keys`."""
    return [blob[at : at + key_bytes] for at in range(0, len(blob), key_bytes)]
