"""Starts the daemon: the tier, the worker and the control loop, and ends them in order."""

import functools
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
from nexuskv.control.counters import Counters
from nexuskv.control.supervisor import Limits, Supervisor
from nexuskv.control.worker_process import WorkerProcess
from nexuskv.errors import ConfigError
from nexuskv.protocol import INCARNATION_BYTES
from nexuskv.tiers.host import HostTier
from nexuskv.worker.codec import WorkerSettings

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
        reap_s=config.worker_reap_s,
        adopt=config.keep_pages,
    )
    for path in tier.leftovers:
        _LOG.warning("%s was left behind by a daemon that is gone; remove it by hand", path)
    # Of a start that fails nothing stays, but what was there before.
    keep = tier.adopted and config.keep_pages
    try:
        _serve(config, tier, incarnation)
        keep = config.keep_pages
    finally:
        tier.close(unlink=not keep)
    return 0


def _serve(config: Config, tier: HostTier, incarnation: bytes) -> None:
    counters, clock = Counters(), MonotonicClock()
    failed_start: list[str] = []

    def give_up(reason: str) -> None:
        failed_start.append(reason)
        control.stop()

    supervisor = Supervisor(
        start_worker=functools.partial(
            WorkerProcess.start, executable=sys.executable, lock_fd=tier.lock.fileno()
        ),
        settings=worker_settings(config, tier),
        limits=_limits(config),
        clock=clock,
        counters=counters,
        on_start=tier.lock.record_worker,
        on_failed_start=give_up,
    )
    try:
        control = Control(
            config=config,
            clock=clock,
            tier=tier,
            worker=supervisor,
            incarnation=incarnation,
            counters=counters,
            worker_gauges=supervisor.gauges,
        )
        control.loop.add_ticker(supervisor)
        # As early as can be: it starts while control opens its sockets.
        supervisor.start()
        _run(control)
    finally:
        supervisor.close(config.stop_timeout_s)
    if failed_start:
        raise ConfigError(failed_start[0])


def _run(control: Control) -> None:
    def ready() -> None:
        print("nexuskv: ready", *control.urls, file=sys.stderr, flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: control.stop())
    try:
        control.open(on_ready=ready)
        # Reference counts free everything here; a collection would stop the loop for long.
        gc.collect()
        gc.freeze()
        gc.disable()
        control.run()
    finally:
        control.close()


def worker_settings(config: Config, tier: HostTier) -> WorkerSettings:
    """What a worker of this daemon is told first."""
    (row,) = tier.segments()
    return WorkerSettings(
        data_path=row.data_path,
        table_path=row.table_path,
        capacity_bytes=row.capacity_bytes,
        chunk_bytes=row.chunk_bytes,
        table_bytes=row.table_bytes,
        header_bytes=row.header_bytes,
        record_bytes=row.record_bytes,
        generation_offset=row.generation_offset,
        huge_pages=config.huge_pages,
        nice=config.worker_nice,
        stop_timeout_ms=int(config.stop_timeout_s * 1000) // 2,
        ssd_dir=config.ssd_dir,
        ssd_capacity=config.ssd_capacity,
        ssd_file_bytes=config.ssd_file_bytes,
        ssd_slot_bytes_min=config.ssd_slot_bytes_min,
        ssd_threads=config.ssd_threads,
        ssd_open_files=config.ssd_open_files,
        ssd_errors_max=config.ssd_errors_max,
    )


def _limits(config: Config) -> Limits:
    return Limits(
        queue_max=config.worker_queue_max,
        socket_bytes_max=config.worker_socket_bytes_max,
        timeout_s=config.worker_timeout_s,
        backoff_min_s=config.worker_backoff_min_s,
        backoff_max_s=config.worker_backoff_max_s,
        reap_s=config.worker_reap_s,
    )


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
