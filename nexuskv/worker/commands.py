"""What control asks of the worker, and what the worker answers.

Plain frozen records of numbers, text and bytes: they cross a thread now and may cross a process.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from nexuskv.types import PageStatus


@dataclass(frozen=True, slots=True)
class PopulateChunk:
    """Reserve the memory of one chunk of the host tier."""

    chunk_index: int


@dataclass(frozen=True, slots=True)
class ChunkPopulated:
    """The chunk has its memory, or `error` says why not."""

    chunk_index: int
    error: str | None


@dataclass(frozen=True, slots=True)
class CheckPage:
    """Hash a page where it lies. `descriptor` is its 32-byte wire form."""

    token: int  # the asker's own; returned in the answer
    descriptor: bytes
    namespace_id: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class PageChecked:
    """HIT: the bytes match. CORRUPT: they do not. STALE: the slot changed owner. UNAVAILABLE."""

    token: int
    status: PageStatus


Command: TypeAlias = PopulateChunk | CheckPage
Result: TypeAlias = ChunkPopulated | PageChecked


class CommandQueue(Protocol):
    """The worker as control sees it: commands go in, answers come out, wherever it runs."""

    def submit(self, command: Command) -> bool:
        """Queue a command; False when the queue is full and the command was not taken."""
        ...

    def completed(self) -> list[Result]:
        """The answers since the last call, without waiting."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while answers wait."""
        ...


def failed(command: Command, reason: str) -> Result:
    """The answer to a command that could not be carried out."""
    match command:
        case PopulateChunk():
            return ChunkPopulated(command.chunk_index, reason)
        case CheckPage():
            return PageChecked(command.token, PageStatus.UNAVAILABLE)
