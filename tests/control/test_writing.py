"""reserve, commit, abort (I4), and slots whose writer may still write (I14)."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nexuskv.errors import ConfigError, LeaseExpired, OutOfSpace
from nexuskv.protocol import ALL_RESERVATIONS, Type, encode
from nexuskv.types import PageStatus
from tests.control.conftest import StartRig
from tests.control.raw import PAGE_BYTES, PATIENCE_S, chain, is_status, refusal
from tests.control.rig import Rig

STORED, EXISTS, MISS = PageStatus.STORED, PageStatus.EXISTS, PageStatus.MISS
NO_SPACE, DROPPED = PageStatus.NO_SPACE, PageStatus.DROPPED

WRITER = """
import os, sys
from tests.control.raw import RawLocal, chain
client = RawLocal(sys.argv[1])
client.hello()
reservation, statuses, _ = client.reserve(client.open(), chain(sys.argv[2], int(sys.argv[3])))
print(reservation, flush=True)
sys.stdin.readline()
client.close()
print("closed", flush=True)
sys.stdin.readline()
"""


class Writer:
    """A process that reserves, closes its socket when told, and exits when told."""

    def __init__(self, rig: Rig, name: str, count: int) -> None:
        path = rig.control.urls[0].removeprefix("unix://")
        self._child = subprocess.Popen(
            [sys.executable, "-c", WRITER, path, name, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=os.getcwd(),
        )
        assert self._child.stdout is not None
        self.reservation = int(self._child.stdout.readline())

    def close_socket(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("close\n")
        self._child.stdin.flush()
        assert self._child.stdout.readline() == "closed\n"

    def exit(self) -> None:
        self._child.communicate("\n", timeout=PATIENCE_S)

    def kill(self) -> None:
        self._child.send_signal(signal.SIGKILL)
        self._child.communicate(timeout=PATIENCE_S)

    def end(self) -> None:
        if self._child.returncode is None:
            self.kill()


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    """Processes started by a test; none outlives it."""
    started: list[Writer] = []
    yield started
    for writer in started:
        writer.end()


def quarantined(rig: Rig) -> int:
    return rig.gauges()["quarantined_bytes"] // PAGE_BYTES


# --- publishing


def test_a_page_is_found_only_after_its_commit(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 4)
    reservation, statuses, lent = client.reserve(space, keys)
    assert is_status(statuses, MISS)
    assert len({d.offset_bytes for d in lent}) == 4
    assert client.match(space, keys) == 0
    assert is_status(client.commit(reservation, 4), STORED)
    assert client.match(space, keys) == 4


def test_two_writers_on_one_chain_both_succeed_and_one_set_of_bytes_wins(rig: Rig) -> None:
    one, two = rig.local(), rig.local()
    keys = chain("a", 4)
    spaces = one.open(), two.open()
    first, _, _ = one.reserve(spaces[0], keys)
    second, statuses, _ = two.reserve(spaces[1], keys)
    assert is_status(statuses, MISS)
    assert is_status(two.commit(second, 4, checksums=b"\2" * 32), STORED)
    assert is_status(one.commit(first, 4, checksums=b"\1" * 32), EXISTS)
    got = one.acquire(spaces[0], keys).pages()
    assert {d.checksum for d in got.values()} == {int.from_bytes(b"\2" * 8, "little")}
    assert rig.gauges()["writing_bytes"] == 0
    assert rig.gauges()["used_bytes"] == 4 * PAGE_BYTES


def test_the_losers_slots_serve_somebody_else(rig: Rig) -> None:
    one, two = rig.local(), rig.local()
    space = one.open(), two.open()
    reserved = [
        client.reserve(number, chain("a", 32))[0]
        for client, number in zip((one, two), space, strict=True)
    ]
    one.commit(reserved[0], 32)
    two.commit(reserved[1], 32)
    assert is_status(one.put(space[0], chain("b", 32)), STORED)
    assert one.match(space[0], chain("a", 32)) == 32


def test_held_pages_are_not_lent_again(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 6)
    client.put(space, keys[:4])
    _, statuses, lent = client.reserve(space, keys)
    assert statuses == bytes([EXISTS] * 4 + [MISS] * 2)
    assert [d.size_bytes for d in lent] == [0] * 4 + [PAGE_BYTES] * 2


def test_a_reserve_of_held_pages_lends_no_reservation(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 3)
    client.put(space, keys)
    reservation, statuses, _ = client.reserve(space, keys)
    assert (reservation, statuses) == (0, bytes([EXISTS] * 3))


def test_a_key_twice_in_a_batch_is_stored_once(rig: Rig) -> None:
    client = rig.local()
    space, (key, other) = client.open(), chain("a", 2)
    reservation, _, _ = client.reserve(space, [key, key, other])
    assert client.commit(reservation, 3) == bytes([STORED, EXISTS, STORED])
    assert rig.gauges()["used_bytes"] == 2 * PAGE_BYTES


def test_a_commit_answers_for_every_key_of_the_reservation(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 4)
    client.put(space, keys[:1])
    reservation, _, _ = client.reserve(space, keys)
    done = bytes([1, 1, 0, 1])
    assert client.commit(reservation, 4, done=done) == bytes([EXISTS, STORED, DROPPED, STORED])


def test_unfilled_slots_of_a_commit_come_back(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 4)
    reservation, _, _ = client.reserve(space, keys)
    client.commit(reservation, 4, done=bytes([1, 0, 0, 0]))
    gauges = rig.gauges()
    assert (gauges["writing_bytes"], gauges["used_bytes"]) == (0, PAGE_BYTES)


def test_a_page_after_an_unfilled_one_is_no_part_of_the_prefix(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 3)
    reservation, _, _ = client.reserve(space, keys)
    client.commit(reservation, 3, done=bytes([1, 0, 1]))
    assert client.match(space, keys) == 1
    client.put(space, [keys[1]], parent=keys[0])
    assert client.match(space, keys) == 3


def test_abort_gives_the_slots_back_at_once(rig: Rig) -> None:
    client = rig.local()
    reservation, _, _ = client.reserve(client.open(), chain("a", 5))
    assert client.call(Type.ABORT, reservation) == [5]
    assert rig.gauges()["writing_bytes"] == 0
    assert isinstance(refusal(lambda: client.call(Type.ABORT, reservation)), LeaseExpired)


def test_abort_of_all_gives_back_what_this_session_holds_and_no_other(rig: Rig) -> None:
    one, two = rig.local(), rig.local()
    space = one.open()
    one.reserve(space, chain("a", 2))
    one.reserve(space, chain("b", 3))
    two.reserve(two.open(), chain("c", 4))
    assert one.call(Type.ABORT, ALL_RESERVATIONS) == [5]
    assert rig.gauges()["writing_bytes"] == 4 * PAGE_BYTES
    assert two.call(Type.ABORT, ALL_RESERVATIONS) == [4]


def test_a_last_word_is_heard_although_its_session_takes_no_answer(rig: Rig) -> None:
    client = rig.local()
    space = client.open()

    def while_the_daemon_is_busy() -> None:
        client.send(Type.RESERVE, space, b"".join(chain("a", 5)))
        client.send_frame(encode(Type.ABORT, 0, (ALL_RESERVATIONS,)))
        client.close()

    rig.run(while_the_daemon_is_busy)
    rig.until(lambda: rig.control.metrics.gauges()["sessions"] == 0)
    assert (quarantined(rig), rig.gauges()["writing_bytes"]) == (0, 0)
    assert rig.control.counters.snapshot()["reserved_pages"] == 5


def test_a_reservation_is_committed_once(rig: Rig) -> None:
    client = rig.local()
    reservation, _, _ = client.reserve(client.open(), chain("a", 1))
    client.commit(reservation, 1)
    with pytest.raises(LeaseExpired):
        client.commit(reservation, 1)


def test_another_sessions_reservation_is_refused(rig: Rig) -> None:
    one, two = rig.local(), rig.local()
    reservation, _, _ = one.reserve(one.open(), chain("a", 1))
    for call in (lambda: two.commit(reservation, 1), lambda: two.call(Type.ABORT, reservation)):
        assert isinstance(refusal(call), LeaseExpired)
    assert is_status(one.commit(reservation, 1), STORED)


@pytest.mark.parametrize(
    ("changes"),
    [
        {"done": b"\1"},
        {"checksums": bytes(8)},
        {"parent": b"short"},
    ],
    ids=lambda c: next(iter(c)),
)
def test_a_commit_with_wrong_lengths_changes_nothing(rig: Rig, changes: dict[str, bytes]) -> None:
    client = rig.local()
    reservation, _, _ = client.reserve(client.open(), chain("a", 2))
    with pytest.raises(ConfigError):
        client.commit(reservation, 2, **changes)  # type: ignore[arg-type]  # bytes all
    assert is_status(client.commit(reservation, 2), STORED)


def test_an_unknown_parent_state_is_refused(rig: Rig) -> None:
    client = rig.local()
    reservation, _, _ = client.reserve(client.open(), chain("a", 1))
    with pytest.raises(ConfigError, match="parent_state"):
        client.call(Type.COMMIT, reservation, 3, b"", b"\1", bytes(8))


@pytest.mark.parametrize("size", [1, 31, 33, 63])
def test_a_blob_of_half_keys_is_refused(rig: Rig, size: int) -> None:
    client = rig.local()
    space = client.open()
    for kind in (Type.RESERVE, Type.REMOVE, Type.UNPIN):
        with pytest.raises(ConfigError, match="32 bytes"):
            client.call(kind, space, bytes(size))


def test_no_keys_at_all_is_an_empty_answer(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    assert client.reserve(space, []) == (0, b"", [])
    assert client.match(space, []) == 0
    assert client.acquire(space, []).pages() == {}


def test_more_pages_than_a_message_may_name_are_refused(start_rig: StartRig) -> None:
    client = start_rig(batch_pages_max=8).local()
    space = client.open()
    with pytest.raises(ConfigError, match="at most 8"):
        client.reserve(space, chain("a", 9))


# --- parents


def test_a_chain_put_in_two_halves_matches_whole(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(page_bytes=4096), chain("a", 256)
    client.put(space, keys[:128])
    client.put(space, keys[128:], parent=keys[127])
    assert client.match(space, keys) == 256


@pytest.mark.parametrize("unknown", [False, True], ids=["absent parent", "unknown parent"])
def test_a_chain_put_last_half_first_matches_whole(rig: Rig, unknown: bool) -> None:
    client = rig.local()
    space, keys = client.open(page_bytes=4096), chain("a", 256)
    client.put(space, keys[128:], parent=None if unknown else keys[127], unknown=unknown)
    assert client.match(space, keys) == 0
    client.put(space, keys[:128])
    assert client.match(space, keys) == 256


def test_a_page_that_names_itself_as_parent_is_harmless(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 2)
    assert is_status(client.put(space, keys, parent=keys[1]), STORED)
    client.put(space, keys, parent=keys[0])
    assert client.match(space, chain("b", 1)) == 0
    assert client.call(Type.REMOVE, space, b"".join(keys)) == [2]


def test_a_lying_parent_never_makes_another_chain_longer(rig: Rig) -> None:
    client = rig.local()
    space, a, b = client.open(), chain("a", 4), chain("b", 4)
    client.put(space, a)
    client.put(space, b, parent=a[3])
    assert client.match(space, a + chain("c", 1)) == 4
    assert client.match(space, b) == 4


def test_a_cycle_of_two_chains_is_refused_and_both_are_still_evictable(rig: Rig) -> None:
    client = rig.local()
    space, a, b = client.open(), chain("a", 8), chain("b", 8)
    client.put(space, a, parent=b[-1])
    client.put(space, b, parent=a[-1])
    assert is_status(client.put(space, chain("c", 64)), STORED)
    assert client.match(space, chain("c", 64)) == 64


# --- epochs


def test_a_commit_reserved_before_a_clear_is_dropped(rig: Rig) -> None:
    client = rig.local()
    space, keys = client.open(), chain("a", 3)
    reservation, _, _ = client.reserve(space, keys)
    client.call(Type.CLEAR, space)
    assert is_status(client.commit(reservation, 3), DROPPED)
    assert client.match(space, keys) == 0
    assert rig.gauges()["writing_bytes"] == 0


def test_clear_answers_the_pages_gone_and_the_new_epoch(rig: Rig) -> None:
    client = rig.local()
    space = client.open()
    client.put(space, chain("a", 3))
    assert client.call(Type.CLEAR, space) == [3, 1]
    assert client.call(Type.CLEAR, space) == [0, 2]


def test_clear_touches_no_other_namespace(rig: Rig) -> None:
    client = rig.local()
    one, two = client.open(model="one"), client.open(model="two")
    client.put(one, chain("a", 3))
    client.put(two, chain("a", 3))
    client.call(Type.CLEAR, one)
    assert (client.match(one, chain("a", 3)), client.match(two, chain("a", 3))) == (0, 3)


# --- writers that go away


def test_slots_of_a_closed_session_wait_until_its_process_has_exited(
    rig: Rig, writers: list[Writer]
) -> None:
    writers.append(Writer(rig, "w", 8))
    writers[0].close_socket()
    rig.until(lambda: rig.control.metrics.gauges()["sessions"] == 0)
    assert quarantined(rig) == 8
    writers[0].exit()
    rig.until(lambda: rig.control.metrics.gauges()["quarantined_bytes"] == 0)


def test_quarantined_slots_are_lent_to_nobody(rig: Rig, writers: list[Writer]) -> None:
    writers.append(Writer(rig, "w", 16))
    chunks = rig.run(lambda: [rig.tier.slots_of_chunk(at) for at in range(rig.tier.chunk_count)])
    taken = [int(slot) for chunk in chunks for slot in chunk.slots]
    writers[0].close_socket()
    rig.until(lambda: rig.control.metrics.gauges()["quarantined_bytes"] > 0)
    client = rig.local()
    space = client.open(model="other")
    assert client.put(space, chain("a", 64)).count(STORED) == 48
    client.put(space, chain("b", 48))
    states = rig.run(lambda: {rig.tier.state_of(slot).name for slot in taken})
    assert states == {"QUARANTINED"}


def test_a_writer_killed_between_reserve_and_commit_gives_its_space_back(
    rig: Rig, writers: list[Writer]
) -> None:
    writers.append(Writer(rig, "w", 8))
    assert rig.gauges()["writing_bytes"] == 8 * PAGE_BYTES
    writers[0].kill()
    rig.until(
        lambda: (
            rig.control.metrics.gauges()["writing_bytes"] == 0
            and rig.control.metrics.gauges()["quarantined_bytes"] == 0
        )
    )
    client = rig.local()
    assert is_status(client.put(client.open(), chain("a", 64)), STORED)


def test_a_full_quarantine_refuses_reserves_until_the_writer_exits(
    start_rig: StartRig, writers: list[Writer]
) -> None:
    rig = start_rig(quarantine_bytes=8 * PAGE_BYTES)
    writers.append(Writer(rig, "w", 8))
    writers[0].close_socket()
    rig.until(lambda: rig.control.metrics.gauges()["quarantined_bytes"] > 0)
    client = rig.local()
    space = client.open()
    with pytest.raises(OutOfSpace, match="quarantine_bytes"):
        client.reserve(space, chain("a", 1))
    assert client.counter("quarantine_refusals") == 1
    writers[0].exit()
    rig.until(lambda: rig.control.metrics.gauges()["quarantined_bytes"] == 0)
    assert is_status(client.put(space, chain("a", 1)), STORED)


def test_a_reservation_of_a_closed_session_cannot_be_committed(rig: Rig) -> None:
    one = rig.local()
    reservation, _, _ = one.reserve(one.open(), chain("a", 1))
    one.close()
    rig.until(lambda: rig.control.metrics.gauges()["sessions"] == 0)
    two = rig.local()
    with pytest.raises(LeaseExpired):
        two.commit(reservation, 1)
    assert quarantined(rig) == 1  # this process still lives


def test_a_second_session_of_the_process_does_not_free_the_firsts_slots(rig: Rig) -> None:
    one, two = rig.local(), rig.local()
    one.reserve(one.open(), chain("a", 2))
    one.close()
    two.close()
    rig.until(lambda: rig.control.metrics.gauges()["sessions"] == 0)
    assert quarantined(rig) == 2
    rig.local()
    assert quarantined(rig) == 2


def test_a_connection_inherited_by_a_child_may_not_write_after_its_process(rig: Rig) -> None:
    path = rig.control.urls[0].removeprefix("unix://")
    script = (
        "import os, sys\n"
        "from tests.control.raw import RawLocal, chain, refusal\n"
        "client = RawLocal(sys.argv[1]); client.hello(); space = client.open()\n"
        "child = os.fork()\n"
        "if child: os._exit(0)\n"
        "sys.stdin.readline()\n"
        "print(type(refusal(lambda: client.reserve(space, chain('a', 1)))).__name__, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.wait(PATIENCE_S)
    rig.turn()
    answer, _ = process.communicate("\n", timeout=PATIENCE_S)
    assert answer == "Refused\n"


# --- bounds of a session


def test_a_session_holds_no_more_reserved_than_allowed(start_rig: StartRig) -> None:
    rig = start_rig(session_reserved_bytes="1MiB")
    client = rig.local()
    space = client.open()
    reservation, statuses, _ = client.reserve(space, chain("a", 20))
    assert statuses == bytes([MISS] * 16 + [NO_SPACE] * 4)
    assert is_status(client.reserve(space, chain("b", 2))[1], NO_SPACE)
    assert client.commit(reservation, 20) == bytes([STORED] * 16 + [NO_SPACE] * 4)
    assert is_status(client.reserve(space, chain("b", 2))[1], MISS)


def test_a_namespace_stays_under_its_cap_with_several_writers(start_rig: StartRig) -> None:
    rig = start_rig(namespace_bytes_max=8 * PAGE_BYTES)
    clients = [rig.local() for _ in range(3)]
    spaces = [client.open() for client in clients]
    reserved = [
        client.reserve(space, chain(str(at), 6))
        for at, (client, space) in enumerate(zip(clients, spaces, strict=True))
    ]
    for client, (reservation, statuses, _) in zip(clients, reserved, strict=True):
        if reservation:
            client.commit(reservation, len(statuses))
    assert rig.gauges()["used_bytes"] <= 8 * PAGE_BYTES
    assert clients[0].put(spaces[0], chain("new", 8)).count(STORED) == 8
    assert rig.gauges()["used_bytes"] == 8 * PAGE_BYTES
