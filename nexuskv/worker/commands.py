"""What control asks of the worker, and what the worker answers.

Plain frozen records of numbers, text and bytes; `nexuskv.worker.codec` has their form on the
socket between the two processes.

Every accepted command is answered for every page exactly once, in any order of commands. `token` is
the asker's own and comes back in the answer. `statuses` has one `PageStatus` byte a page. An ssd
page is named by the index of its slab file and of its slot in that file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

from nexuskv.types import PageStatus

# --- rows of batches


class CheckRow(NamedTuple):
    """A page in host memory that should be hashed where it lies."""

    descriptor: bytes  # 32 bytes, the wire form
    namespace_id: bytes
    key: bytes


class CopyOutRow(NamedTuple):
    """A page to write to the ssd, and the catalogue's row for it."""

    offset_bytes: int  # in the host segment's data file
    size_bytes: int  # of the page
    file_index: int
    slot_index: int
    record: bytes  # 256 bytes


class CopyInRow(NamedTuple):
    """A page to read from the ssd into a host slot."""

    file_index: int
    slot_index: int
    size_bytes: int
    checksum: int
    namespace_id: bytes
    key: bytes
    offset_bytes: int  # in the host segment's data file


class CopyRow(NamedTuple):
    """A page on the ssd that should be read and hashed, and left where it is."""

    file_index: int
    slot_index: int
    size_bytes: int
    checksum: int
    namespace_id: bytes
    key: bytes


class PlaceRow(NamedTuple):
    """One slot of the ssd tier."""

    file_index: int
    slot_index: int


class FileRow(NamedTuple):
    """A slab file that exists and has a good superblock."""

    file_index: int
    slot_bytes: int


class NamespaceRow(NamedTuple):
    """A namespace as the catalogue keeps it."""

    namespace_id: bytes
    record: bytes  # encoded
    epoch: int


# --- commands


@dataclass(frozen=True, slots=True)
class PopulateChunk:
    """Reserve the memory of one chunk of the host tier."""

    chunk_index: int


@dataclass(frozen=True, slots=True)
class CheckPages:
    """Hash pages where they lie in host memory."""

    token: int
    pages: tuple[CheckRow, ...]


@dataclass(frozen=True, slots=True)
class MakeFile:
    """Make a slab file: preallocated, its superblock written, durable."""

    file_index: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Write pages to the ssd: their bytes durable first, then their rows in one batch."""

    token: int
    pages: tuple[CopyOutRow, ...]


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Read pages from the ssd into host slots and hash what landed."""

    token: int
    pages: tuple[CopyInRow, ...]


@dataclass(frozen=True, slots=True)
class CheckCopies:
    """Read pages of the ssd into memory of the worker's own and hash them."""

    token: int
    pages: tuple[CopyRow, ...]


@dataclass(frozen=True, slots=True)
class DropCopies:
    """Delete rows of the catalogue, durably, so that their slots may be used again."""

    token: int
    places: tuple[PlaceRow, ...]


@dataclass(frozen=True, slots=True)
class SaveNamespace:
    """Put a namespace and its epoch into the catalogue, durably."""

    token: int
    namespace_id: bytes
    record: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class LoadRows:
    """Read rows of the catalogue from a cursor on; an empty one is the start."""

    token: int
    cursor: bytes


# --- answers


@dataclass(frozen=True, slots=True)
class ChunkPopulated:
    """The chunk has its memory, or `error` says why not."""

    chunk_index: int
    error: str | None


@dataclass(frozen=True, slots=True)
class PagesChecked:
    """HIT: the bytes match. CORRUPT: they do not. STALE: the slot changed owner. UNAVAILABLE."""

    token: int
    statuses: bytes


@dataclass(frozen=True, slots=True)
class FileMade:
    """The file is there to stay, or `error` says why not."""

    file_index: int
    error: str | None


@dataclass(frozen=True, slots=True)
class CopiedOut:
    """HIT: the page and its row are durable. Else (NO_SPACE, UNAVAILABLE) a row may be left behind.

    Drop it (`DropCopies`) before the slot is used again.
    """

    token: int
    statuses: bytes


@dataclass(frozen=True, slots=True)
class CopiedIn:
    """Some pages of a `CopyIn`, from `first_index` on: HIT, CORRUPT or UNAVAILABLE."""

    token: int
    first_index: int
    statuses: bytes


@dataclass(frozen=True, slots=True)
class CopiesChecked:
    """HIT, CORRUPT or UNAVAILABLE."""

    token: int
    statuses: bytes


@dataclass(frozen=True, slots=True)
class CopiesDropped:
    """The rows are gone for good, or `error` says why that is not known."""

    token: int
    error: str | None


@dataclass(frozen=True, slots=True)
class NamespaceSaved:
    """The namespace is durable, or `error` says why that is not known."""

    token: int
    error: str | None


@dataclass(frozen=True, slots=True)
class RowsLoaded:
    """n rows of the catalogue. After the last one `cursor` is empty, or `error` ends it early."""

    token: int
    records: bytes  # n * 256
    places: bytes  # n * (file index u32 LE, slot index u32 LE)
    cursor: bytes
    error: str | None


# --- news, which answer nothing


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has begun; its first word about the ssd.

    `ssd_error`: that tier is not served. `ssd_refused`: because its folder is not for us.
    """

    pid: int
    native: str  # which copying code is in use
    ssd_error: str | None
    files: tuple[FileRow, ...]
    namespaces: tuple[NamespaceRow, ...]
    ssd_refused: bool = False


@dataclass(frozen=True, slots=True)
class SsdFailed:
    """After too many errors in a row the worker answers all of the ssd's commands UNAVAILABLE."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker has ended and was reaped; what it had not answered is answered as failed next."""

    reason: str


Command: TypeAlias = (
    PopulateChunk
    | CheckPages
    | MakeFile
    | CopyOut
    | CopyIn
    | CheckCopies
    | DropCopies
    | SaveNamespace
    | LoadRows
)
Answer: TypeAlias = (
    ChunkPopulated
    | PagesChecked
    | FileMade
    | CopiedOut
    | CopiedIn
    | CopiesChecked
    | CopiesDropped
    | NamespaceSaved
    | RowsLoaded
)
News: TypeAlias = WorkerReady | SsdFailed | WorkerLost
Result: TypeAlias = Answer | News

_UNAVAILABLE: Final = bytes((PageStatus.UNAVAILABLE,))


class CommandQueue(Protocol):
    """The worker as control sees it: commands go in, answers come out, wherever it runs."""

    def submit(self, command: Command) -> bool:
        """Queue a command; False when it was not taken: a bound is reached or no worker runs."""
        ...

    def completed(self) -> Sequence[Result]:
        """The answers and news since the last call, without waiting."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while answers wait."""
        ...


def failed(command: Command, reason: str) -> Answer:
    """The answer to a command that could not be carried out."""
    match command:
        case PopulateChunk(chunk_index):
            return ChunkPopulated(chunk_index, reason)
        case MakeFile(file_index):
            return FileMade(file_index, reason)
        case CheckPages(token, pages):
            return PagesChecked(token, _UNAVAILABLE * len(pages))
        case CopyOut(token, pages):
            return CopiedOut(token, _UNAVAILABLE * len(pages))
        case CopyIn(token, pages):
            return CopiedIn(token, 0, _UNAVAILABLE * len(pages))
        case CheckCopies(token, pages):
            return CopiesChecked(token, _UNAVAILABLE * len(pages))
        case DropCopies(token):
            return CopiesDropped(token, reason)
        case SaveNamespace(token):
            return NamespaceSaved(token, reason)
        case LoadRows(token):
            return RowsLoaded(token, b"", b"", b"", reason)
