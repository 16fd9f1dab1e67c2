"""Deadlines of the control plane that belong to no carrier: leases that end."""

from nexuskv.control.pages import Pages


class Expiry:
    """Ends leases when their time is over and frees what only they kept."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def next_due(self) -> float | None:
        """When the first lease ends."""
        return self._pages.leases.next_expiry()

    def tick(self, now_s: float) -> None:
        """End the leases that are over."""
        self._pages.unleased(self._pages.leases.expire(now_s))
