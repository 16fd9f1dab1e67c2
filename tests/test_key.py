"""Page keys: 8-64 bytes, one length a namespace, joined and cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexuskv.errors import ConfigError
from nexuskv.key import check_key_bytes, join_keys, split_keys


@pytest.mark.parametrize("size", [8, 9, 32, 64])
def test_keys_of_8_to_64_bytes_are_taken(size: int) -> None:
    check_key_bytes(size)
    assert join_keys([bytes(size)] * 2, size) == bytes(2 * size)


@pytest.mark.parametrize("size", [0, 1, 7, 65, 1000])
def test_keys_of_other_lengths_are_refused_with_the_bounds(size: int) -> None:
    with pytest.raises(ConfigError, match="8-64 bytes"):
        check_key_bytes(size)
    with pytest.raises(ConfigError, match=f"{size} bytes"):
        join_keys([bytes(32), bytes(size)], 32)


def test_keys_whose_lengths_only_add_up_are_refused() -> None:
    with pytest.raises(ConfigError, match="key 0 has 31 bytes"):
        join_keys([bytes(31), bytes(33)], 32)


@given(st.integers(8, 64).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n))))
def test_splitting_undoes_joining(keys: list[bytes]) -> None:
    size = len(keys[0]) if keys else 8
    assert split_keys(join_keys(keys, size), size) == keys
