"""Filling page tables in the background: a chunk at a time, once, when it is first named.

Owns one thread, started with the first chunk, and a queue that holds each chunk at most once, so
it is bounded by the segment's chunk count. Population is only ever an optimisation: a failure is
kept for inspection and the copy takes its page faults itself.
"""

import mmap
import queue
import threading
from typing import Final

from nexuskv.dataplane import native
from nexuskv.dataplane.batch import Buffer, Segment

_DESCRIPTOR_WORDS: Final = 4  # of 8 bytes each
_OFFSET_WORD: Final = 1
_SIZE_SHIFT: Final = 32  # the first word is the segment below and the size above


class Populator:
    """Fills the page tables of the chunks it is told about. Thread-safe."""

    def __init__(
        self, segment: Segment, mapping: mmap.mmap, chunk_bytes: int, *, write: bool
    ) -> None:
        """`mapping` is what `segment` describes; the thread holds it while it works on it."""
        self._segment = segment
        self._mapping = mapping
        self._chunk_bytes = chunk_bytes
        self._write = write
        self._lock = threading.Lock()
        self._missing = set(range(-(-segment.size_bytes // chunk_bytes)))
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._pending_count = 0
        self._closed = False
        self.failure: OSError | None = None

    def want(self, descriptors: Buffer) -> None:
        """Queue the chunks that joined 32-byte `descriptors` name and no call named before."""
        if not self._missing:
            return
        raw = memoryview(descriptors).cast("B")
        if len(raw) % (8 * _DESCRIPTOR_WORDS):
            return  # the copy says what is wrong with them
        words = raw.cast("Q")
        offsets, chunk_bytes = words[_OFFSET_WORD::_DESCRIPTOR_WORDS].tolist(), self._chunk_bytes
        named = {offset // chunk_bytes for offset in offsets}
        if named.isdisjoint(self._missing):
            return  # as nearly always
        # Without a size there is no page: naming a chunk for it would fill a hole of the file.
        firsts = words[::_DESCRIPTOR_WORDS].tolist()
        named = {
            offset // chunk_bytes
            for offset, first in zip(offsets, firsts, strict=True)
            if first >> _SIZE_SHIFT
        }
        self._enqueue(named & self._missing)

    def _enqueue(self, chunks: set[int]) -> None:
        with self._lock:
            chunks &= self._missing
            if self._closed or not chunks:
                return
            self._missing -= chunks
            self._pending_count += len(chunks)
            self._idle.clear()
            for chunk in sorted(chunks):
                self._queue.put(chunk)
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        """Start the thread. Without one copies only fault pages in by themselves: no error."""
        thread = threading.Thread(target=self._run, name="nexuskv-populate", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # the system has none left; the next chunk tries again
        self._thread = thread

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether nothing is queued or being filled, within `timeout_s` seconds."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """Drop what is queued and wait for the chunk being filled. Idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._queue.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (chunk := self._queue.get()) is not None:
            if not self._closed:
                self._fill(chunk)
            with self._lock:
                self._pending_count -= 1
                if not self._pending_count:
                    self._idle.set()

    def _fill(self, chunk: int) -> None:
        start = chunk * self._chunk_bytes
        length = min(self._chunk_bytes, self._segment.size_bytes - start)
        try:
            with memoryview(self._mapping):
                native.populate(self._segment.address + start, length, write=self._write)
        except OSError as exc:
            self.failure = exc
