# The part of msgpack that NexusKV calls; the package ships no types of its own.
# What is unpacked came from a peer, so it is `Any` until it has been checked.
from typing import Any

from typing_extensions import Buffer

class UnpackException(Exception): ...
class ExtraData(ValueError): ...
class FormatError(ValueError, UnpackException): ...
class StackError(ValueError, UnpackException): ...
class OutOfData(UnpackException): ...

def packb(o: object, *, use_bin_type: bool = ...) -> bytes: ...
def unpackb(
    packed: Buffer,
    *,
    raw: bool = ...,
    use_list: bool = ...,
    strict_map_key: bool = ...,
    max_str_len: int = ...,
    max_bin_len: int = ...,
    max_array_len: int = ...,
    max_map_len: int = ...,
    max_ext_len: int = ...,
) -> Any: ...
