"""The supply of memory: chunks are populated by the worker one after another, in the background."""

import logging
from collections.abc import Callable
from typing import Final

from nexuskv.control.counters import Counters
from nexuskv.tiers.host import HostTier
from nexuskv.worker.commands import ChunkPopulated, CommandQueue, PopulateChunk

_LOG = logging.getLogger("nexuskv.control")
_LOSSES_MAX: Final = 3  # workers that one chunk may cost: it may be what kills them


class Supply:
    """Keeps one populate command with the worker until every chunk has been tried."""

    def __init__(
        self,
        *,
        tier: HostTier,
        worker: CommandQueue,
        counters: Counters,
        on_first: Callable[[], None],
    ) -> None:
        self._tier = tier
        self._worker = worker
        self._counters = counters
        self._busy = False
        self._excused = False  # the answer to come says nothing about the chunk
        self._losses = 0  # of workers with this chunk, in a row
        self._on_first: Callable[[], None] | None = on_first

    def next(self) -> None:
        """Ask for the next chunk, if any is left and none is being populated."""
        if self._busy:
            return
        chunk_index = self._tier.chunk_to_populate()
        if chunk_index is None:
            return
        self._busy = self._worker.submit(PopulateChunk(chunk_index))
        if not self._busy:
            self._counters.add("worker_queue_full")

    def ready(self) -> None:
        """There is memory: tell whoever waits for the first of it, once."""
        on_first, self._on_first = self._on_first, None
        if on_first is not None:
            on_first()

    def worker_lost(self) -> None:
        """The worker is gone: the chunk it was at is tried again, unless it cost too many."""
        self._losses += self._busy
        self._excused = self._busy and self._losses < _LOSSES_MAX

    def populated(self, result: ChunkPopulated) -> None:
        """The worker has tried a chunk; call `next` for another."""
        self._busy = False
        excused, self._excused = self._excused, False
        if excused:
            return
        self._losses = 0
        if result.error is None:
            self._tier.chunk_populated(result.chunk_index)
            self.ready()
        else:
            self._tier.chunk_failed(result.chunk_index)
            if self._tier.failed_chunks == 1:
                _LOG.error("chunk %d has no memory: %s", result.chunk_index, result.error)
            self._counters.add("chunks_failed")
