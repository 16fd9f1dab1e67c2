"""A client in a process of its own: it does one thing, says how it went, and ends when told.

Run as `python -m tests.e2e.child ACTION URL JSON`. It prints `ready` when it is about to act,
the outcome as JSON when it has acted, and ends when its standard input is closed.
"""

import json
import sys
from collections.abc import Callable

from tests.e2e.cache import chain, open_space, open_store, pages
from tests.e2e.churn import churn
from tests.e2e.filler import fill

Options = dict[str, object]


def put(url: str, options: Options) -> object:
    """Put one chain; statuses by name."""
    store = open_store(url, request_timeout_s=20.0)
    space = open_space(store, page_bytes=int(str(options["page_bytes"])))
    keys = chain(str(options["name"]), int(str(options["count"])))
    data = pages(keys, space.record.page_bytes, version=int(str(options.get("version", 0))))
    say("ready")
    _wait_for_go(options)
    statuses = space.put(keys, from_=data)
    store.close()
    return [status.name for status in statuses]


def get(url: str, options: Options) -> object:
    """Get one chain under a lease of `lease_ttl_s`."""
    store = open_store(url, lease_ttl_s=options["lease_ttl_s"])
    space = open_space(store, page_bytes=int(str(options["page_bytes"])))
    keys = chain(str(options["name"]), int(str(options["count"])))
    wanted = pages(keys, space.record.page_bytes)
    into = [bytearray(space.record.page_bytes) for _ in keys]
    say("ready")
    sys.stdin.readline()
    statuses = space.get(keys, into=into)
    right = all(bytes(a) == b for a, b, s in zip(into, wanted, statuses, strict=True) if s)
    store.close()
    return {"statuses": [s.name for s in statuses], "right": right}


def read_lease(url: str, options: Options) -> object:
    """Use a lease of another process: read, renew and, if told to, release it."""
    with open_store(url, tenant=str(options.get("tenant", "default"))) as store:
        space = open_space(store, page_bytes=int(str(options["page_bytes"])))
        keys = chain(str(options["name"]), int(str(options["count"])))
        lease = store.lease(bytes.fromhex(str(options["token"])))
        into = [bytearray(space.record.page_bytes) for _ in keys]
        statuses = lease.get(space, keys, into=into)
        wanted = pages(keys, space.record.page_bytes)
        right = all(bytes(a) == b for a, b, s in zip(into, wanted, statuses, strict=True) if s)
        renewed = lease.renew()
        if options.get("release"):
            lease.release()
        return {"statuses": [s.name for s in statuses], "right": right, "renewed": renewed}


ACTIONS: dict[str, Callable[[str, Options], object]] = {
    "put": put,
    "get": get,
    "read_lease": read_lease,
    "churn": churn,
    "fill": fill,
}


def say(text: str) -> None:
    """One line to the parent."""
    print(text, flush=True)


def _wait_for_go(options: Options) -> None:
    if options.get("wait"):
        sys.stdin.readline()


def main() -> None:
    """Act, report, and stay until the parent lets go."""
    action, url, options = sys.argv[1:]
    say(json.dumps(ACTIONS[action](url, json.loads(options))))
    sys.stdin.read()


if __name__ == "__main__":
    main()
