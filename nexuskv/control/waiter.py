"""One acquire that has been answered in part: what it still waits for, and its window."""

from dataclasses import dataclass, field

from nexuskv.control.namespaces import Namespace
from nexuskv.control.peer import Peer
from nexuskv.control.sessions import Session

Place = tuple[int, int]  # (chain index, page index) in the acquire
Page = tuple[Namespace, bytes]
Places = dict[Page, list[Place]]


@dataclass(slots=True, eq=False)
class Waiter:
    """A page is in one of `missing`, `far`, `loading` and `ready`, or it was sent or given up."""

    peer: Peer
    session: Session
    frame_id: int
    request_id: bytes
    lease_id: int
    ttl_s: float
    wait_until_s: float  # for pages that nobody holds
    load_until_s: float  # for pages that are held, but not in host memory
    chains: list[Namespace] = field(default_factory=list)
    missing: Places = field(default_factory=dict)
    far: Places = field(default_factory=dict)  # still to be asked for, in the order of the chains
    loading: Places = field(default_factory=dict)
    ready: Places = field(default_factory=dict)
    kept: dict[Page, int] = field(default_factory=dict)  # host slots of ready pages, kept there
    ready_bytes: int = 0  # of the pages that have come and not been sent
    loading_bytes: int = 0
    sent: dict[int, int] = field(default_factory=dict)  # slot → bytes, sent and not yet released
    window_bytes: int = 0  # all of `sent`
    is_short: bool = False  # some pages have been given up

    @property
    def is_last(self) -> bool:
        """Whether nothing is waited for any more."""
        return not (self.missing or self.far or self.loading)

    @property
    def outstanding_bytes(self) -> int:
        """What the window must hold: sent and not released, ready, and on its way."""
        return self.window_bytes + self.ready_bytes + self.loading_bytes

    @property
    def ends_s(self) -> float:
        """When the later of its waits is over."""
        return max(self.wait_until_s, self.load_until_s)
