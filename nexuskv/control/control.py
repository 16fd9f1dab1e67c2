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
from nexuskv.control.asked import Asked
from nexuskv.control.counters import Counters
from nexuskv.control.dispatch import Dispatcher
from nexuskv.control.durable import Durable
from nexuskv.control.earlier import EarlierProcesses
from nexuskv.control.events import EventStream
from nexuskv.control.expiry import Expiry
from nexuskv.control.greeting import Greeting
from nexuskv.control.host_recovery import HostRecords
from nexuskv.control.http import HttpServer
from nexuskv.control.inspection import Inspection
from nexuskv.control.local import LocalCarrier
from nexuskv.control.loop import READ, Loop
from nexuskv.control.metrics import Metrics
from nexuskv.control.namespaces import Namespace, Namespaces
from nexuskv.control.pages import Pages
from nexuskv.control.reading import Reading
from nexuskv.control.recheck import Recheck
from nexuskv.control.recovery import Recovery
from nexuskv.control.room import Room
from nexuskv.control.sessions import Sessions
from nexuskv.control.ssd import Ssd
from nexuskv.control.supply import Supply
from nexuskv.control.verify import Verify
from nexuskv.control.waiting import Waiting
from nexuskv.control.writing import Writing
from nexuskv.errors import ConfigError
from nexuskv.index.leases import LeaseTable
from nexuskv.index.radix import RadixIndex
from nexuskv.tiers.host import HostTier
from nexuskv.tiers.namespace_table import NamespaceTable
from nexuskv.worker.commands import (
    ChunkPopulated,
    CommandQueue,
    FileMade,
    News,
    Result,
    SsdFailed,
    WorkerLost,
    WorkerReady,
)

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
        self._supply: Supply | None = None
        # Ids of one run never name anything of another: they start at a random number.
        first_id = int.from_bytes(secrets.token_bytes(6), "little") << 16
        self._events = EventStream(incarnation=incarnation, counters=self.counters)
        index = RadixIndex(fragments_max=config.fragments_max, pins_max=config.pins_max)
        leases = LeaseTable(
            leases_max=config.leases_max, slot_count=tier.slot_count, first_id=first_id
        )
        self._namespace_table = NamespaceTable.open(tier.folder, rows_max=config.namespaces_max)
        namespaces = Namespaces(
            index=index,
            table=self._namespace_table,
            chunk_bytes=tier.chunk_bytes,
            namespaces_max=config.namespaces_max,
        )
        self._asked = Asked(worker=worker, counters=self.counters)
        self.ssd = self._make_ssd(namespaces, incarnation) if config.ssd_dir else None
        ssd = self.ssd
        pages = Pages(
            tier=tier,
            leases=leases,
            namespaces=namespaces,
            events=self._events,
            counters=self.counters,
            copies=ssd.copies if ssd is not None else None,
        )
        self.sessions = Sessions(
            loop=self.loop,
            tier=tier,
            counters=self.counters,
            first_number=first_id,
            sessions_max=config.sessions_max,
        )
        self._waiting = Waiting(config=config, clock=clock, pages=pages, counters=self.counters)
        self.sessions.on_end.append(self._waiting.session_ended)
        self._earlier = EarlierProcesses(self.loop)
        on_record = HostRecords(
            tier=tier,
            earlier=self._earlier,
            counters=self.counters,
            on_memory=self._more_memory,
        )
        self.metrics = Metrics(
            clock=clock,
            counters=self.counters,
            pages=pages,
            index=index,
            namespaces=namespaces,
            sessions=self.sessions,
            waiting=self._waiting,
            native=lambda: self._native,
            recovery_gauges=lambda: self.recovery.gauges(),
            worker_gauges=worker_gauges,
            ssd_gauges=dict if ssd is None else ssd.gauges,
            ssd_state=lambda: "off" if ssd is None else ssd.state,
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
        self.recovery = Recovery(
            config=config,
            clock=clock,
            namespaces=namespaces,
            near=on_record,
            far=ssd.records if ssd is not None else None,
            index=index,
            room=room,
            waiting=self._waiting,
            events=self._events,
            counters=self.counters,
        )
        if ssd is not None:
            ssd.join(
                index=index,
                pages=pages,
                room=room,
                waiting=self._waiting,
                events=self._events,
                recovery=self.recovery,
                worker=worker,
                loop=self.loop,
            )
        verify = Verify(
            config=config,
            namespaces=namespaces,
            pages=pages,
            room=room,
            asked=self._asked,
            counters=self.counters,
            serves_ssd=lambda: ssd is not None and ssd.writer is not None,
        )
        self.recheck = Recheck(
            pages=pages,
            room=room,
            asked=self._asked,
            counters=self.counters,
            also_check=verify.check_copy,
        )
        self.loop.add_drain(room.make_ahead)
        inspection = Inspection(namespaces=namespaces, sessions=self.sessions, pages=pages)
        self._dispatcher = Dispatcher(
            greeting=Greeting(
                config=config,
                incarnation=incarnation,
                sessions=self.sessions,
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
                copying=ssd.copying if ssd is not None else None,
                load_us=ssd.bandwidth.load_us if ssd is not None else lambda _size_bytes: 0,
            ),
            writing=Writing(
                config=config,
                pages=pages,
                room=room,
                waiting=self._waiting,
                events=self._events,
                counters=self.counters,
                first_reservation=first_id,
                copying=ssd.copying if ssd is not None else None,
            ),
            admin=Admin(
                config=config,
                clock=clock,
                incarnation=incarnation,
                events=self._events,
                inspection=inspection,
                stats=self.metrics.stats,
            ),
            durable=Durable(
                config=config,
                namespaces=namespaces,
                pages=pages,
                room=room,
                waiting=self._waiting,
                events=self._events,
                counters=self.counters,
                forget=lambda namespace, keys: _forget(self.recovery, on_record, namespace, keys),
                ssd=ssd,
            ),
            verify=verify,
            counters=self.counters,
        )
        self.loop.add_ticker(self._waiting)
        self.loop.add_ticker(Expiry(pages))
        self.loop.add_ticker(self.recovery)
        self.loop.watch(worker.fileno(), READ, self._on_worker)

    def _make_ssd(self, namespaces: Namespaces, incarnation: bytes) -> Ssd:
        return Ssd(
            config=self._config,
            clock=self._clock,
            host=self._tier,
            asked=self._asked,
            namespaces=namespaces,
            counters=self.counters,
            incarnation=incarnation,
        )

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
        if self._tier.populated_bytes:
            self._supply.ready()  # An earlier run's memory is there, with pages to be served.
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
        self.sessions.close()
        self._earlier.close()
        self._namespace_table.close()
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
        if self.ssd is not None:
            self.ssd.answered()
        # A queue that was full has room again, or there is another worker.
        self._more_memory()

    def _more_memory(self) -> None:
        if self._supply is not None:
            self._supply.next()

    def _on_result(self, result: Result) -> None:
        match result:
            case ChunkPopulated():
                assert self._supply is not None, "an answer before the question"
                self._supply.populated(result)
            case FileMade():
                if self.ssd is not None:
                    self.ssd.file_made(result)
            case WorkerReady() | SsdFailed() | WorkerLost():
                self._on_news(result)
            case _:
                self._asked.answered(result)

    def _on_news(self, news: News) -> None:
        if isinstance(news, WorkerReady):
            self._native = news.native
        elif isinstance(news, WorkerLost) and self._supply is not None:
            self._supply.worker_lost()
        if self.ssd is None:
            return
        match news:
            case WorkerReady():
                self.ssd.worker_ready(news)
            case SsdFailed(reason):
                self.ssd.fail(reason)
            case WorkerLost():
                self.ssd.worker_lost()

    def _metrics_text(self, timeout_s: float) -> str:
        return self.loop.call(self.metrics.prometheus, timeout_s=timeout_s)


def _forget(recovery: Recovery, on_record: HostRecords, namespace: Namespace, keys: bytes) -> int:
    """Make pages unfindable that are on record and not in the index yet; how many there were."""
    if not recovery.running:
        return 0
    pending, count = on_record.forget(namespace, keys)
    recovery.removed(pending)
    return count


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
