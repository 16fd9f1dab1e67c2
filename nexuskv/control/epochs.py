"""Namespaces and their epochs in the ssd's catalogue: durable there before anything relies on them.

Owns what is known of the catalogue's namespace rows. A page may be copied only once its namespace
has a row; a namespace is cleared only once its new epoch is in the row. Control thread only.
"""

from collections.abc import Callable

from nexuskv.control.asked import Asked, TokenAnswer
from nexuskv.control.namespaces import Namespace
from nexuskv.worker.commands import NamespaceSaved, SaveNamespace

Saved = Callable[[str | None], None]
"""Told once: None when the row is durable, else why that is not known."""


class Epochs:
    """What the catalogue says of namespaces."""

    def __init__(self, *, asked: Asked, namespaces_max: int) -> None:
        self._asked = asked
        self._namespaces_max = namespaces_max
        # Namespace id → epoch in its row; the newest that may be there, and whether it is.
        self._recorded: dict[bytes, tuple[int, bool]] = {}
        self._saving: dict[bytes, list[Saved]] = {}  # first rows on their way

    def found(self, namespace_id: bytes, epoch: int) -> None:
        """The catalogue has this row."""
        self._recorded[namespace_id] = (epoch, True)

    def epoch_of(self, namespace_id: bytes) -> int:
        """The newest epoch that may be on record; 0 without a row."""
        return self._recorded.get(namespace_id, (0, False))[0]

    def has_room(self, namespace: Namespace) -> bool:
        """Whether it has a row, or may get one."""
        return namespace.id in self._recorded or len(self._recorded) < self._namespaces_max

    def has(self, namespace: Namespace) -> bool:
        """Whether the catalogue has, or may have, a row of this namespace, and so pages of it."""
        return namespace.id in self._recorded or namespace.id in self._saving

    def is_durable(self, namespace: Namespace) -> bool:
        """Whether the row says the present epoch, so that pages may be copied."""
        return self._recorded.get(namespace.id) == (namespace.tree.epoch, True)

    def is_saving(self, namespace: Namespace) -> bool:
        """Whether its first row, or that of a new epoch, is on its way."""
        return namespace.id in self._saving

    def enter(self, namespace: Namespace, saved: Saved) -> bool:
        """Write the row of a namespace with its present epoch; False when that cannot be asked now.

        Whoever asks while it is on its way is told of the same answer.
        """
        waiting = self._saving.get(namespace.id)
        if waiting is not None:
            waiting.append(saved)
            return True
        told = [saved]

        def done(error: str | None) -> None:
            del self._saving[namespace.id]
            for each in told:
                each(error)

        if not self.save(namespace, namespace.tree.epoch, done):
            return False
        self._saving[namespace.id] = told
        return True

    def save(self, namespace: Namespace, epoch: int, saved: Saved) -> bool:
        """Write a row with an epoch; False, and `saved` is never called, when that cannot be."""

        def answered(answer: TokenAnswer) -> None:
            assert isinstance(answer, NamespaceSaved)
            # After a failure either epoch may be there: it is written again before any copy.
            self._recorded[namespace.id] = (epoch, answer.error is None)
            saved(answer.error)

        record = namespace.record.encode()
        return self._asked.ask(
            lambda token: SaveNamespace(token, namespace.id, record, epoch), answered
        )
