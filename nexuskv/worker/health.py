"""Whether the ssd is worth asking: too many errors in a row, and it is not asked any more."""

import logging
import threading
from collections.abc import Callable

_LOG = logging.getLogger("nexuskv.worker")


class Health:
    """Counts errors in a row. Thread-safe; never recovers, a successor of the worker may."""

    def __init__(self, *, errors_max: int, on_failed: Callable[[str], None]) -> None:
        """Call `on_failed` with the last error, once, when there have been `errors_max`."""
        self._errors_max = errors_max
        self._on_failed = on_failed
        self._guard = threading.Lock()
        self._errors = 0
        self.failed: str | None = None
        """Why the ssd is out of service; None while it is in."""

    def note_success(self) -> None:
        """Something worked."""
        if self._errors:
            with self._guard:
                self._errors = 0

    def note_error(self, reason: str) -> None:
        """Something did not."""
        with self._guard:
            self._errors += 1
            if self.failed is not None:
                return
            _LOG.warning("ssd error %d of %d: %s", self._errors, self._errors_max, reason)
            if self._errors < self._errors_max:
                return
            self.failed = reason
        _LOG.error("the ssd is out of service after %d errors: %s", self._errors_max, reason)
        self._on_failed(reason)
