"""Every error NexusKV raises. The class tells the caller what to do next.

Store faults never reach an engine as exceptions: the client turns them into page statuses. What a
caller can see is `ConfigError` for its own mistakes and, from the low-level link, the rest.
"""

import errno
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

SHORTAGE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""What the system says when this process has no descriptor or memory left: nobody else's fault."""


class NexusError(Exception):
    """Base of all NexusKV errors."""


class ConfigError(NexusError, ValueError):
    """The call or the configuration is wrong; fix it. Raised before anything is sent or opened."""


class Unavailable(NexusError):
    """The store cannot serve this now; retry later or carry on without it."""


class DaemonUnreachable(Unavailable):
    """No daemon answers at the address."""


class TransferTimeout(Unavailable):
    """A request or a transfer did not end within its deadline."""


class TransferFailed(Unavailable):
    """A connection or a transfer broke half-way."""


class Refused(NexusError):
    """The store understood and said no; carry on without."""


class OutOfSpace(Refused):
    """Nothing can be evicted to make room, or a bound of the configuration is reached."""


class LeaseExpired(Refused):
    """A lease, reservation or session is unknown here, has ended, or is another tenant's."""


class EpochChanged(Refused):
    """The namespace was cleared since the work began; the work is discarded."""


class CorruptPage(NexusError):
    """A page's bytes do not match its checksum; recompute. Its bytes are never returned."""


class ProtocolError(NexusError):
    """Versions or frames disagree; the connection is closed."""


@contextmanager
def translating(table: Mapping[type[BaseException], type[NexusError]]) -> Generator[None]:
    """Turn a library's errors into ours where they enter, keeping the cause.

    Args:
        table: library error class → our class; the first entry that matches wins.

    Raises:
        NexusError: of the class the table names, with the library's message.
    """
    try:
        yield
    except tuple(table) as exc:
        for theirs, ours in table.items():
            if isinstance(exc, theirs):
                raise ours(str(exc) or type(exc).__name__) from exc
        raise
