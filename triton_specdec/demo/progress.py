"""What the demo is doing, on stderr."""

from __future__ import annotations

import time
from typing import TextIO


class Progress:
    """One line that says what runs and how far it is; on a terminal it is written over."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.live = stream, stream.isatty()
        self.shown = 0.0
        self.width = 0

    def step(self, text: str) -> None:
        """A new piece of work begins."""
        self._write(text) if self.live else print(text, file=self.stream, flush=True)
        self.shown = time.perf_counter()

    def tokens(self, text: str, done: int, total: int) -> None:
        """How far the piece is; at most ten times a second, and not at all where lines cannot be written over."""
        now = time.perf_counter()
        if self.live and now - self.shown > 0.1:
            self.shown = now
            self._write(f"{text} {done}/{total} tokens")

    def close(self) -> None:
        """Take the line away."""
        if self.live:
            self._write("")

    def _write(self, text: str) -> None:
        self.stream.write("\r" + text.ljust(self.width) + ("\r" if not text else ""))
        self.stream.flush()
        self.width = len(text)
