"""What commands print: data on stdout, as a table for people or as JSON; words on stderr."""

import json
import sys
from collections.abc import Sequence


def say(words: str) -> None:
    """One line for people, on stderr."""
    print(f"nexuskv: {words}", file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """`value` as one JSON document on stdout; bytes become hex."""
    json.dump(value, sys.stdout, indent=2, default=_plain)
    sys.stdout.write("\n")


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns on stdout: numbers to the right, all else to the left; no rows, no table."""
    if rows:
        sys.stdout.write(table(titles, rows) + "\n")


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The lines of a table under its titles, without a final newline."""
    texts = [list(titles), *([text_of(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    right = [all(_is_number(row[at]) for row in rows) for at in range(len(titles))]
    lines = (
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        for line in texts
    )
    return "\n".join(line.rstrip() for line in lines)


def text_of(cell: object) -> str:
    """One cell: bytes as hex, figures with four digits, nothing for None."""
    if cell is None:
        return ""
    if isinstance(cell, bytes):
        return cell.hex()
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return str(cell)


def _is_number(cell: object) -> bool:
    return cell is None or (isinstance(cell, int | float) and not isinstance(cell, bool))


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"no JSON for a {type(value).__name__}")
