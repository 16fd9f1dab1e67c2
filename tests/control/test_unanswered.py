"""Which answers may be given to what was asked, and what is failed when nobody can answer."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexuskv.control.unanswered import Unanswered
from nexuskv.errors import ProtocolError
from nexuskv.types import PageStatus
from nexuskv.worker.codec import Ping, Pong, Record
from nexuskv.worker.commands import (
    CheckPages,
    CheckRow,
    ChunkPopulated,
    Command,
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyInRow,
    FileMade,
    LoadRows,
    MakeFile,
    PagesChecked,
    PopulateChunk,
    RowsLoaded,
)

UNAVAILABLE = bytes((PageStatus.UNAVAILABLE,))
HIT = bytes((PageStatus.HIT,))
PAGE = CheckRow(bytes(32), bytes(16), b"an 8-byte key")
LOAD = CopyInRow(0, 0, 4096, 1, bytes(16), b"an 8-byte key", 0)


@pytest.fixture
def unanswered() -> Unanswered:
    return Unanswered(commands_max=3, timeout_s=10.0)


def copy_in(page_count: int) -> CopyIn:
    return CopyIn(5, (LOAD,) * page_count)


def test_an_answer_settles_its_command(unanswered: Unanswered) -> None:
    unanswered.add(PopulateChunk(4), 0.0)
    answer = ChunkPopulated(4, None)
    assert unanswered.settle(1, answer, 1.0) == answer
    assert len(unanswered) == 0
    with pytest.raises(ProtocolError):
        unanswered.settle(1, answer, 1.0)


def test_a_pong_is_for_nobody(unanswered: Unanswered) -> None:
    unanswered.add(Ping(), 0.0)
    assert unanswered.settle(1, Pong(), 1.0) is None
    assert len(unanswered) == 0


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        pytest.param(PopulateChunk(4), ChunkPopulated(5, None), id="another chunk"),
        pytest.param(MakeFile(4, 1), FileMade(5, None), id="another file"),
        pytest.param(CheckPages(4, ()), PagesChecked(5, b""), id="another token"),
        pytest.param(PopulateChunk(4), FileMade(4, None), id="another kind"),
        pytest.param(PopulateChunk(4), Pong(), id="a pong"),
        pytest.param(CheckPages(4, (PAGE,)), PagesChecked(4, b""), id="too few pages"),
        pytest.param(CheckPages(4, (PAGE,)), PagesChecked(4, HIT * 2), id="too many pages"),
        pytest.param(CheckPages(4, (PAGE,)), PagesChecked(4, b"\x30"), id="no such status"),
        pytest.param(CheckPages(4, (PAGE,) * 3), PagesChecked(4, b"\0\xff\0"), id="one no status"),
        pytest.param(copy_in(2), CopiedOut(5, HIT * 2), id="of a copy out"),
        pytest.param(copy_in(2), CopiedIn(5, 1, HIT * 2), id="past the end"),
        pytest.param(copy_in(2), CopiedIn(5, 1 << 60, HIT), id="far past the end"),
        pytest.param(copy_in(2), CopiedIn(5, 0, b""), id="no page"),
        pytest.param(LoadRows(4, b""), RowsLoaded(4, bytes(256), b"", b"", None), id="no places"),
        pytest.param(LoadRows(4, b""), RowsLoaded(4, bytes(8), b"", b"", None), id="half a row"),
    ],
)
def test_an_answer_to_something_else_is_refused(
    unanswered: Unanswered, command: Command, answer: Record
) -> None:
    unanswered.add(command, 0.0)
    with pytest.raises(ProtocolError):
        unanswered.settle(1, answer, 1.0)
    assert len(unanswered) == 1


def test_a_page_is_answered_once(unanswered: Unanswered) -> None:
    unanswered.add(copy_in(3), 0.0)
    unanswered.settle(1, CopiedIn(5, 1, HIT), 0.0)
    with pytest.raises(ProtocolError):
        unanswered.settle(1, CopiedIn(5, 0, HIT * 2), 0.0)


def test_a_load_without_pages_is_answered_by_nothing(unanswered: Unanswered) -> None:
    unanswered.add(copy_in(0), 0.0)
    unanswered.settle(1, CopiedIn(5, 0, b""), 0.0)
    assert len(unanswered) == 0


@given(st.permutations(range(7)), st.integers(0, 7))
def test_every_page_is_answered_exactly_once(order: list[int], answered: int) -> None:
    unanswered = Unanswered(commands_max=3, timeout_s=10.0)
    unanswered.add(copy_in(7), 0.0)
    for index in order[:answered]:
        unanswered.settle(1, CopiedIn(5, index, HIT), 0.0)
    left = list(unanswered.fail_all("lost"))
    pages = [
        each.first_index + at
        for each in left
        if isinstance(each, CopiedIn)
        for at in range(len(each.statuses))
    ]
    assert sorted(pages + order[:answered]) == list(range(7))
    assert all(isinstance(each, CopiedIn) and not each.statuses.strip(UNAVAILABLE) for each in left)
    assert len(unanswered) == 0


def test_what_is_left_is_failed_and_pings_are_not(unanswered: Unanswered) -> None:
    for question in (PopulateChunk(4), Ping(), CheckPages(9, (PAGE, PAGE))):
        unanswered.add(question, 0.0)
    assert list(unanswered.fail_all("lost")) == [
        ChunkPopulated(4, "lost"),
        PagesChecked(9, UNAVAILABLE * 2),
    ]


def test_it_is_full_at_its_bound(unanswered: Unanswered) -> None:
    for number in range(3):
        assert not unanswered.full
        unanswered.add(PopulateChunk(number), 0.0)
    assert unanswered.full


ANSWERS: list[tuple[Callable[[Unanswered], object], float | None]] = [
    (lambda _: None, 10.0),
    (lambda table: table.settle(1, ChunkPopulated(1, None), 6.0), 11.0),
    (lambda table: table.settle(2, CopiedIn(5, 0, HIT), 6.0), 10.0),
    (lambda table: list(table.fail_all("lost")), None),
]


@pytest.mark.parametrize(("answer", "due_s"), ANSWERS)
def test_the_first_deadline_is_that_of_the_question_unanswered_longest(
    unanswered: Unanswered, answer: Callable[[Unanswered], object], due_s: float | None
) -> None:
    unanswered.add(PopulateChunk(1), 0.0)
    unanswered.add(copy_in(2), 1.0)
    answer(unanswered)
    assert unanswered.due_s == due_s


def test_an_answer_in_part_buys_time_for_the_rest(unanswered: Unanswered) -> None:
    unanswered.add(copy_in(2), 0.0)
    unanswered.add(PopulateChunk(1), 1.0)
    unanswered.settle(1, CopiedIn(5, 1, HIT), 6.0)
    assert unanswered.due_s == 11.0
    unanswered.settle(2, ChunkPopulated(1, None), 7.0)
    assert unanswered.due_s == 16.0
