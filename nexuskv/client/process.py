"""All that one store holds in one process: links, mappings, what waits, the keeper.

A forked child gets a new one and drops its copy of the parent's sockets without a word, since the
sessions are the parent's. Nothing is opened before the first use. Thread-safe.
"""

import itertools
import os
import random

from nexuskv.client.batches import MessageLimits
from nexuskv.client.chores import Chores
from nexuskv.client.counters import LOG, Counters
from nexuskv.client.health import Health
from nexuskv.client.hostmap import HostMaps
from nexuskv.client.keeper import Keeper
from nexuskv.client.link import Link
from nexuskv.client.network import Network
from nexuskv.client.pool import Pool
from nexuskv.client.releases import Releases
from nexuskv.client.terms import Terms
from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.errors import NexusError


class ClientProcess:
    """The parts, wired together."""

    def __init__(self, url: str, config: Config, clock: Clock) -> None:
        self.url = url
        self.config = config
        self.clock = clock
        self.counters = Counters()
        self.maps = HostMaps()
        self.network = Network()
        self.open_views = 0
        # Of the daemon that was reached last; before the first, what the configuration says.
        self.limits: MessageLimits = config
        self.health = Health(
            backoff_min_s=config.backoff_min_s,
            backoff_max_s=config.backoff_max_s,
            clock=clock,
            chance=random.Random(os.urandom(16)),
        )
        self.pool = Pool(
            self._open_link,
            links_max=config.client_connections,
            health=self.health,
            clock=clock,
            on_away=self._on_away,
            while_away=self._while_away,
        )
        self.keeper = Keeper(self._run_chores, clock=clock)
        self.terms = Terms(wake_by=self.keeper.wake_by)
        self.releases = Releases(
            pending_max=config.releases_pending_max,
            delay_s=config.release_delay_s,
            clock=clock,
            wake_by=self.keeper.wake_by,
        )
        self._chores = Chores(
            open_link=self._open_link,
            pool=self.pool,
            health=self.health,
            terms=self.terms,
            releases=self.releases,
            counters=self.counters,
            config=config,
            clock=clock,
        )
        # os.urandom gives the GIL up; a random start and a counter do not (I13).
        self._request_start = os.urandom(8)
        self._request_count = itertools.count()

    def new_request_id(self) -> bytes:
        """16 bytes that no other acquire uses."""
        return self._request_start + next(self._request_count).to_bytes(8, "little")

    def try_connect(self) -> None:
        """Open one link, so that the first call finds it; a failure begins the reconnecting."""
        try:
            with self.pool.lend(self.clock.now() + self.config.connect_timeout_s):
                pass
        except NexusError as exc:
            LOG.warning("no daemon yet, all pages miss until one answers: %s", exc)

    def close(self) -> None:
        """Stop the keeper, send what waits, close everything. Idempotent and bounded."""
        patience_s = self.config.request_timeout_s + self.config.connect_timeout_s
        if self.keeper.close(timeout_s=patience_s):
            self._chores.last_words()
        self.pool.close()
        self.maps.close()
        self.network.close()

    def drop(self) -> None:
        """After a fork, in the child: forget the parent's connections. Its mappings stay mapped."""
        self.pool.drop()
        self._chores.drop()

    def _open_link(self) -> Link:
        link = Link.open(self.url, self.config, self.clock, maps=self.maps, network=self.network)
        self.limits = link.session.limits
        self._chores.session_idle_s = link.session.limits.session_idle_s
        if link.host is None:
            self.counters.log_once(
                "unmapped", f"the pages of {self.url} cannot be reached from here: gets miss"
            )
        if link.remote:
            self.keeper.wake_by(self.clock.now() + self._chores.heartbeat_s)
        return link

    def _run_chores(self) -> float:
        return self._chores.run()

    def _on_away(self) -> None:
        LOG.warning("the daemon at %s is away: pages miss until it is back", self.url)
        self._while_away()

    def _while_away(self) -> None:
        # Nothing new as a rule; but a keeper that could not be started is tried again.
        self.keeper.wake_by(self.health.retry_at_s)
