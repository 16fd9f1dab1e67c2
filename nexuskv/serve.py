"""Starts the daemon: the tier, the worker and the control loop, and ends them in order."""

import gc
import logging
import resource
import secrets
import signal
import sys
from pathlib import Path
from typing import Final

from nexuskv.clock import MonotonicClock
from nexuskv.config import Config, default_url
from nexuskv.control.control import Control
from nexuskv.protocol import INCARNATION_BYTES
from nexuskv.tiers.host import HostTier
from nexuskv.worker.host import HostTools
from nexuskv.worker.worker import Worker

_LOG = logging.getLogger("nexuskv.serve")
_OWN_DESCRIPTORS: Final = 64  # files, listeners, eventfds, and some in reserve


def serve(config: Config) -> int:
    """Run a daemon until SIGTERM or SIGINT, then stop clean.

    Prints `nexuskv: ready URL …` on stderr once pages can be stored.

    Returns:
        0, the exit status of a clean stop.

    Raises:
        ConfigError: something of the configuration cannot be had; nothing stays behind.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _allow_descriptors(config.sessions_max)
    incarnation = secrets.token_bytes(INCARNATION_BYTES)
    tier = HostTier.open(
        folder=segment_folder(config),
        capacity_bytes=config.host_memory,
        chunk_bytes=config.chunk_bytes,
        huge_pages=config.huge_pages,
        incarnation=incarnation,
    )
    for path in tier.leftovers:
        _LOG.warning("%s was left behind by a daemon that is gone; remove it by hand", path)
    try:
        tools = HostTools.open(tier)
        worker = Worker(queue_max=config.worker_queue_max, run=tools)
        try:
            _serve(config, tier, worker, incarnation, tools.native)
        finally:
            # A thread that reads a page for longer still needs its mapping; the process ends soon.
            if worker.close(config.stop_timeout_s):
                tools.close()
    finally:
        tier.close(unlink=True)
    return 0


def _serve(config: Config, tier: HostTier, worker: Worker, incarnation: bytes, native: str) -> None:
    control = Control(
        config=config,
        clock=MonotonicClock(),
        tier=tier,
        worker=worker,
        incarnation=incarnation,
        native=native,
    )

    def ready() -> None:
        print("nexuskv: ready", *control.urls, file=sys.stderr, flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: control.stop())
    worker.start()
    control.open(on_ready=ready)
    try:
        # Reference counts free everything here; a collection would stop the loop for long.
        gc.collect()
        gc.freeze()
        gc.disable()
        control.run()
    finally:
        control.close()


def _allow_descriptors(sessions_max: int) -> None:
    """Raise our limit as far as it may be: a local session takes a socket and a pidfd."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * sessions_max + _OWN_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def segment_folder(config: Config) -> Path:
    """Where this instance keeps its segments."""
    if config.segment_dir:
        return Path(config.segment_dir)
    return Path(default_url(config).removeprefix("unix://")).parent
