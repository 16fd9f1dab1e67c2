"""One client that floods the daemon: the others are served all the same."""

from nexuskv.protocol import Type, encode, prefixed
from tests.control.rig import Rig

FLOOD_FRAMES = 5000


def test_a_flood_of_one_client_lets_the_others_have_their_turn(rig: Rig) -> None:
    flood, other = rig.local(), rig.local()
    before = other.counter("requests")

    def while_the_daemon_is_busy() -> None:
        flood.socket.sendall(prefixed(encode(Type.PING, 0, (b"",))) * FLOOD_FRAMES)
        other.send(Type.STATS)

    rig.run(while_the_daemon_is_busy)
    (stats,) = other.receive().body
    assert isinstance(stats, dict)
    assert stats["counters"]["requests"] - before < 100


def test_every_frame_of_a_flood_is_handled_in_order(rig: Rig) -> None:
    client = rig.local()
    frames = [encode(Type.PING, number, (b"x" * 1000,)) for number in range(1, 101)]
    client.socket.sendall(b"".join(map(prefixed, frames)))
    assert [client.receive().request_id for _ in frames] == list(range(1, 101))


def test_a_flood_that_hangs_up_leaves_no_session(rig: Rig) -> None:
    client = rig.local()
    client.socket.sendall(prefixed(encode(Type.PING, 0, (b"",))) * FLOOD_FRAMES)
    client.close()
    rig.until(lambda: rig.control.metrics.gauges()["sessions"] == 0)
