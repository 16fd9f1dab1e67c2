import pytest

from nexuskv.tools.replay import KEY_BYTES, PAGE_BYTES, PageBytes, infinite_hits, key_of


def _page(key: bytes) -> bytearray:
    return bytearray(b"".join(PageBytes().parts(key)))


def test_a_page_has_its_full_size() -> None:
    assert len(_page(key_of(1))) == PAGE_BYTES


def test_a_key_has_the_length_that_the_namespace_states() -> None:
    assert len(key_of(1)) == KEY_BYTES


def test_a_page_equals_itself() -> None:
    assert PageBytes().equal(key_of(7), _page(key_of(7)))


@pytest.mark.parametrize("at", [0, 63, 64, PAGE_BYTES // 2, PAGE_BYTES - 1])
def test_one_changed_byte_is_found(at: int) -> None:
    page = _page(key_of(7))
    page[at] ^= 1
    assert not PageBytes().equal(key_of(7), page)


def test_another_keys_page_is_found() -> None:
    assert not PageBytes().equal(key_of(7), _page(key_of(8)))


@pytest.mark.parametrize(
    ("chains", "hits"),
    [
        ([], 0),
        ([(1, 2, 3)], 0),
        ([(1, 2, 3), (1, 2, 3)], 3),
        ([(1, 2, 3), (1, 9, 3)], 1),
        ([(1, 2), (9, 2), (9, 2, 4)], 2),
    ],
)
def test_a_store_without_bounds_serves_leading_runs(
    chains: list[tuple[int, ...]], hits: int
) -> None:
    assert infinite_hits(chains) == hits
