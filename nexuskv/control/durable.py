"""clear and remove: what they take away must not come back, not even after a crash.

Without an ssd tier both are done when they return. With one, a namespace that the catalogue knows
is cleared only once its new epoch is durable there and in host memory, and a removal is answered
only once the rows of its pages are deleted; copies that are under way when it comes are waited for.
While the catalogue cannot be written both are refused as `Unavailable`, and nothing is changed.

Threading: control loop.
"""

from collections.abc import Callable

from nexuskv.config import Config
from nexuskv.control.counters import Counters
from nexuskv.control.events import EventStream
from nexuskv.control.later import Later, Under
from nexuskv.control.namespaces import Namespace, Namespaces
from nexuskv.control.pages import Pages, as_slots
from nexuskv.control.room import Room
from nexuskv.control.sessions import Session
from nexuskv.control.ssd import Ssd
from nexuskv.control.waiting import Waiting
from nexuskv.errors import NexusError, Unavailable
from nexuskv.index.tree import ABSENT

Forget = Callable[[Namespace, bytes], int]
"""Makes pages of an earlier run that are not in the index yet unfindable; how many there were."""


class Durable:
    """Handlers of `clear` and `remove`."""

    def __init__(
        self,
        *,
        config: Config,
        namespaces: Namespaces,
        pages: Pages,
        room: Room,
        waiting: Waiting,
        events: EventStream,
        counters: Counters,
        forget: Forget,
        ssd: Ssd | None,
    ) -> None:
        self._config = config
        self._namespaces = namespaces
        self._pages = pages
        self._room = room
        self._waiting = waiting
        self._events = events
        self._counters = counters
        self._forget = forget
        self._ssd = ssd
        self._under = Under(config.deferred_max, "deferred_max")
        self._clearing: dict[Namespace, list[Later]] = {}

    # --- remove

    def remove(self, session: Session, body: list[object], later: Later) -> None:
        """Unlink pages; what hangs under them becomes fragments."""
        keys = body[1]
        assert isinstance(keys, bytes)
        namespace = session.namespace(body[0])
        namespace.key_count(keys, pages_max=self._config.batch_pages_max)
        if self._ssd is None or not self._ssd.may_hold(namespace):
            later.reply(self._remove(namespace, keys)[0])
            return
        self._ssd.check_writable()
        self._under.enter()
        self._ssd.when_read(lambda error: self._remove_everywhere(namespace, keys, later, error))

    def _remove_everywhere(
        self, namespace: Namespace, keys: bytes, later: Later, error: str | None
    ) -> None:
        ssd = self._ssd
        assert ssd is not None
        if error is not None:
            self._refuse(later, error)
            return
        # A copy that is under way may have its row before the answer is here.
        slots, copying = ssd.slots_of(namespace, keys)
        count, _ = self._remove(namespace, keys)

        def done(error: str | None) -> None:
            if error is not None:
                self._refuse(later, f"{count} pages are removed for now, but not for good: {error}")
                return
            self._under.leave()
            later.reply(count)

        ssd.when_gone(slots, copying, done)

    def _remove(self, namespace: Namespace, keys: bytes) -> tuple[int, list[int]]:
        found = namespace.tree.find(keys, touch=False)
        held = [at for at, place in enumerate(found) if place != ABSENT]
        width = namespace.key_bytes
        removed = namespace.tree.remove(keys)
        self._pages.unlink(namespace, removed)
        count = len(removed) + self._forget(namespace, keys)
        self._counters.add("removed_pages", count)
        if held:
            gone = b"".join(keys[at * width : (at + 1) * width] for at in held)
            self._events.removed(namespace.id, gone)
            self._room.trim()
        return count, held

    # --- clear

    def clear(self, session: Session, body: list[object], later: Later) -> None:
        """Drop every page of a namespace and discard all work begun before."""
        namespace = session.namespace(body[0])
        if self._ssd is None or not self._ssd.may_hold(namespace):
            later.reply(self._clear(namespace), namespace.tree.epoch)
            return
        self._ssd.check_writable()
        self._under.enter()
        others = self._clearing.get(namespace)
        if others is not None:
            # Its epoch is being written for another clear, which is not in force yet.
            others.append(later)
            return
        self._clearing[namespace] = [later]
        epoch = namespace.tree.epoch + 1
        if not self._ssd.epochs.save(namespace, epoch, lambda e: self._cleared(namespace, e)):
            self._cleared(namespace, "the data plane takes no command now")

    def _cleared(self, namespace: Namespace, error: str | None) -> None:
        """The new epoch is durable on the ssd, or it is not known to be."""
        waiting = self._clearing.pop(namespace)
        count = 0
        if error is None:
            try:
                count = self._clear(namespace)
            except NexusError as exc:
                error = str(exc)
        for later in waiting:
            if error is not None:
                self._refuse(later, f"nothing is cleared: {error}")
                continue
            self._under.leave()
            later.reply(count, namespace.tree.epoch)
            count = 0  # the others found nothing any more

    def _clear(self, namespace: Namespace) -> int:
        self._namespaces.save_epoch(namespace, namespace.tree.epoch + 1)
        places = namespace.tree.clear()
        self._pages.unlink(namespace, as_slots(places).tolist())
        self._counters.add("removed_pages", len(places))
        self._waiting.cleared(namespace)
        self._events.cleared(namespace.id, namespace.tree.epoch)
        return len(places)

    def _refuse(self, later: Later, reason: str) -> None:
        self._under.leave()
        later.refuse(Unavailable(reason))
