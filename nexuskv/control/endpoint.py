"""Addresses on the network: which may be bound, and which port was picked."""

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nexuskv.errors import ConfigError

if TYPE_CHECKING:
    import zmq


def check_loopback(url: str) -> None:
    """Refuse to listen where other machines could connect.

    Raises:
        ConfigError: not tcp://HOST:PORT with a loopback host.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise ConfigError(f"cannot listen on {url!r}: {exc}") from exc
    if parts.scheme != "tcp" or not host or port is None:
        raise ConfigError(f"cannot listen on {url!r}: want tcp://127.0.0.1:PORT")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(f"cannot listen on {url!r}: only loopback addresses, as nothing encrypts")


def bind(socket: "zmq.Socket[bytes]", url: str) -> str:
    """Bind a socket to a loopback address; the address with the port that was picked.

    Raises:
        ConfigError: another kind of address, or one that cannot be bound.
    """
    import zmq

    check_loopback(url)
    socket.setsockopt(zmq.IPV6, int("[" in url))
    try:
        socket.bind(url)
    except zmq.ZMQError as exc:
        raise ConfigError(f"cannot listen on {url!r}: {exc}") from exc
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()
