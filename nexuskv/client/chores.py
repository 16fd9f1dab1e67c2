"""What the keeper does when its alarm rings: reconnect, renew, release, heartbeat.

Runs on the keeper's thread alone and uses a link of its own, so that neither busy callers nor a
full pool delay a renewal. Every step is bounded by an exchange's timeout; a failure marks the
daemon away.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from nexuskv.client.counters import LOG, Counters
from nexuskv.client.health import Health
from nexuskv.client.link import Link
from nexuskv.client.pool import Pool
from nexuskv.client.releases import Releases
from nexuskv.client.terms import Term, Terms, as_ms
from nexuskv.clock import Clock
from nexuskv.config import Config
from nexuskv.errors import NexusError, Refused, Unavailable
from nexuskv.protocol import Type

HEARTBEATS_PER_IDLE = 3
"""Heartbeats a silent remote session sends within the time after which it would be dropped."""


class Chores:
    """The work, and the private link it is done on."""

    def __init__(
        self,
        *,
        open_link: Callable[[], Link],
        pool: Pool,
        health: Health,
        terms: Terms,
        releases: Releases,
        counters: Counters,
        config: Config,
        clock: Clock,
    ) -> None:
        self._open_link = open_link
        self._pool = pool
        self._health = health
        self._terms = terms
        self._releases = releases
        self._counters = counters
        self._config = config
        self._clock = clock
        self._link: Link | None = None
        self.session_idle_s = config.session_idle_s  # until a daemon has said what it bears

    @property
    def heartbeat_s(self) -> float:
        """How long a remote session may be silent."""
        return self.session_idle_s / HEARTBEATS_PER_IDLE

    def run(self) -> float:
        """Do what is due; when to come back."""
        if not self._health.up and self._clock.now() >= self._health.retry_at_s:
            self._reconnect()
        if self._health.up:
            self._work()
        return self._next_s() if self._health.up else self._health.retry_at_s

    def last_words(self) -> None:
        """Send the releases that wait, as far as one exchange goes, and close the link."""
        if self._health.up and self._releases.due_s() < math.inf:
            try:
                with self._pool.lend(self._clock.now()) as link:
                    self._say(link)
            except NexusError as exc:
                LOG.debug("releases are left to end by themselves: %s", exc)
        self.close()

    def close(self) -> None:
        """Close the private link. Idempotent."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def drop(self) -> None:
        """After a fork, in the child: forget the parent's link."""
        if self._link is not None:
            self._link.drop()

    def _work(self) -> None:
        era = self._health.era
        try:
            for term in self._terms.due(self._clock.now()):
                with self._some_link() as link:
                    self._renew(term, link)
            if self._releases.due_s() <= self._clock.now():
                with self._some_link() as link:
                    self._say(link)
            self._beat()
        except NexusError as exc:
            LOG.debug("keeper: %s", exc)
            if self._link is not None and self._link.broken:
                self._pool.daemon_failed(era)

    def _reconnect(self) -> None:
        self.close()
        try:
            link = self._open_link()
        except NexusError as exc:
            LOG.debug("reconnect failed: %s", exc)
            self._health.attempt_failed()
            return
        self._health.recovered()
        link.era = self._health.era
        self._releases.forget(but=link.incarnation)
        # For whoever calls next: it may be the only one that can be had.
        self._pool.adopt(link)
        self._counters.count("reconnects")
        LOG.warning("the daemon answers again")

    def _some_link(self) -> AbstractContextManager[Link]:
        """The own link, or a borrowed one where no more can be opened."""
        link = self._link
        if link is not None and not link.broken and link.era == self._health.era:
            return nullcontext(link)
        self.close()
        era = self._health.era
        try:
            link = self._link = self._open_link()
        except Refused:
            return self._pool.lend(self._clock.now() + self._config.request_timeout_s)
        except NexusError:
            self._pool.daemon_failed(era)
            raise
        link.era = era
        return nullcontext(link)

    def _renew(self, term: Term, link: Link) -> None:
        if link.incarnation != term.incarnation:
            term.lost = True
            return
        sent_s = self._clock.now()
        try:
            (granted_ms,) = link.call(
                Type.RENEW, (term.lease_id, as_ms(term.ttl_s)), deadline_s=math.inf
            )
        except Refused:
            term.lost = True
            return
        assert isinstance(granted_ms, int)
        if granted_ms:
            term.renewed(ttl_s=granted_ms / 1000, sent_s=sent_s)
        else:
            term.lost = True

    def _say(self, link: Link) -> None:
        """Send what waits in front of a ping, whose reply bounds the wait."""
        self._releases.forget(but=link.incarnation)
        try:
            for namespace_id, record in self._releases.reported_namespaces().items():
                link.number_of(namespace_id, record, deadline_s=math.inf)
        except Unavailable:
            raise
        except NexusError as exc:
            LOG.debug("corrupt pages cannot be reported: %s", exc)
            self._releases.forget()
        riders = self._releases.frames_for(link)
        if riders:
            link.call(Type.PING, (b"",), deadline_s=math.inf, riders=riders)
            self._counters.count("releases_sent_alone")

    def _beat(self) -> None:
        before_s = self._clock.now() - self.heartbeat_s
        while (silent := self._pool.take_silent(before_s)) is not None:
            try:
                silent.call(Type.PING, (b"",), deadline_s=math.inf)
            finally:
                self._pool.give_back(silent)
        own = self._link
        if own is not None and own.remote and not own.broken and own.used_s < before_s:
            own.call(Type.PING, (b"",), deadline_s=math.inf)

    def _next_s(self) -> float:
        beat_s = min(self._pool.silent_since_s(), self._own_silence_s()) + self.heartbeat_s
        return min(self._terms.next_s(), self._releases.due_s(), beat_s)

    def _own_silence_s(self) -> float:
        own = self._link
        return own.used_s if own is not None and own.remote and not own.broken else math.inf
