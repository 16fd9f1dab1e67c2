"""reserve, commit and abort: the way of a put (I4)."""

import numpy as np
import numpy.typing as npt

from nexuskv import UNKNOWN
from nexuskv.config import Config
from nexuskv.control.copying import Copying
from nexuskv.control.counters import Counters
from nexuskv.control.events import EventStream
from nexuskv.control.pages import Pages, as_slots, on_record
from nexuskv.control.room import Room, Writer
from nexuskv.control.sessions import Reservation, Session
from nexuskv.control.waiting import Waiting
from nexuskv.errors import ConfigError, OutOfSpace, Refused
from nexuskv.index.chains import Parent
from nexuskv.key import split_keys
from nexuskv.protocol import ALL_RESERVATIONS, ParentState
from nexuskv.tiers.host import ABSENT
from nexuskv.types import DESCRIPTOR_BYTES, PageStatus

Reply = tuple[object, ...]
_STORED = np.uint8(PageStatus.STORED)
_EXISTS = np.uint8(PageStatus.EXISTS)
Mask = npt.NDArray[np.bool_]
Checksums = npt.NDArray[np.uint64]


class Writing:
    """Handlers of the messages that store pages."""

    def __init__(
        self,
        *,
        config: Config,
        pages: Pages,
        room: Room,
        waiting: Waiting,
        events: EventStream,
        counters: Counters,
        first_reservation: int,
        copying: Copying | None = None,
    ) -> None:
        self._config = config
        self._pages = pages
        self._room = room
        self._waiting = waiting
        self._events = events
        self._counters = counters
        self._next_id = first_reservation
        self._copying = copying

    def reserve(self, session: Session, body: list[object]) -> Reply:
        """Lend slots for the keys that are missing, in chain order, as far as there is room."""
        number, keys = body
        assert isinstance(keys, bytes)
        if not session.writable:
            raise Refused("only a local process that the daemon can see may write into segments")
        namespace = session.namespace(number)
        count = namespace.key_count(keys, pages_max=self._config.batch_pages_max)
        held = namespace.tree.find(keys)  # a use: the chain is about to grow
        missing = np.flatnonzero(as_slots(held) == ABSENT)
        if not len(missing):
            return 0, bytes([PageStatus.EXISTS]) * count, bytes(DESCRIPTOR_BYTES * count)
        allowed = self._allowed(session, namespace.slot_bytes, len(missing))
        process = session.process
        assert process is not None
        writer = Writer(process.pid, process.start_time, session.number)
        lent = self._room.take(namespace, allowed, writer=writer, held=held)
        slots = np.full(count, ABSENT, dtype=np.uint32)
        slots[missing[: len(lent)]] = lent
        statuses = np.full(count, PageStatus.EXISTS.value, dtype=np.uint8)
        statuses[missing] = PageStatus.NO_SPACE.value
        statuses[missing[: len(lent)]] = PageStatus.MISS.value
        self._counters.add("reserved_pages", len(lent))
        self._counters.add("no_space_pages", len(missing) - len(lent))
        descriptors = self._pages.tier.descriptors(slots, namespace.page_bytes)
        if not len(lent):
            return 0, statuses.tobytes(), descriptors
        reservation = Reservation(
            id=self._next_id,
            namespace=namespace,
            epoch=namespace.tree.epoch,
            keys=keys,
            held=statuses == PageStatus.EXISTS.value,
            slots=slots,
            lent=lent,
        )
        self._next_id += 1
        session.add_reservation(reservation)
        return reservation.id, statuses.tobytes(), descriptors

    def commit(self, session: Session, body: list[object]) -> Reply:
        """Publish the filled slots of a reservation; first commit wins."""
        reservation_id, parent_state, parent, done, checksums = body
        assert isinstance(reservation_id, int)
        assert isinstance(parent, bytes)
        assert isinstance(done, bytes)
        assert isinstance(checksums, bytes)
        reservation = session.reservation(reservation_id)
        count = len(reservation.slots)
        if len(done) != count or len(checksums) != 8 * count:
            raise ConfigError(
                f"a commit of {count} pages has {len(done)} marks, {len(checksums)} checksum bytes"
            )
        parent_of_first = _parent(reservation, parent_state, parent)
        session.take_reservation(reservation_id)
        lent = reservation.slots != ABSENT
        filled = np.frombuffer(done, dtype=np.uint8).astype(bool) & lent
        statuses = np.full(count, PageStatus.DROPPED.value, dtype=np.uint8)
        if not filled.all():
            unfilled = reservation.slots[lent & ~filled]
            self._pages.tier.free(unfilled)
            self._counters.add("aborted_pages", len(unfilled))
            statuses[~lent] = PageStatus.NO_SPACE.value
            statuses[reservation.held] = PageStatus.EXISTS.value
        if reservation.epoch != reservation.namespace.tree.epoch:
            dropped = reservation.slots[filled]
            self._pages.tier.free(dropped)
            self._counters.add("commits_dropped", len(dropped))
            return (statuses.tobytes(),)
        sums = np.frombuffer(checksums, dtype="<u8")
        for start, end in _spans(filled):
            before = parent_of_first if start == 0 else reservation.key(start - 1)
            won = self._publish(reservation, before, start, end, sums)
            statuses[start:end] = np.where(won, _STORED, _EXISTS)
        self._room.trim()
        self._room.committed(reservation.namespace, reservation.slots[filled])
        return (statuses.tobytes(),)

    def abort(self, session: Session, body: list[object]) -> Reply:
        """The writer says that nothing writes into its slots any more."""
        (reservation_id,) = body
        assert isinstance(reservation_id, int)
        every = reservation_id == ALL_RESERVATIONS
        ids = list(session.reservations) if every else [reservation_id]
        count = 0
        for each in ids:
            reservation = session.take_reservation(each)
            self._pages.tier.free(reservation.lent)
            count += len(reservation.lent)
        self._counters.add("aborted_pages", count)
        return (count,)

    def _allowed(self, session: Session, slot_bytes: int, wanted: int) -> int:
        """How many slots this session may get now."""
        quarantined = self._pages.tier.quarantined_bytes
        if quarantined >= self._config.quarantine_bytes and quarantined:
            self._counters.add("quarantine_refusals")
            raise OutOfSpace(
                f"{quarantined} bytes are in quarantine, at most {self._config.quarantine_bytes} "
                "(quarantine_bytes)"
            )
        left = self._config.session_reserved_bytes - session.reserved_bytes
        return min(wanted, max(0, left // slot_bytes))

    def _publish(
        self,
        reservation: Reservation,
        before: Parent,
        start: int,
        end: int,
        sums: Checksums,
    ) -> Mask:
        """Publish pages [start, end) of a reservation under `before`; True where it won."""
        namespace = reservation.namespace
        width = namespace.key_bytes
        keys = reservation.keys[start * width : end * width]
        slots = reservation.slots[start:end]
        losers = namespace.tree.insert(before, keys, slots.tolist())
        won = ~np.isin(slots, losers) if losers else np.ones(len(slots), dtype=bool)
        for first, last in _spans(won):
            above = before if first == 0 else reservation.key(start + first - 1)
            self._announce(reservation, above, start + first, start + last, sums)
        if losers:
            self._pages.tier.free(slots[~won])
        self._counters.add("committed_pages", len(slots) - len(losers))
        self._counters.add("commits_lost", len(losers))
        return won

    def _announce(
        self, reservation: Reservation, above: Parent, start: int, end: int, sums: Checksums
    ) -> None:
        """Write the headers of won pages; tell followers, and the acquires that wait for them."""
        namespace = reservation.namespace
        width = namespace.key_bytes
        state, parent = on_record(above)
        keys = reservation.keys[start * width : end * width]
        self._pages.tier.publish(
            reservation.slots[start:end],
            namespace_id=namespace.id,
            keys=keys,
            key_bytes=width,
            parent_state=state,
            parent=parent,
            epoch=reservation.epoch,
            checksums=sums[start:end],
        )
        if self._copying is not None:
            self._copying.committed(namespace, keys, reservation.slots[start:end])
        self._events.stored(namespace.id, parent_state=state, parent=parent, keys=keys)
        if self._waiting.wants(namespace):
            self._waiting.committed(namespace, split_keys(keys, width))


def _parent(reservation: Reservation, parent_state: object, parent: bytes) -> Parent:
    """The parent that a commit names, checked."""
    width = reservation.namespace.key_bytes
    if parent_state == ParentState.KEY:
        if len(parent) != width:
            raise ConfigError(
                f"keys of this namespace have {width} bytes, the parent {len(parent)}"
            )
        return parent
    if parent_state == ParentState.UNKNOWN:
        return UNKNOWN
    if parent_state == ParentState.ROOT:
        return None
    raise ConfigError(f"parent_state {parent_state} is none of 0 (root), 1 (key), 2 (unknown)")


def _spans(filled: Mask) -> list[tuple[int, int]]:
    """The runs of True as (start, end)."""
    if filled.all():
        return [(0, len(filled))] if len(filled) else []
    edges = np.flatnonzero(np.diff(np.concatenate(([0], filled.view(np.uint8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
