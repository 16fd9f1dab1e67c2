"""What a carrier gives the dispatcher: a way to answer one peer."""

from dataclasses import dataclass
from typing import Protocol

from nexuskv.control.sessions import Session


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who the kernel says is at the other end of a local socket. `pidfd` is ours to close."""

    pid: int
    uid: int
    pidfd: int


class Peer(Protocol):
    """One connection of a carrier."""

    session: Session | None

    @property
    def credentials(self) -> Credentials | None:
        """Kernel-proved identity; None for remote peers."""
        ...

    def send(self, payload: bytes) -> None:
        """Queue one frame; closes the peer when it does not take its replies."""
        ...

    def close(self) -> None:
        """End the connection and its session. Idempotent."""
        ...
