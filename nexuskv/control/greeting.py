"""hello and open_namespace: who a peer is, what it may do, and the names it uses."""

import nexuskv
from nexuskv.config import Config
from nexuskv.control.namespaces import Namespaces
from nexuskv.control.peer import Peer
from nexuskv.control.sessions import Session, Sessions
from nexuskv.errors import ConfigError, OutOfSpace, ProtocolError
from nexuskv.tiers.host import HostTier

_NAME_CHARS_MAX = 256

Reply = tuple[object, ...]


class Greeting:
    """Opens sessions and namespaces."""

    def __init__(
        self,
        *,
        config: Config,
        incarnation: bytes,
        sessions: Sessions,
        namespaces: Namespaces,
        tier: HostTier,
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._sessions = sessions
        self._namespaces = namespaces
        self._tier = tier

    def hello(self, peer: Peer, body: list[object]) -> Reply:
        """Open a session; its process is the kernel's word, not the peer's."""
        client, pid, tenant, _token, transports = body
        assert isinstance(client, str)
        assert isinstance(tenant, str)
        assert isinstance(transports, list)
        for name, value in (("client", client), ("tenant", tenant)):
            if len(value) > _NAME_CHARS_MAX:
                raise ConfigError(f"{name} has {len(value)} characters, at most {_NAME_CHARS_MAX}")
        proved = peer.credentials
        if proved is not None and pid != proved.pid:
            raise ProtocolError(f"the peer says it is process {pid}, the kernel says {proved.pid}")
        peer.session = self._sessions.open(
            tenant=tenant,
            client=client,
            pid=proved.pid if proved else None,
            pidfd=proved.pidfd if proved else None,
        )
        return (
            self._incarnation,
            peer.session.number,
            nexuskv.__version__,
            {
                "message_bytes_max": self._config.message_bytes_max,
                "batch_pages_max": self._config.batch_pages_max,
                "session_reserved_bytes": self._config.session_reserved_bytes,
                "lease_ttl_max_ms": int(self._config.lease_ttl_max_s * 1000),
                "acquire_wait_max_ms": int(self._config.acquire_wait_max_s * 1000),
                "session_idle_ms": int(self._config.session_idle_s * 1000),
            },
            self._tier.segments_for_hello(),
            "shm" if "shm" in transports else "",
            peer.session.writable,
        )

    def open_namespace(self, session: Session, body: list[object]) -> Reply:
        """Number a namespace for this session."""
        (record,) = body
        assert isinstance(record, bytes)
        namespace = self._namespaces.open(record, tenant=session.tenant)
        if namespace in session.namespaces:
            number = session.namespaces.index(namespace)
            return number, namespace.id, namespace.tree.epoch
        if len(session.namespaces) >= self._config.session_namespaces_max:
            raise OutOfSpace(
                f"this session has opened {self._config.session_namespaces_max} namespaces "
                "(session_namespaces_max)"
            )
        session.namespaces.append(namespace)
        namespace.opened_by += 1
        return len(session.namespaces) - 1, namespace.id, namespace.tree.epoch
