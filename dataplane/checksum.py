"""Checksums of pages: XXH3-64 of the bytes xor XXH3-64 of namespace id and key.

The second half ties the bytes to what they were committed as, so a page found under another key or
in another namespace fails its check like a damaged one.
"""

import xxhash

from nexuskv.dataplane.batch import Buffer


def hash64(data: Buffer) -> int:
    """XXH3-64 of a C-contiguous buffer."""
    return xxhash.xxh3_64_intdigest(memoryview(data))


def mix(namespace_id: bytes, key: bytes) -> int:
    """What a page's hash is xor-ed with: XXH3-64 of `namespace_id` followed by `key`."""
    return xxhash.xxh3_64_intdigest(namespace_id + key)


def page_checksum(data: Buffer, namespace_id: bytes, key: bytes) -> int:
    """The checksum a page of bytes `data` is committed under."""
    return hash64(data) ^ mix(namespace_id, key)
