"""A line under the text that says how the run is doing, on a terminal. Loaded there only.

The text streams on, character by character, while the line lies on the row below it. Nothing of the terminal is
changed for that, so that a run that is killed leaves nothing to repair: the cursor is saved, moved and restored
(DECSC, DECRC), and the row below is made with IND and RI, which scroll where the text stands on the last row. The
line goes before a text that leaves its row, and comes back after it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..accounting.results import Token
from .terminal import write

MiB = 1 << 20
EVERY_S = 0.2
"""How often the numbers change."""
RECENT = 32
"""Tokens that the numbers are taken over."""

_MAKE_ROOM = "\x1bD\x1bM"
_BELOW = "\x1b7\x1bD\r"
_BACK = "\x1b[K\x1b8"


_AGREED = (
    (" ", "~"), ("\u00c0", "\u024f"), ("\u0400", "\u045f"), ("\u3001", "\u3029"), ("\u3041", "\u3096"),
    ("\u30a1", "\u30fa"), ("\u4e00", "\u9fff"), ("\uac00", "\ud7a3"), ("\uff01", "\uff5e"),
)  # fmt: skip
"""Characters whose width terminals agree about: one column, or two for those of East Asia."""
_MARGIN = 3
"""Columns at the end of a row in which the line is not drawn: a cursor that waits to wrap is not saved everywhere."""


class Place(NamedTuple):
    """Where the cursor stands after a text; `left`: in another row than before.

    `sure`: nothing in its row was of a width that terminals differ about.
    """

    column: int
    left: bool
    sure: bool


def follow(text: str, column: int, sure: bool, width: int, cells: Callable[[str], int]) -> Place:
    """Where a terminal of `width` columns ends after `text` from `column` on.

    `cells` gives the width of a character. A row that is full, the cursor waiting at its end, has `column == width`.
    """
    left = False
    for c in text:
        if c == "\n":
            column, left, sure = 0, True, True
        elif c == "\r":
            column = 0
        elif c == "\t":
            column = min((column // 8 + 1) * 8, width - 1)
        else:
            n = 1 if " " <= c <= "~" else cells(c)
            sure = sure and any(first <= c <= last for first, last in _AGREED)
            if column + n > width:
                column, left = 0, True
            column += n
    return Place(column, left, sure)


class Recent:
    """Numbers of the last tokens."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[int, int, int, int, int]] = deque(maxlen=RECENT)

    def add(self, token: Token) -> None:
        """A token after the first."""
        s, t = token.stream, token.time
        self._tokens.append((t.wall, t.stall + t.draft_stall, s.hits, s.hits + s.misses, s.bytes))

    def line(self, slots: tuple[int, int] | None) -> list[str]:
        """The parts of the line; `slots`: of the cache, full ones and all, None where there is none."""
        n = len(self._tokens)
        wall, stall, hits, looked, size = (sum(t[i] for t in self._tokens) for i in range(5))
        if not wall:
            return []
        parts = [f"{n / (wall / 1e9):.1f} tok/s"]
        if looked:
            parts.append(f"{100 * hits / looked:.0f} % hit")
        if looked or size:
            parts += [f"{size / MiB / n:.1f} MiB/token", f"{100 * stall / wall:.0f} % waiting for reads"]
        if slots is not None and slots[1]:
            parts.append(f"cache {100 * slots[0] / slots[1]:.0f} % full")
        return parts


def fitting(parts: Sequence[str], width: int) -> str:
    """As many of the parts as `width` columns hold."""
    line = ""
    for part in parts:
        longer = f"{line} | {part}" if line else part
        if len(longer) > width:
            break
        line = longer
    return line


class LiveLine:
    """Writes the text, and the line with it (`bmoe.cli.text_output.Text`).

    `slots`: see `Recent.line`; `under`: the text goes to the same terminal, else the line is alone on it. `put` writes
    to the terminal, `out` the text.
    """

    def __init__(
        self,
        slots: Callable[[], tuple[int, int] | None],
        under: bool,
        put: Callable[[str], None],
        columns: Callable[[], int],
        out: Callable[[str], None] = write,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        # A library that is there for terminals, and is loaded on them anyway.
        from rich.cells import cell_len

        self._cells = cell_len
        self._slots, self._under, self._put, self._out = slots, under, put, out
        self._columns, self._now = columns, now
        self._recent = Recent()
        self._line, self._drawn, self._next = list[str](), False, 0.0
        self._column, self._sure, self._width = 0, True, columns()

    def write(self, text: str) -> None:
        """The text, on stdout. Raises OutputError."""
        if not text:
            return
        if not self._under:
            self._out(text)
            return
        width = max(1, self._columns())
        place = follow(text, self._column, self._sure and width == self._width, width, self._cells)
        may = place.sure and place.column <= width - _MARGIN
        if place.left or not may:
            self._erase()  # from a column that the terminal saves
        self._column, self._sure, self._width = place.column, place.sure, width
        self._out(text)
        if not self._drawn:
            self._draw()

    def token(self, token: Token) -> None:
        """Counts a token; now and then the line changes."""
        if not token.index:
            return  # there is nothing to say yet
        self._recent.add(token)
        if self._now() < self._next:
            return
        self._next = self._now() + EVERY_S
        self._line = self._recent.line(self._slots())
        self._draw()

    def _draw(self) -> None:
        width = self._columns()
        if self._under and (not self._sure or width != self._width or self._column > width - _MARGIN):
            return
        line = fitting(self._line, width - 1)
        if not line:
            return
        self._put(f"{_MAKE_ROOM}{_BELOW}{line}{_BACK}" if self._under else f"\r{line}\x1b[K")
        self._drawn = True

    def _erase(self) -> None:
        if self._drawn:
            self._drawn = False
            self._put(f"{_BELOW}{_BACK}" if self._under else "\r\x1b[K")

    def close(self) -> None:
        """Takes the line away for good."""
        self._erase()
        self._line = []


def on_terminal(slots: Callable[[], tuple[int, int] | None]) -> LiveLine:
    """The line on stderr's terminal."""

    def put(text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone
            sys.stderr.write(text)
            sys.stderr.flush()

    def columns() -> int:
        try:
            return os.get_terminal_size(2).columns or 80
        except OSError:
            return 80

    under = sys.stdout.isatty() and os.fstat(1).st_rdev == os.fstat(2).st_rdev
    return LiveLine(slots, under, put, columns)
