"""/metrics (Prometheus text) and /healthz on an optional port, loopback only.

The standard library's server in a thread of its own; it asks the control loop for everything, so
a loop that does not turn shows as unhealthy.
"""

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from nexuskv.control.endpoint import check_loopback
from nexuskv.errors import ConfigError, NexusError

_LOG = logging.getLogger("nexuskv.control")
_ANSWER_TIMEOUT_S = 2.0
_REQUEST_TIMEOUT_S = 5.0
_STOP_POLL_S = 0.1  # how often the server looks whether it shall stop


class _Server(ThreadingHTTPServer):
    """Answers in threads that end with the process."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that hangs up is no news either."""
        _LOG.debug("a request of %s broke off", client_address, exc_info=True)


class HttpServer:
    """Serves until `close`."""

    def __init__(self, address: str, *, metrics: Callable[[float], str]) -> None:
        """Listen on `address`, HOST:PORT.

        Args:
            address: the host defaults to 127.0.0.1; port 0 picks one.
            metrics: renders all metrics within the seconds given, or raises NexusError.

        Raises:
            ConfigError: a bad address, one that others could reach, or that cannot be bound.
        """
        host, _, port = address.rpartition(":")
        if not port.isdecimal() or not port.isascii() or int(port) > 65535:
            raise ConfigError(f"http address {address!r} is not HOST:PORT")

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_TIMEOUT_S

            def do_GET(self) -> None:
                self.wfile.write(self._head())

            def do_HEAD(self) -> None:
                self._head()

            def _head(self) -> bytes:
                """Send the status and headers; the body that a GET gets."""
                status, text = _answer(self.path, metrics)
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                return body

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are no news."""

        check_loopback(f"tcp://{host or '127.0.0.1'}:{port}")
        try:
            self._server = _Server((host.strip("[]") or "127.0.0.1", int(port)), Handler)
        except OSError as exc:
            raise ConfigError(f"cannot listen on http address {address!r}: {exc}") from exc
        self.address = f"{self._server.server_address[0]!s}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_STOP_POLL_S,),
            name="nexuskv-http",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _answer(path: str, metrics: Callable[[float], str]) -> tuple[int, str]:
    if path not in ("/metrics", "/healthz"):
        return 404, "there are /metrics and /healthz\n"
    try:
        text = metrics(_ANSWER_TIMEOUT_S)
    except NexusError as exc:
        return 503, f"{exc}\n"
    return 200, text if path == "/metrics" else "ok\n"
