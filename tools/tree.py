"""A namespace's pages as a forest of runs, for people: built from the rows of `inspect`.

Pure functions over bounded input: the caller cuts the rows off.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

_KEY_SHOWN: Final = 16  # hex digits of a key
_CHILDREN_SHOWN: Final = 20


@dataclass(slots=True)
class Node:
    """A run of pages without a branch, and the runs after it."""

    first_key: bytes
    fragment: bool
    page_count: int = 1
    total: int = 0  # pages in this run and all below it
    children: list["Node"] = field(default_factory=list)

    def as_json(self, depth: int) -> dict[str, object]:
        """This run and `depth` - 1 levels below it as plain values."""
        below = [child.as_json(depth - 1) for child in self.children] if depth > 1 else []
        return {
            "first_key": self.first_key.hex(),
            "page_count": self.page_count,
            "total": self.total,
            "fragment": self.fragment,
            "children": below,
        }


def tree_of(rows: Iterable[Mapping[str, object]]) -> list[Node]:
    """The forest of pages.

    Args:
        rows: pages with `key` and `parent`, bytes (empty or None at the root), and `parent_state`.
            A page whose parent is not among the rows starts a tree here; unless it hangs under the
            root it is called a fragment.
    """
    parents: dict[bytes, bytes] = {}
    rooted: set[bytes] = set()
    for row in rows:
        key, parent = row["key"], row["parent"] or b""
        assert isinstance(key, bytes)
        assert isinstance(parent, bytes)
        parents[key] = parent
        if row["parent_state"] == "root":
            rooted.add(key)
    children: dict[bytes, list[bytes]] = {}
    heads: list[bytes] = []
    for key, parent in parents.items():
        if parent in parents:
            children.setdefault(parent, []).append(key)
        else:
            heads.append(key)
    forest: list[Node] = []
    made: list[tuple[Node, Node | None]] = []
    pending: list[tuple[bytes, Node | None]] = [(key, None) for key in heads]
    while pending:
        key, above = pending.pop()
        node, after = _run(key, children, fragment=above is None and key not in rooted)
        (forest if above is None else above.children).append(node)
        made.append((node, above))
        pending += [(child, node) for child in after]
    for node, above in reversed(made):  # a run comes after the run above it
        node.total += node.page_count
        if above is not None:
            above.total += node.total
    return forest


def _run(
    key: bytes, children: Mapping[bytes, list[bytes]], *, fragment: bool
) -> tuple[Node, list[bytes]]:
    """The run that starts at `key`, and the keys of the runs after it."""
    node = Node(key, fragment)
    while len(after := children.get(key, [])) == 1:
        key = after[0]
        node.page_count += 1
    return node, after


def lines_of(nodes: Sequence[Node], *, depth: int) -> Iterator[str]:
    """The forest as indented lines, the largest first; many small siblings become one line."""
    return _lines(nodes, depth, "")


def _lines(nodes: Sequence[Node], depth: int, indent: str) -> Iterator[str]:
    ordered = sorted(nodes, key=lambda node: -node.total)
    for node in ordered[:_CHILDREN_SHOWN]:
        key = node.first_key.hex()[:_KEY_SHOWN]
        below = f", {node.total} with those below" if node.children else ""
        mark = "  (fragment)" if node.fragment else ""
        yield f"{indent}{key}  {node.page_count} pages{below}{mark}"
        if depth > 1:
            yield from _lines(node.children, depth - 1, indent + "  ")
    if rest := ordered[_CHILDREN_SHOWN:]:
        yield f"{indent}and {len(rest)} more runs, {sum(node.total for node in rest)} pages"
