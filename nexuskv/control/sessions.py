"""Sessions and the processes behind them (I4, I14).

A session is one connection that said hello. A process that may write into segments is watched
through a pidfd: slots it held when its session ended stay in quarantine until it has exited,
because a closed socket does not prove that nothing writes any more.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nexuskv.control.counters import Counters
from nexuskv.control.loop import READ, Loop
from nexuskv.control.namespaces import Namespace
from nexuskv.errors import ConfigError, LeaseExpired, OutOfSpace
from nexuskv.tiers.host import HostTier, SlotArray
from nexuskv.tiers.owner import Process as Owner

_LOG = logging.getLogger("nexuskv.control")


@dataclass(slots=True)
class Process:
    """A local client process, by the kernel's word."""

    pid: int
    start_time: int  # clock ticks since boot: with the pid it names one process for ever
    pidfd: int
    session_count: int = 0
    exited: bool = False
    quarantined: list[SlotArray] = field(default_factory=list)


@dataclass(slots=True)
class Reservation:
    """Slots lent to one session for the missing keys of a chain."""

    id: int
    namespace: Namespace
    epoch: int
    keys: bytes
    held: npt.NDArray[np.bool_]  # keys whose pages were there already
    slots: SlotArray  # one a key, ABSENT where none was lent
    lent: SlotArray  # those that were lent

    @property
    def size_bytes(self) -> int:
        """Bytes of the slots it holds."""
        return len(self.lent) * self.namespace.slot_bytes

    def key(self, index: int) -> bytes:
        """The key of one of its pages."""
        width = self.namespace.key_bytes
        return self.keys[index * width : (index + 1) * width]


class Session:
    """One client connection after hello. Its end revokes its reservations."""

    def __init__(
        self, *, number: int, tenant: str, client: str, process: Process | None, table: "Sessions"
    ) -> None:
        self.number = number
        self.tenant = tenant
        self.client = client
        self.process = process
        self.namespaces: list[Namespace] = []
        self.reservations: dict[int, Reservation] = {}
        self.reserved_bytes = 0
        self._table = table
        self._ended = False

    @property
    def writable(self) -> bool:
        """Whether it may reserve: the daemon will see its process end.

        A session whose process has ended is held by a child of it, which nobody watches.
        """
        return self.process is not None and not self.process.exited

    def namespace(self, number: object) -> Namespace:
        """The namespace that `open_namespace` numbered so for this session."""
        if type(number) is not int or not 0 <= number < len(self.namespaces):
            raise ConfigError(
                f"this session has opened {len(self.namespaces)} namespaces, it names "
                f"{f'number {number}' if type(number) is int else 'one by no number'}"
            )
        return self.namespaces[number]

    def reservation(self, reservation_id: int) -> Reservation:
        """One of its reservations; `LeaseExpired` when it has none such."""
        reservation = self.reservations.get(reservation_id)
        if reservation is None:
            raise LeaseExpired(f"reservation {reservation_id:#x} is not held by this session")
        return reservation

    def add_reservation(self, reservation: Reservation) -> None:
        """Enter a new one."""
        self.reservations[reservation.id] = reservation
        self.reserved_bytes += reservation.size_bytes
        reservation.namespace.reserved_count += len(reservation.lent)

    def take_reservation(self, reservation_id: int) -> Reservation:
        """Remove and return one of its reservations; errors as `reservation`."""
        reservation = self.reservation(reservation_id)
        del self.reservations[reservation_id]
        self.reserved_bytes -= reservation.size_bytes
        reservation.namespace.reserved_count -= len(reservation.lent)
        return reservation

    def end(self) -> None:
        """Revoke what it holds. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._table.ended(self)


class Sessions:
    """All sessions, and the processes that must be seen to exit."""

    def __init__(
        self,
        *,
        loop: Loop,
        tier: HostTier,
        counters: Counters,
        first_number: int,
        sessions_max: int,
    ) -> None:
        self._loop = loop
        self._tier = tier
        self._counters = counters
        self._next_number = first_number
        self._sessions_max = sessions_max
        self._processes: dict[tuple[int, int], Process] = {}
        self.by_number: dict[int, Session] = {}
        self.on_end: list[Callable[[Session], None]] = []  # called once for each session that ends

    def __len__(self) -> int:
        return len(self.by_number)

    def open(self, *, tenant: str, client: str, pid: int | None, pidfd: int | None) -> Session:
        """A new session; takes over `pidfd`, which is None for remote peers.

        Raises:
            OutOfSpace: sessions_max are open; `pidfd` stays the caller's.
        """
        if len(self.by_number) >= self._sessions_max:
            raise OutOfSpace(f"{self._sessions_max} sessions are open (sessions_max)")
        process = None if pid is None or pidfd is None else self._process(pid, pidfd)
        session = Session(
            number=self._next_number, tenant=tenant, client=client, process=process, table=self
        )
        self._next_number += 1
        self.by_number[session.number] = session
        if process is not None:
            process.session_count += 1
        self._counters.add("sessions_opened")
        return session

    def ended(self, session: Session) -> None:
        """Called by `Session.end`: its unfinished slots follow I14."""
        del self.by_number[session.number]
        for callback in self.on_end:
            callback(session)
        lent = [session.take_reservation(number).lent for number in list(session.reservations)]
        for namespace in session.namespaces:
            namespace.opened_by -= 1
        process = session.process
        if process is None:
            return
        process.session_count -= 1
        for slots in lent:
            if process.exited:
                self._tier.free(slots)
            else:
                self._tier.quarantine(slots)
                process.quarantined.append(slots)
                self._counters.add("quarantined_slots", len(slots))
                _LOG.warning(
                    "process %d hung up while it may still write: %d slots wait for its end",
                    process.pid,
                    len(slots),
                )
        self._forget_if_idle(process)

    def close(self) -> None:
        """End all sessions and close every pidfd."""
        for session in list(self.by_number.values()):
            session.end()
        for process in list(self._processes.values()):
            self._forget(process)

    def _process(self, pid: int, pidfd: int) -> Process | None:
        """The watched process of this pid; takes over `pidfd`."""
        found = Owner.of(pid)
        if found is None:
            os.close(pidfd)
            return None
        start_time = found.start_time
        known = self._processes.get((pid, start_time))
        if known is not None:
            os.close(pidfd)
            return known
        process = Process(pid, start_time, pidfd)
        self._processes[pid, start_time] = process
        self._loop.watch(pidfd, READ, lambda _events: self._on_exit(process))
        return process

    def _on_exit(self, process: Process) -> None:
        """The process is gone for good: nothing of it writes any more."""
        process.exited = True
        quarantined, process.quarantined = process.quarantined, []
        if quarantined:
            self._tier.free(np.concatenate(quarantined))
        if process.session_count:
            # Its sockets may still be open in a child; the pidfd has said all it can say.
            self._loop.forget(process.pidfd)
        self._forget_if_idle(process)

    def _forget_if_idle(self, process: Process) -> None:
        if not process.session_count and not process.quarantined:
            self._forget(process)

    def _forget(self, process: Process) -> None:
        if self._processes.pop((process.pid, process.start_time), None) is not None:
            self._loop.forget(process.pidfd)
            os.close(process.pidfd)
