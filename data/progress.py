"""One progress line with rate and time left: redrawn on a terminal, a new line now and then in a file."""

from __future__ import annotations

import sys
import time
from typing import TextIO

TERMINAL_INTERVAL_S = 0.5
FILE_INTERVAL_S = 15.0


class Progress:
    """Progress over `total_bytes`; `done_bytes`: from an earlier run, kept out of the rate."""

    def __init__(self, label: str, total_bytes: int, done_bytes: int = 0,
                 stream: TextIO | None = None) -> None:
        self.label = label
        self.total_bytes = total_bytes
        self.start_bytes = done_bytes
        self.done_bytes = done_bytes
        self.stream = stream or sys.stderr
        self.redraws = self.stream.isatty()
        self.start_s = time.monotonic()
        self.last_shown_s = -float("inf")

    def add(self, count_bytes: int, note: str = "") -> None:
        """Count `count_bytes` more and show the line if it is time."""
        self.update(self.done_bytes + count_bytes, note)

    def update(self, done_bytes: int, note: str = "") -> None:
        """Set the bytes done so far and show the line if it is due."""
        self.done_bytes = done_bytes
        now_s = time.monotonic()
        if now_s - self.last_shown_s >= (TERMINAL_INTERVAL_S if self.redraws else FILE_INTERVAL_S):
            self.last_shown_s = now_s
            self.show(note)

    def show(self, note: str = "") -> None:
        """Write the line now."""
        line = self.line(note)
        self.stream.write(f"\r{line}\x1b[K" if self.redraws else f"{line}\n")
        self.stream.flush()

    def line(self, note: str = "") -> str:
        """`label 12.3% 1.2/9.9 GB 45.6 MB/s ETA 0:03:10 note`; the rate counts this run alone."""
        elapsed_s = max(time.monotonic() - self.start_s, 1e-9)
        rate = (self.done_bytes - self.start_bytes) / elapsed_s
        share = self.done_bytes / self.total_bytes if self.total_bytes else 1.0
        eta = clock((self.total_bytes - self.done_bytes) / rate) if rate > 0 else "unknown"
        return (f"{self.label} {share:6.1%} {size(self.done_bytes)} of {size(self.total_bytes)}, "
                f"{size(rate)}/s, ETA {eta} {note}").rstrip()

    def close(self, note: str = "") -> None:
        """Write the last line and leave it standing."""
        self.show(note)
        if self.redraws:
            self.stream.write("\n")


def size(count_bytes: float) -> str:
    """Bytes in the decimal unit that reads best."""
    value = float(count_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
