"""The least a round trip can cost: a process that waits, receives and sends bytes back.

Run as `python -m nexuskv.tools.bench.echo URL`, with `unix:///path` or `tcp://127.0.0.1:0`. It
prints its address, then answers until stdin ends. A request starts with the size of the reply it
wants, a little-endian u32; on a unix socket each way has a u32 length in front, as frames have.
"""

import select
import socket
import sys
from pathlib import Path
from typing import Final

import zmq

from nexuskv.protocol import LENGTH

_RECEIVE_BYTES: Final = 1024 * 1024


def serve_unix(path: Path) -> None:
    """Answer one connection at a time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1)
        print(f"unix://{path}", flush=True)
        connection, _ = listener.accept()
    with connection, select.epoll() as waits:
        connection.setblocking(False)
        waits.register(connection.fileno(), select.EPOLLIN)
        waits.register(sys.stdin.fileno(), select.EPOLLIN)
        buffer = memoryview(bytearray(_RECEIVE_BYTES))
        while True:
            if sys.stdin.fileno() in dict(waits.poll()):
                return
            _answer(connection, buffer)


def _answer(connection: socket.socket, buffer: memoryview) -> None:
    """Take what has come, and the rest of its frame; send the reply it asks for."""
    count = connection.recv_into(buffer)
    if not count:
        raise SystemExit(0)
    (size,) = LENGTH.unpack_from(buffer)
    while count < LENGTH.size + size:
        select.select([connection], [], [])
        count += connection.recv_into(buffer[count:])
    (reply_size,) = LENGTH.unpack_from(buffer, LENGTH.size)
    connection.setblocking(True)
    connection.sendall(LENGTH.pack(reply_size) + bytes(reply_size))
    connection.setblocking(False)


def serve_zmq(url: str) -> None:
    """Answer everybody."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(url)
        print(router.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        while sys.stdin.fileno() not in dict(poller.poll()):
            who, request = router.recv_multipart()
            (reply_size,) = LENGTH.unpack_from(request)
            router.send_multipart([who, bytes(reply_size)])


if __name__ == "__main__":
    if sys.argv[1].startswith("unix://"):
        serve_unix(Path(sys.argv[1].removeprefix("unix://")))
    else:
        serve_zmq(sys.argv[1])
