"""A progress bar on stderr: one moving line on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Final, TextIO

_WIDTH: Final = 30
_TERMINAL_S: Final = 0.1
_LOG_S: Final = 5.0


class Progress:
    """Shows a share between 0 and 1 and a few words. Writes no more often than people can read."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._next_s = 0.0
        self._last = (0.0, "")

    def show(self, share: float, words: str) -> None:
        """Say how far it is."""
        self._last = (min(max(share, 0.0), 1.0), words)
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + (_TERMINAL_S if self._terminal else _LOG_S)
            self._write()

    def close(self) -> None:
        """Show the last state and end the line."""
        self._write()
        if self._terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _write(self) -> None:
        share, words = self._last
        filled = round(share * _WIDTH)
        bar = "#" * filled + "." * (_WIDTH - filled)
        line = f"{self._title} [{bar}] {share:4.0%}  {words}"
        self._stream.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()
