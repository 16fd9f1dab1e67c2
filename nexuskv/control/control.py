"""The control process: builds every part, runs the loop, stops clean.

Owns the order in which things open and close. The tier and the worker are handed in: this module
starts no process and touches no page bytes.
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nexuskv.clock import Clock
from nexuskv.config import Config, default_url
from nexuskv.control.admin import Admin
from nexuskv.control.counters import Counters
from nexuskv.control.dispatch import Dispatcher
from nexuskv.control.events import EventStream
from nexuskv.control.expiry import Expiry
from nexuskv.control.greeting import Greeting
from nexuskv.control.http import HttpServer
from nexuskv.control.inspection import Inspection
from nexuskv.control.local import LocalCarrier
from nexuskv.control.loop import READ, Loop
from nexuskv.control.metrics import Metrics
from nexuskv.control.namespaces import Namespaces
from nexuskv.control.pages import Pages
from nexuskv.control.reading import Reading
from nexuskv.control.recheck import Recheck
from nexuskv.control.room import Room
from nexuskv.control.sessions import Sessions
from nexuskv.control.supply import Supply
from nexuskv.control.waiting import Waiting
from nexuskv.control.writing import Writing
from nexuskv.errors import ConfigError
from nexuskv.index.leases import LeaseTable
from nexuskv.index.radix import RadixIndex
from nexuskv.tiers.host import HostTier
from nexuskv.worker.commands import ChunkPopulated, CommandQueue, PagesChecked, Result, WorkerReady

if TYPE_CHECKING:
    from nexuskv.control.remote import RemoteCarrier


class Control:
    """One run of the daemon. `run` blocks until `stop`; `close` leaves nothing behind."""

    def __init__(
        self,
        *,
        config: Config,
        clock: Clock,
        tier: HostTier,
        worker: CommandQueue,
        incarnation: bytes,
        counters: Counters | None = None,
        worker_gauges: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._config = config
        self._clock = clock
        self._worker = worker
        self._tier = tier
        self.counters = Counters() if counters is None else counters
        self._native = ""  # which copying code the worker uses; it says so
        self.loop = Loop(clock, self.counters)
        self._carriers: list[LocalCarrier | RemoteCarrier] = []
        self._http: HttpServer | None = None
        # Ids of one run never name anything of another: they start at a random number.
        first_id = int.from_bytes(secrets.token_bytes(6), "little") << 16
        self._events = EventStream(incarnation=incarnation, counters=self.counters)
        index = RadixIndex(fragments_max=config.fragments_max, pins_max=config.pins_max)
        leases = LeaseTable(
            leases_max=config.leases_max, slot_count=tier.slot_count, first_id=first_id
        )
        pages = Pages(tier=tier, leases=leases, events=self._events, counters=self.counters)
        namespaces = Namespaces(
            index=index, chunk_bytes=tier.chunk_bytes, namespaces_max=config.namespaces_max
        )
        self._sessions = Sessions(
            loop=self.loop,
            tier=tier,
            counters=self.counters,
            first_number=first_id,
            sessions_max=config.sessions_max,
        )
        self._waiting = Waiting(config=config, clock=clock, pages=pages, counters=self.counters)
        self._sessions.on_end.append(self._waiting.session_ended)
        self.metrics = Metrics(
            clock=clock,
            counters=self.counters,
            pages=pages,
            index=index,
            namespaces=namespaces,
            sessions=self._sessions,
            waiting=self._waiting,
            native=lambda: self._native,
            worker_gauges=worker_gauges,
            urls=lambda: self.urls,
            http=lambda: self.http_address,
            events=lambda: self._events.address,
        )
        room = Room(
            config=config,
            clock=clock,
            index=index,
            pages=pages,
            namespaces=namespaces,
            counters=self.counters,
        )
        self.recheck = Recheck(
            pages=pages, room=room, worker=worker, events=self._events, counters=self.counters
        )
        self.loop.add_drain(room.make_ahead)
        inspection = Inspection(namespaces=namespaces, sessions=self._sessions, pages=pages)
        self._dispatcher = Dispatcher(
            greeting=Greeting(
                config=config,
                incarnation=incarnation,
                sessions=self._sessions,
                namespaces=namespaces,
                tier=tier,
            ),
            reading=Reading(
                config=config,
                clock=clock,
                pages=pages,
                waiting=self._waiting,
                recheck=self.recheck,
                counters=self.counters,
            ),
            writing=Writing(
                config=config,
                pages=pages,
                room=room,
                waiting=self._waiting,
                events=self._events,
                counters=self.counters,
                first_reservation=first_id,
            ),
            admin=Admin(
                config=config,
                clock=clock,
                incarnation=incarnation,
                pages=pages,
                room=room,
                waiting=self._waiting,
                events=self._events,
                counters=self.counters,
                inspection=inspection,
                stats=self.metrics.stats,
            ),
            counters=self.counters,
        )
        self.loop.add_ticker(self._waiting)
        self.loop.add_ticker(Expiry(pages))
        self.loop.watch(worker.fileno(), READ, self._on_worker)

    @property
    def urls(self) -> list[str]:
        """The addresses it listens on."""
        return [carrier.url for carrier in self._carriers]

    @property
    def http_address(self) -> str:
        """HOST:PORT of /metrics, empty without."""
        return self._http.address if self._http is not None else ""

    def open(self, *, on_ready: Callable[[], None]) -> None:
        """Listen and begin to populate memory; `on_ready` is called once pages can be stored.

        Raises:
            ConfigError: an address is wrong or taken; nothing stays open.
        """
        try:
            for url in _addresses(self._config):
                self._carriers.append(self._carrier(url))
            if self._config.events:
                self._events.open(self._config.events, backlog_max=self._config.events_backlog_max)
            if self._config.http:
                self._http = HttpServer(self._config.http, metrics=self._metrics_text)
        except ConfigError:
            self.close()
            raise
        self._supply = Supply(
            tier=self._tier, worker=self._worker, counters=self.counters, on_first=on_ready
        )
        self._supply.next()

    def run(self) -> None:
        """Serve until `stop`."""
        self.loop.run()

    def stop(self) -> None:
        """End `run`; safe from signal handlers and other threads."""
        self.loop.stop()

    def close(self) -> None:
        """Abort what waits, close every socket. Idempotent."""
        if self._http is not None:
            self._http.close()
            self._http = None
        self._waiting.abort_all()
        for carrier in self._carriers:
            carrier.close()
        self._carriers.clear()
        self._sessions.close()
        self._events.close()
        self.loop.close()

    def _carrier(self, url: str) -> "LocalCarrier | RemoteCarrier":
        handle = self._dispatcher.handle
        if url.startswith("unix://"):
            return LocalCarrier(
                path=Path(url.removeprefix("unix://")),
                loop=self.loop,
                config=self._config,
                counters=self.counters,
                handle=handle,
            )
        # zmq is loaded only by daemons that listen on tcp.
        from nexuskv.control.remote import RemoteCarrier

        return RemoteCarrier(
            url=url,
            loop=self.loop,
            clock=self._clock,
            config=self._config,
            counters=self.counters,
            handle=handle,
        )

    def _on_worker(self, _events: int) -> None:
        for result in self._worker.completed():
            self._on_result(result)
        # A queue that was full has room again, or there is another worker.
        self._supply.next()

    def _on_result(self, result: Result) -> None:
        match result:
            case ChunkPopulated():
                self._supply.populated(result)
            case PagesChecked():
                self.recheck.checked(result)
            case WorkerReady(native=native):
                self._native = native
            case _:
                pass  # of a tier that is not there

    def _metrics_text(self, timeout_s: float) -> str:
        return self.loop.call(self.metrics.prometheus, timeout_s=timeout_s)


def _addresses(config: Config) -> list[str]:
    """The addresses to listen on, checked.

    Raises:
        ConfigError: an empty list, an unknown scheme or a relative socket path.
    """
    urls = [url.strip() for url in (config.listen or default_url(config)).split(",")]
    for url in urls:
        path = url.removeprefix("unix://")
        if url.startswith("tcp://"):
            continue
        if path == url or not path.startswith("/"):
            raise ConfigError(f"cannot listen on {url!r}: want unix:///PATH or tcp://HOST:PORT")
    return urls
