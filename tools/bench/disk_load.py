"""A client process that keeps the daemon's disk busy: cold gets, one chain after the other.

Run as `python -m nexuskv.tools.bench.disk_load URL PAGE_BYTES CHAIN_PAGES CHAINS`. Says "ready" on
stdout once a first round of gets is done, and goes on until it is killed.
"""

import sys

from nexuskv import connect
from nexuskv.config import load_config
from nexuskv.tools.bench.ssd_pages import chain_keys, space_of


def main(url: str, page_bytes: int, chain_pages: int, chains: int) -> None:
    """Get every chain, again and again."""
    with connect(url, load_config(env={}).config) as store:
        space = space_of(store, page_bytes)
        into = [bytearray(page_bytes) for _ in range(chain_pages)]
        turn = 0
        while True:
            space.get(chain_keys(turn % chains, chain_pages), into=into)
            turn += 1
            if turn == chains:
                print("ready", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
