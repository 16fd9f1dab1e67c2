"""Namespace records: everything besides the key that must be equal for bytes to be interchangeable.

The encoding is injective (each field is length-prefixed, in a fixed order, behind a version byte),
so two records that differ in any field differ in their encoding and, hashed, in their 16-byte id.
"""

import hashlib
import struct
from dataclasses import dataclass, field, fields
from typing import Final

from nexuskv.errors import ConfigError
from nexuskv.key import check_key_bytes
from nexuskv.types import Kind

ENCODING_VERSION: Final = 1
NAMESPACE_ID_BYTES: Final = 16
FIELD_BYTES_MAX: Final = 4096
RECORD_BYTES_MAX: Final = 16384
PAGE_BYTES_MAX: Final = 2**32 - 1
PAGE_TOKENS_MAX: Final = 2**31 - 1  # of any number of pages in a message, tokens stay below 2^63

_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceRecord:
    """One namespace. Order and meaning of the fields are part of the format.

    Raises:
        ConfigError: a value is outside its bounds; the message names the field and the limit.
    """

    tenant: str = "default"
    model: str
    weights_revision: str = ""  # operator-supplied, or a fingerprint of the checkpoint
    dtype: str
    quantization: str = ""
    scales: str = ""  # fingerprint of the KV scales where they change the bytes
    page_tokens: int
    page_bytes: int
    layer_first: int = 0
    layer_count: int = 0  # 0: not stated
    kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    layout: str = ""  # byte order inside a page, e.g. "LBHNC"
    interface: str = ""  # what wrote it, e.g. "vllm-connector-v1"
    key_scheme: str = ""  # hash algorithm of the keys
    key_seed: str = ""
    key_bytes: int = 32  # length of every page key here
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0  # prefill context parallelism
    cp_size: int = 1
    dcp_rank: int = 0  # decode context parallelism
    dcp_size: int = 1
    group_index: int = 0  # KV cache group of the engine
    kind: Kind = Kind.ATTENTION
    window_pages: int = 0  # pages a hit needs before its end; kind WINDOW only
    lora: str = ""  # content fingerprint of the adapter
    extra: tuple[tuple[str, str], ...] = field(default=())  # whatever else an adapter knows

    def __post_init__(self) -> None:
        _check_values(self)
        # The pairs are a set: their order means nothing, so equal records must not differ in it.
        object.__setattr__(self, "extra", tuple(sorted(self.extra)))
        check_key_bytes(self.key_bytes)
        for name, most in (("page_tokens", PAGE_TOKENS_MAX), ("page_bytes", PAGE_BYTES_MAX)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}, at least 1 and at most {most}")
        for axis in ("tp", "pp", "cp", "dcp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ConfigError(f"{axis}_rank {rank} is not below {axis}_size {size}")
        if (self.kind is Kind.WINDOW) != (self.window_pages > 0):
            raise ConfigError(
                f"window_pages is {self.window_pages} for kind {self.kind.name.lower()}; "
                "it is positive for kind window and 0 otherwise"
            )

    def encode(self) -> bytes:
        """The injective encoding: version byte, then each field as a u32 length and its bytes."""
        parts = [bytes([ENCODING_VERSION])]
        for spec in fields(self):
            raw = _encode_value(getattr(self, spec.name))
            parts += (_LENGTH.pack(len(raw)), raw)
        return b"".join(parts)

    @classmethod
    def decode(cls, raw: bytes) -> "NamespaceRecord":
        """Read an encoding back.

        Raises:
            ConfigError: another version, cut short, trailing bytes, or values out of bounds.
        """
        if not raw or raw[0] != ENCODING_VERSION:
            raise ConfigError(f"namespace record of version {raw[:1].hex() or 'none'}, not 01")
        values: dict[str, object] = {}
        at = 1
        for spec in fields(cls):
            piece, at = _cut(raw, at, spec.name)
            values[spec.name] = _decode_value(spec.name, spec.type, piece)
        if at != len(raw):
            raise ConfigError(f"namespace record has {len(raw) - at} bytes after its last field")
        return cls(**values)  # type: ignore[arg-type]  # each value was read by its field's type


def namespace_id(encoded_record: bytes) -> bytes:
    """The 16-byte id: BLAKE2b-128 of the encoded record."""
    return hashlib.blake2b(encoded_record, digest_size=NAMESPACE_ID_BYTES).digest()


def _check_values(record: NamespaceRecord) -> None:
    """Types and sizes: a record may have been built from a peer's bytes or a user's keywords."""
    for spec in fields(record):
        value = getattr(record, spec.name)
        _check_type(spec.name, spec.type, value)
        if len(_encode_value(value)) > FIELD_BYTES_MAX:
            raise ConfigError(f"namespace field {spec.name} exceeds {FIELD_BYTES_MAX} bytes")
    if (total := len(record.encode())) > RECORD_BYTES_MAX:
        raise ConfigError(f"namespace record has {total} bytes, at most {RECORD_BYTES_MAX}")


def _check_type(name: str, wanted: object, value: object) -> None:
    if wanted is str:
        good = isinstance(value, str)
    elif wanted is int:
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    elif wanted is Kind:
        good = isinstance(value, Kind)
    else:
        good = isinstance(value, tuple) and all(
            isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(s, str) for s in pair)
            for pair in value
        )
    if not good:
        raise ConfigError(f"namespace field {name} cannot be {value!r}")


def _encode_value(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, int):
        return int(value).to_bytes(8, "little")
    assert isinstance(value, tuple)
    parts: list[bytes] = []
    for name, text in value:
        for piece in (_encode_value(name), _encode_value(text)):
            parts += (_LENGTH.pack(len(piece)), piece)
    return b"".join(parts)


def _decode_value(name: str, wanted: object, raw: bytes) -> object:
    try:
        if wanted is str:
            return raw.decode("utf-8", "surrogatepass")
        if wanted is int or wanted is Kind:
            if len(raw) != 8:
                raise ConfigError(f"namespace field {name} has {len(raw)} bytes, not 8")
            number = int.from_bytes(raw, "little")
            return Kind(number) if wanted is Kind else number
        texts: list[str] = []
        at = 0
        while at < len(raw):
            piece, at = _cut(raw, at, name)
            texts.append(piece.decode("utf-8", "surrogatepass"))
    except ConfigError:
        raise
    except ValueError as exc:
        raise ConfigError(f"namespace field {name} cannot be read: {exc}") from exc
    if len(texts) % 2:
        raise ConfigError(f"namespace field {name} has a name without a value")
    return tuple(zip(texts[::2], texts[1::2], strict=True))


def _cut(raw: bytes, at: int, name: str) -> tuple[bytes, int]:
    """One length-prefixed piece at `at` and where the next begins."""
    start = at + _LENGTH.size
    end = start + _LENGTH.unpack_from(raw, at)[0] if start <= len(raw) else len(raw) + 1
    if end > len(raw):
        raise ConfigError(f"namespace record is cut short in field {name}")
    return raw[start:end], end
