from nexuskv.tools.tree import Node, lines_of, tree_of


def _page(key: str, parent: str = "", state: str | None = None) -> dict[str, object]:
    known = state or ("key" if parent else "root")
    return {"key": key.encode(), "parent": parent.encode(), "parent_state": known}


def _shape(nodes: list[Node]) -> list[object]:
    return sorted(
        [(n.first_key.decode(), n.page_count, _shape(n.children)) for n in nodes], key=str
    )


def test_a_chain_without_a_branch_is_one_run() -> None:
    assert _shape(tree_of([_page("a"), _page("b", "a"), _page("c", "b")])) == [("a", 3, [])]


def test_a_branch_starts_runs() -> None:
    rows = [_page("a"), _page("b", "a"), _page("c", "b"), _page("x", "b"), _page("y", "x")]
    assert _shape(tree_of(rows)) == [("a", 2, [("c", 1, []), ("x", 2, [])])]


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = [_page("a"), _page("b", "a"), _page("c", "b"), _page("x", "b")]
    assert _shape(tree_of(rows)) == _shape(tree_of(rows[::-1]))


def test_totals_count_everything_below() -> None:
    (root,) = tree_of([_page("a"), _page("b", "a"), _page("c", "a"), _page("d", "c")])
    assert (root.page_count, root.total) == (1, 4)


def test_a_page_without_its_parent_is_a_fragment() -> None:
    nodes = tree_of([_page("a"), _page("z", "gone"), _page("u", state="unknown")])
    assert {n.first_key: n.fragment for n in nodes} == {b"a": False, b"z": True, b"u": True}


def test_a_long_chain_does_not_recurse() -> None:
    rows = [_page("0"), *[_page(str(n), str(n - 1)) for n in range(1, 50_000)]]
    assert tree_of(rows)[0].page_count == 50_000


def test_lines_stop_at_the_depth_asked_for() -> None:
    rows = [_page("a"), _page("b", "a"), _page("c", "a")]
    assert len(list(lines_of(tree_of(rows), depth=1))) == 1
    assert len(list(lines_of(tree_of(rows), depth=2))) == 3


def test_json_stops_at_the_depth_asked_for() -> None:
    (root,) = tree_of([_page("a"), _page("b", "a"), _page("c", "a")])
    assert root.as_json(1)["children"] == []
    assert len(str(root.as_json(2)["children"])) > 2


def test_many_siblings_become_one_line() -> None:
    lines = list(lines_of(tree_of([_page(f"{n:04}") for n in range(100)]), depth=1))
    assert lines[-1] == "and 80 more runs, 80 pages"
