"""A client that puts, reads and removes chains as told, and says what it was told of each.

Run by tests/e2e/child.py. What it says is what a user knows: `stored` and `removed` only after the
daemon's answer, `unsure` before each attempt. So whoever kills the daemon can tell afterwards what
must be there, what must not, and what may be either.
"""

import json
import random
import sys

from nexuskv.client.space import Space
from nexuskv.errors import NexusError
from tests.e2e.cache import chain, count_good, open_space, open_store, put

PAGES = 8


def fill(url: str, options: dict[str, object]) -> object:
    """One round of work for every line on standard input; `done` after each."""
    choice = random.Random(int(str(options["seed"])))
    name = str(options["name"])
    stored: list[str] = []
    with open_store(url) as store:
        space = open_space(store, page_bytes=int(str(options["page_bytes"])), model=name)
        _say("ready")
        while sys.stdin.readline().strip() == "go":
            for _ in range(int(str(options["chains"]))):
                _step(space, choice, stored)
            _say("done")
    return len(stored)


def _step(space: Space, choice: random.Random, stored: list[str]) -> None:
    what = choice.random()
    if what < 0.15 and stored:
        _remove(space, stored.pop(choice.randrange(len(stored))))
    elif what < 0.4 and stored:
        count_good(space, chain(choice.choice(stored), PAGES))  # fails on a wrong byte
    else:
        name = f"{space.record.model}-{choice.randrange(2**40)}"
        _say(f"unsure {name}")
        if all(put(space, chain(name, PAGES))):
            stored.append(name)
            _say(f"stored {name}")


def _remove(space: Space, name: str) -> None:
    _say(f"unsure {name}")
    try:
        space.remove(chain(name, PAGES))
    except NexusError:
        return
    _say(f"removed {name}")


def _say(text: str) -> None:
    print(json.dumps(text), flush=True)
