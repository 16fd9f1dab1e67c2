"""A control plane in a thread of the test, and clients that speak its protocol byte by byte.

Time stands still unless a test moves it. `Rig.close` fails when something of a session was left.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import zmq

from nexuskv.clock import ManualClock
from nexuskv.config import load_config
from nexuskv.control.control import Control
from nexuskv.errors import OutOfSpace
from nexuskv.serve import worker_settings
from nexuskv.tiers.host import HostTier
from nexuskv.tiers.usage import ChunkRow, ChunkSlots
from nexuskv.worker.commands import CommandQueue
from nexuskv.worker.host import HostMemory
from tests.control.raw import INCARNATION, MIB, PATIENCE_S, Raw, RawLocal, RawRemote
from tests.worker.inprocess import InProcessWorker

T = TypeVar("T")

SMALL: dict[str, object] = {
    "host_memory": 4 * MIB,
    "chunk_bytes": MIB,
    "message_bytes_max": MIB,
    "send_backlog_bytes": MIB,
    "lease_margin_s": 0.5,
}


class TestWorker(CommandQueue, Protocol):
    """A data plane of a test."""

    def start(self) -> None:
        """Say that it is ready."""
        ...


class Memory(HostMemory):
    """The worker's hands, on a filesystem that may be full from some chunk on."""

    chunks_to_be_had: int | None = None

    def populate_chunk(self, chunk_index: int) -> None:
        if self.chunks_to_be_had is not None and chunk_index >= self.chunks_to_be_had:
            raise OutOfSpace("the filesystem is full")
        super().populate_chunk(chunk_index)


class Rig:
    """One control plane on a folder, its loop in a thread. `close` stops it."""

    def __init__(self, folder: Path, **settings: object) -> None:
        chunks_to_be_had = settings.pop("chunks_to_be_had", None)
        assert chunks_to_be_had is None or isinstance(chunks_to_be_had, int)
        listen = f"unix://{folder}/d.sock,tcp://127.0.0.1:0"
        flags = {**SMALL, "listen": listen, "segment_dir": folder / "s", **settings}
        flags["segment_dir"] = str(flags["segment_dir"])
        self.config = load_config(env={}, flags=flags).config
        self.clock = ManualClock(1000.0)
        self._stack = ExitStack()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._clients: list[Raw] = []
        with ExitStack() as stack:
            self.tier = HostTier.open(
                folder=Path(self.config.segment_dir),
                capacity_bytes=self.config.host_memory,
                chunk_bytes=self.config.chunk_bytes,
                huge_pages=False,
                incarnation=INCARNATION,
            )
            stack.callback(self.tier.close, unlink=True)
            self.worker = self.make_worker(stack, chunks_to_be_had)
            self.control = Control(
                config=self.config,
                clock=self.clock,
                tier=self.tier,
                worker=self.worker,
                incarnation=INCARNATION,
            )
            stack.callback(self.control.close)
            self.worker.start()
            self.control.open(on_ready=lambda: None)
            self._thread = threading.Thread(target=self.control.run, name="control")
            self._thread.start()
            stack.callback(self.stop)
            self.until(lambda: self.tier.chunk_to_populate() is None)
            self._stack = stack.pop_all()

    def make_worker(self, stack: ExitStack, chunks_to_be_had: int | None) -> TestWorker:
        """The data plane; `stack` closes it."""
        memory = Memory.open(worker_settings(self.config, self.tier))
        memory.chunks_to_be_had = chunks_to_be_had
        stack.callback(memory.close)
        worker = InProcessWorker(queue_max=self.config.worker_queue_max, memory=memory)
        stack.callback(worker.close, PATIENCE_S)
        return worker

    # --- clients

    def local(self, *, tenant: str | None = "default") -> RawLocal:
        """A local client, greeted unless `tenant` is None."""
        client = RawLocal(self.control.urls[0].removeprefix("unix://"))
        self._clients.append(client)
        if tenant is not None:
            client.hello(tenant=tenant)
        return client

    def remote(self, *, tenant: str | None = "default") -> RawRemote:
        """A remote client, greeted unless `tenant` is None."""
        if self._context is None:
            self._context = zmq.Context(1)
        client = RawRemote(self.control.urls[1], self._context)
        self._clients.append(client)
        if tenant is not None:
            client.hello(tenant=tenant)
        return client

    def any(self, carrier: str, *, tenant: str | None = "default") -> Raw:
        """A client over the carrier of this name."""
        return self.local(tenant=tenant) if carrier == "local" else self.remote(tenant=tenant)

    # --- the daemon from within

    def run(self, function: Callable[[], T]) -> T:
        """Run a function on the loop."""
        return self.control.loop.call(function, timeout_s=PATIENCE_S)

    def turn(self) -> None:
        """Let the loop turn, with everything that is due."""
        self.run(lambda: None)
        self.run(lambda: None)

    def until(self, condition: Callable[[], bool]) -> None:
        """Turn the loop until something is so; it must become so."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.run(condition):
            assert time.monotonic() < deadline_s, "it never came to be"

    def advance(self, duration_s: float) -> None:
        """Move the clock and let what is due happen."""
        self.clock.advance(duration_s)
        self.turn()

    @contextmanager
    def blocked(self) -> Generator[None]:
        """The loop does not turn inside this block."""
        entered, leave = threading.Event(), threading.Event()

        def block() -> None:
            entered.set()
            leave.wait(PATIENCE_S)

        waiting = threading.Thread(target=lambda: self.run(block))
        waiting.start()
        entered.wait(PATIENCE_S)
        try:
            yield
        finally:
            leave.set()
            waiting.join()

    def gauges(self) -> dict[str, int]:
        return self.run(self.control.metrics.gauges)

    def counter(self, name: str) -> int:
        return self.run(lambda: self.control.counters.snapshot()[name])

    def stop(self) -> None:
        """End the loop; the control plane stays open."""
        self.control.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """Close the clients, see that nothing of them is left, and stop."""
        for client in self._clients:
            client.close()
        try:
            if self._thread.is_alive():
                self.check_accounts()
                assert self.counter("internal_errors") == 0
        finally:
            self._stack.close()
            if self._context is not None:
                self._context.term()

    def _look_at_all(self) -> tuple[dict[str, int], list[ChunkRow], list[ChunkSlots]]:
        """In one turn of the loop: closing clients change the accounts between turns."""
        chunks = self.tier.chunks()
        slots = [self.tier.slots_of_chunk(chunk.chunk_index) for chunk in chunks]
        return self.control.metrics.gauges(), chunks, slots

    def check_accounts(self) -> None:
        """What the gauges say is what a recount of every slot says."""
        gauges, chunks, slots = self.run(self._look_at_all)
        sizes = {c.chunk_index: c.slot_bytes for c in chunks}
        for name in ("used", "writing", "quarantined", "unlinked"):
            counted = sum(getattr(c, name) * sizes[c.chunk_index] for c in chunks)
            assert gauges[f"{name}_bytes"] == counted, name
        taken = sum(len(each.slots) for each in slots)
        assert taken == sum(c.used + c.writing + c.quarantined + c.unlinked for c in chunks)
        assert gauges["pages"] == sum(c.used for c in chunks)
        assert gauges["unlinked_slots"] == sum(c.unlinked for c in chunks)
