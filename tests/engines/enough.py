"""Fail unless a pytest run passed at least so many tests and skipped none.

An engine that cannot be imported shows up as skipped or missing tests, which pytest alone reports
as success. Stdlib only: it runs under any interpreter.

Example: `python tests/engines/enough.py build/engine-vllm.xml --least 12`
"""

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def shortfall(report: str, *, least: int) -> str:
    """What is wrong with a run, in words; empty when nothing is.

    Args:
        report: the text of a JUnit XML file as pytest writes it.
        least: how many tests have to pass.
    """
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    counts = {
        name: sum(int(suite.get(name, "0")) for suite in suites)
        for name in ("tests", "skipped", "failures", "errors")
    }
    passed = counts["tests"] - counts["skipped"] - counts["failures"] - counts["errors"]
    if counts["failures"] or counts["errors"]:
        return f"{counts['failures']} tests failed and {counts['errors']} had errors"
    if counts["skipped"]:
        return f"{counts['skipped']} tests were skipped; with an engine installed none may be"
    if passed < least:
        return f"{passed} tests passed, at least {least} have to"
    return ""


def main() -> int:
    """Print the verdict; exit 0 or 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="JUnit XML file")
    parser.add_argument("--least", type=int, required=True, help="number of tests that must pass")
    args = parser.parse_args()
    wrong = shortfall(args.report.read_text(encoding="utf-8"), least=args.least)
    if wrong:
        print(f"{args.report}: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
