"""Commands that the worker has not answered yet, and which answers may be given to them.

The oldest deadline is always in front: every command has as long as the others, from when it was
sent or last answered in part. Control thread only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from nexuskv.errors import ProtocolError
from nexuskv.types import PageStatus
from nexuskv.worker import commands
from nexuskv.worker.codec import Ping, Pong, Record
from nexuskv.worker.commands import Answer, Command, CopiedIn, CopyIn, RowsLoaded

_ANSWERS: Final[dict[type[Command | Ping], type[Answer | Pong]]] = {
    Ping: Pong,
    commands.PopulateChunk: commands.ChunkPopulated,
    commands.CheckPages: commands.PagesChecked,
    commands.MakeFile: commands.FileMade,
    commands.CopyOut: commands.CopiedOut,
    commands.CopyIn: commands.CopiedIn,
    commands.CheckCopies: commands.CopiesChecked,
    commands.DropCopies: commands.CopiesDropped,
    commands.SaveNamespace: commands.NamespaceSaved,
    commands.LoadRows: commands.RowsLoaded,
}
_NAMES: Final = ("token", "chunk_index", "file_index")  # that an answer shares with its command
_PLACE_BYTES: Final = 8
_RECORD_BYTES: Final = 256
_STATUSES: Final = bytes(PageStatus)

Question: TypeAlias = Command | Ping


@dataclass(slots=True)
class _Pending:
    question: Question
    due_s: float
    open_pages: bytearray  # of a CopyIn: 1 for each page without an answer


class Unanswered:
    """A bounded table of questions by their sequence."""

    def __init__(self, *, commands_max: int, timeout_s: float) -> None:
        self._commands_max = commands_max
        self._timeout_s = timeout_s
        self.next_sequence = 1
        self._pending: dict[int, _Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def full(self) -> bool:
        """Whether no further command may be sent."""
        return len(self._pending) >= self._commands_max

    @property
    def due_s(self) -> float | None:
        """When the first deadline passes; None without questions."""
        return next((pending.due_s for pending in self._pending.values()), None)

    @property
    def oldest(self) -> str:
        """The name of the question with the first deadline, for log lines."""
        for pending in self._pending.values():
            return type(pending.question).__name__
        return "nothing"

    def add(self, question: Question, now_s: float) -> None:
        """Remember a question that is sent now, as `next_sequence`."""
        sequence = self.next_sequence
        self.next_sequence += 1
        pages = len(question.pages) if isinstance(question, CopyIn) else 0
        self._pending[sequence] = _Pending(
            question, now_s + self._timeout_s, bytearray(b"\1" * pages)
        )

    def settle(self, sequence: int, answer: Record, now_s: float) -> Answer | None:
        """Take an answer; None when nobody waits for it (a pong).

        Raises:
            ProtocolError: nothing was asked that it answers.
        """
        pending = self._pending.get(sequence)
        if pending is None or type(answer) is not _ANSWERS[type(pending.question)]:
            raise ProtocolError(f"nobody asked for this {type(answer).__name__}")
        _check(pending.question, answer)
        if isinstance(answer, CopiedIn) and not _settle_pages(pending.open_pages, answer):
            # The rest has as long as a new question: to the end of the order of deadlines.
            pending.due_s = now_s + self._timeout_s
            self._pending[sequence] = self._pending.pop(sequence)
        else:
            del self._pending[sequence]
        return answer if isinstance(answer, Answer) else None

    def fail_all(self, reason: str) -> Iterator[Answer]:
        """Failed answers to everything, and nothing is unanswered any more."""
        pending, self._pending = self._pending, {}
        for each in pending.values():
            if isinstance(each.question, CopyIn):
                yield from _open_runs(each.question.token, each.open_pages)
            elif not isinstance(each.question, Ping):
                yield commands.failed(each.question, reason)


def _check(question: Question, answer: Record) -> None:
    """That the answer is about the question's token, file or chunk, and about all its pages."""
    for name in _NAMES:
        if getattr(question, name, None) != getattr(answer, name, None):
            raise ProtocolError(f"{type(answer).__name__} answers another {name}")
    statuses = getattr(answer, "statuses", b"")
    if statuses.strip(_STATUSES):
        raise ProtocolError(f"{type(answer).__name__} has an unknown status")
    pages = len(getattr(question, "pages", ()))
    if pages != len(statuses) and not isinstance(answer, CopiedIn):
        raise ProtocolError(f"{type(answer).__name__} has {len(statuses)} pages, not {pages}")
    if isinstance(answer, RowsLoaded):
        rows, rest = divmod(len(answer.records), _RECORD_BYTES)
        if rest or len(answer.places) != rows * _PLACE_BYTES:
            raise ProtocolError("rows and their places do not go together")


def _settle_pages(open_pages: bytearray, answer: CopiedIn) -> bool:
    """Mark pages as answered; whether all are now."""
    pages = slice(answer.first_index, answer.first_index + len(answer.statuses))
    nothing = not answer.statuses and len(open_pages)
    if nothing or bytes(open_pages[pages]) != b"\1" * len(answer.statuses):
        raise ProtocolError("CopiedIn answers pages that are answered, or none")
    open_pages[pages] = bytes(len(answer.statuses))
    return 1 not in open_pages


def _open_runs(token: int, open_pages: bytearray) -> Iterator[CopiedIn]:
    """A failed answer for each run of pages without an answer."""
    end = 0
    while (first := open_pages.find(1, end)) >= 0:
        end = open_pages.find(0, first)
        end = len(open_pages) if end < 0 else end
        yield CopiedIn(token, first, bytes((PageStatus.UNAVAILABLE,)) * (end - first))
