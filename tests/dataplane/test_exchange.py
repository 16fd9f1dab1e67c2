import math
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType

import pytest

LIMIT = 1 << 20
WAIT_S = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connected pair: ours and the peer's."""
    ours, peer = socket.socketpair()
    with ours, peer:
        yield ours, peer


@pytest.fixture(params=["unix", "tcp"])
def streams(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The same over each kind of stream socket."""
    if request.param == "unix":
        ours, peer = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            peer, _ = server.accept()
    with ours, peer:
        yield ours, peer


Peer = Callable[[Callable[[], None]], None]


@pytest.fixture
def peer_runs() -> Iterator[Peer]:
    """Run a peer's side on a thread; its failure fails the test."""
    threads: list[threading.Thread] = []
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001  # a thread's failure must reach the test
            failures.append(exc)

    def start(work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=guarded, args=(work,)))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def read_exactly(peer: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = peer.recv(length - len(data))
        assert piece
        data += piece
    return data


def exchange(
    module: ModuleType,
    ours: socket.socket,
    request: object = b"",
    *,
    limit: int = LIMIT,
    timeout_s: float = WAIT_S,
) -> bytes:
    reply = module.exchange(ours.fileno(), request, message_bytes_max=limit, timeout_s=timeout_s)
    assert isinstance(reply, bytes)
    return reply


@pytest.mark.parametrize("spin_s", [0.0, 0.001, 60.0], ids=["no spin", "short", "longer than all"])
def test_polling_before_sleeping_changes_no_outcome(
    moving: ModuleType,
    streams: tuple[socket.socket, socket.socket],
    peer_runs: Peer,
    spin_s: float,
) -> None:
    ours, peer = streams
    wait = {"message_bytes_max": LIMIT, "timeout_s": WAIT_S, "spin_s": spin_s}
    peer_runs(lambda: peer.sendall(frame(read_exactly(peer, 8)[4:] + b" back")))
    assert moving.exchange(ours.fileno(), frame(b"ping"), **wait) == b"ping back"
    with pytest.raises(TimeoutError):
        moving.exchange(ours.fileno(), frame(b"ping"), **{**wait, "timeout_s": 0.05})
    peer.close()
    with pytest.raises(ConnectionError):
        moving.exchange(ours.fileno(), b"", **wait)


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
def test_a_request_is_answered(
    moving: ModuleType,
    streams: tuple[socket.socket, socket.socket],
    peer_runs: Peer,
    blocking: bool,
) -> None:
    ours, peer = streams
    ours.setblocking(blocking)
    peer_runs(lambda: peer.sendall(frame(read_exactly(peer, 8)[4:] + b" back")))
    assert exchange(moving, ours, frame(b"ping")) == b"ping back"
    assert ours.getblocking() is blocking


@pytest.mark.parametrize(
    "request_parts",
    [
        frame(b"abc"),
        bytearray(frame(b"abc")),
        [frame(b"abc")],
        [memoryview(frame(b"a")), b"", bytearray(frame(b"bc"))],
        tuple(frame(b"x") for _ in range(3000)),
    ],
    ids=["bytes", "bytearray", "list", "mixed", "3000-parts"],
)
def test_every_part_is_sent_in_order(
    moving: ModuleType,
    ends: tuple[socket.socket, socket.socket],
    peer_runs: Peer,
    request_parts: object,
) -> None:
    ours, peer = ends
    wanted = b"".join(request_parts) if isinstance(request_parts, list | tuple) else request_parts
    assert isinstance(wanted, bytes | bytearray)
    peer_runs(lambda: peer.sendall(frame(read_exactly(peer, len(wanted)))))
    assert exchange(moving, ours, request_parts) == wanted


@pytest.mark.parametrize("request_parts", [b"", [], ()], ids=["bytes", "list", "tuple"])
def test_an_empty_request_only_receives(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket], request_parts: object
) -> None:
    ours, peer = ends
    peer.sendall(frame(b"group 1") + frame(b"group 2"))
    assert exchange(moving, ours, request_parts) == b"group 1"
    assert exchange(moving, ours, request_parts) == b"group 2"


def test_no_byte_past_the_frame_is_taken(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, peer = ends
    peer.sendall(frame(b"first") + b"rest")
    exchange(moving, ours)
    assert ours.recv(100) == b"rest"


def test_an_empty_payload_is_a_reply(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, peer = ends
    peer.sendall(frame(b""))
    assert exchange(moving, ours) == b""


def test_a_reply_may_trickle_byte_by_byte(
    moving: ModuleType, streams: tuple[socket.socket, socket.socket], peer_runs: Peer
) -> None:
    ours, peer = streams

    def trickle() -> None:
        for byte in frame(b"slowly"):
            peer.sendall(bytes([byte]))

    peer_runs(trickle)
    assert exchange(moving, ours) == b"slowly"


def test_messages_larger_than_the_socket_buffers_pass(
    moving: ModuleType, streams: tuple[socket.socket, socket.socket], peer_runs: Peer
) -> None:
    ours, peer = streams
    payload = os.urandom(8 << 20)

    def echo() -> None:
        received = read_exactly(peer, 4 + len(payload))
        peer.sendall(received)

    peer_runs(echo)
    assert exchange(moving, ours, frame(payload), limit=len(payload)) == payload


def test_a_silent_peer_is_a_timeout(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    with pytest.raises(TimeoutError):
        exchange(moving, ends[0], frame(b"hello"), timeout_s=0.01)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, -math.inf])
def test_without_time_left_only_what_is_ready_counts(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket], timeout_s: float
) -> None:
    ours, peer = ends
    peer.sendall(frame(b"ready"))
    assert exchange(moving, ours, timeout_s=timeout_s) == b"ready"
    with pytest.raises(TimeoutError):
        exchange(moving, ours, timeout_s=timeout_s)


def test_a_peer_that_stops_half_way_through_its_reply_is_a_timeout(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, peer = ends
    peer.sendall(frame(b"whole")[:-1])
    with pytest.raises(TimeoutError):
        exchange(moving, ours, timeout_s=0.01)


def test_a_peer_that_stops_reading_is_a_timeout(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    with pytest.raises(TimeoutError):
        exchange(moving, ends[0], bytes(8 << 20), timeout_s=0.01)


@pytest.mark.parametrize("sent", [b"", b"\x05\x00", frame(b"whole")[:-1]], ids=len)
def test_a_peer_that_hangs_up_early_is_a_connection_error(
    moving: ModuleType, streams: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    ours, peer = streams
    peer.sendall(sent)
    peer.close()
    with pytest.raises(ConnectionError, match=rf"after {len(sent)} bytes"):
        exchange(moving, ours)


def test_sending_to_a_peer_that_hung_up_is_a_connection_error(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, peer = ends
    peer.close()
    with pytest.raises(ConnectionError):
        exchange(moving, ours, frame(b"anyone?"))


def test_the_last_words_of_a_peer_that_hung_up_are_still_heard(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, peer = ends
    peer.sendall(frame(b"goodbye"))
    peer.close()
    assert exchange(moving, ours, frame(b"anyone?")) == b"goodbye"


@pytest.mark.parametrize("length", [101, 2**31, 2**32 - 1])
def test_a_length_above_the_limit_is_refused_unread(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket], length: int
) -> None:
    ours, peer = ends
    peer.sendall(struct.pack("<I", length))
    with pytest.raises(ValueError, match=f"message of {length} bytes, at most 100"):
        exchange(moving, ours, limit=100)


def test_a_message_of_exactly_the_limit_passes(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, peer = ends
    peer.sendall(frame(bytes(100)))
    assert exchange(moving, ours, limit=100) == bytes(100)


def test_a_closed_descriptor_is_an_os_error(moving: ModuleType) -> None:
    ours, peer = socket.socketpair()
    number = ours.fileno()
    ours.close()
    peer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        moving.exchange(number, b"x", message_bytes_max=10, timeout_s=1.0)


@pytest.mark.parametrize(("limit", "timeout_s"), [(-1, 1.0), (10, math.nan)])
def test_options_out_of_range_are_refused(
    moving: ModuleType,
    ends: tuple[socket.socket, socket.socket],
    limit: int,
    timeout_s: float,
) -> None:
    with pytest.raises(ValueError, match="message_bytes_max"):
        exchange(moving, ends[0], limit=limit, timeout_s=timeout_s)


def test_what_is_no_buffer_cannot_be_sent(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    with pytest.raises(TypeError):
        exchange(moving, ends[0], [b"good", "no bytes"])


class Interrupted(Exception):
    """What the handler of a test raises."""


def test_a_signal_handler_that_raises_ends_the_wait(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Interrupted):
            exchange(moving, ends[0])
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_that_returns_does_not_disturb_the_exchange(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, peer = ends

    def handler(number: int, found: FrameType | None) -> None:
        peer.sendall(frame(b"after the signal"))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert exchange(moving, ours) == b"after the signal"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_other_threads_run_while_one_waits(
    moving: ModuleType, ends: tuple[socket.socket, socket.socket], peer_runs: Peer
) -> None:
    ours, peer = ends
    peer_runs(lambda: peer.sendall(frame(b"from a thread of this process")))
    assert exchange(moving, ours) == b"from a thread of this process"
