"""The worker process: `python -m nexuskv.worker SOCKET_FD LOCK_FD`, started by control alone.

It inherits its end of a socket pair, over which its settings come first and commands after, and the
instance's lock, which stays locked while it lives: nobody else can take the instance's memory
before this process is gone.

It ends when told to, once it has finished what runs, and at once when its socket closes: control is
gone then and nobody waits for an answer. There is no parent-death signal, which would follow the
thread that started us; a successor of control finds us by the lock and kills us if we hang.
"""

import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from nexuskv.errors import NexusError, ProtocolError
from nexuskv.worker.codec import LENGTH, Finish, Ping, Pong, Record, WorkerSettings, decode, encode
from nexuskv.worker.commands import Command
from nexuskv.worker.engine import Engine
from nexuskv.worker.host import HostMemory

if TYPE_CHECKING:
    from nexuskv.worker.ssd import Ssd

_LOG = logging.getLogger("nexuskv.worker")


class Link:
    """The worker's end of the socket. One thread receives, any sends."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._frames = end.makefile("rb")
        self._sending = threading.Lock()

    def receive(self) -> tuple[int, Record] | None:
        """The next message; None when control has closed its end or was killed.

        Raises:
            ProtocolError: it is malformed.
        """
        try:
            head = self._frames.read(LENGTH.size)
            if len(head) < LENGTH.size:
                return None
            (length,) = LENGTH.unpack(head)
            payload = self._frames.read(length)
        except ConnectionResetError:  # control ended with answers unread
            return None
        return decode(payload) if len(payload) == length else None

    def send(self, sequence: int, record: Record) -> None:
        """Send one message. Waits while control takes none; ends the process if it is gone."""
        frame = encode(sequence, record)
        try:
            with self._sending:
                self._end.sendall(frame)
        except OSError:
            os._exit(0)


def main() -> int:
    """Serve one control process; the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s worker: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # control decides when we end
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    try:
        return _serve(link)
    except NexusError as exc:
        _LOG.error("%s", exc)  # its message says all there is
        return 1


def _serve(link: Link) -> int:
    first = link.receive()
    if first is None:
        return 0
    settings = first[1]
    if not isinstance(settings, WorkerSettings):
        raise ProtocolError(f"settings come first, got {type(settings).__name__}")
    _step_back(settings.nice)
    memory = HostMemory.open(settings)
    engine = Engine(
        memory=memory,
        reply=link.send,
        open_ssd=functools.partial(_open_ssd, settings) if settings.ssd_dir else None,
        ssd_threads=settings.ssd_threads,
        ssd_errors_max=settings.ssd_errors_max,
    )
    engine.start()
    while (message := link.receive()) is not None:
        sequence, record = message
        if isinstance(record, Command):
            engine.take(sequence, record)
        elif isinstance(record, Ping):
            link.send(sequence, Pong())
        elif isinstance(record, Finish):
            return _finish(engine, settings.stop_timeout_ms / 1000)
        else:
            raise ProtocolError(f"{type(record).__name__} is no command")
    os._exit(0)


def _open_ssd(settings: WorkerSettings) -> "Ssd":
    # Loaded behind what host memory needs: until there is memory, nobody can store a page.
    from nexuskv.worker.ssd import Ssd

    return Ssd.open(settings)


def _finish(engine: Engine, timeout_s: float) -> int:
    """End in order, or leave what hangs behind."""
    if not engine.drain(timeout_s) or not engine.close(timeout_s):
        _LOG.warning("something still runs after %.1f s; it is abandoned", timeout_s)
        os._exit(1)
    return 0


def _step_back(nice: int) -> None:
    """Let lookups and engines go first; a kernel that forbids it costs only latency.

    Called before there is a second thread: all threads to come inherit it.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)


if __name__ == "__main__":
    sys.exit(main())
