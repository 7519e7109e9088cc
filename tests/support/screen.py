"""A terminal for tests: as much of one as text with a line under it needs, unforgiving where terminals differ."""

from __future__ import annotations

import re
import unicodedata

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b([78DM])|\r|\n|(.)", re.DOTALL)


class Screen:
    """`lines()`: all rows, those that have scrolled away included. Saving the cursor forgets that it waits to wrap."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.cells = [[" "] * columns for _ in range(rows)]
        self.away: list[str] = []
        self.x = self.y = 0
        self.saved = (0, 0)

    def feed(self, text: str) -> None:
        for m in _TOKEN.finditer(text):
            if m[4]:
                self._put(m[4])
            elif m[0] == "\r":
                self.x = 0
            elif m[0] == "\n":
                self.x = 0  # the terminal driver makes it \r\n
                self._down()
            elif m[3] == "7":
                self.saved = (min(self.x, self.columns - 1), self.y)
            elif m[3] == "8":
                self.x, self.y = self.saved
            elif m[3] == "D":
                self._down()
            elif m[3] == "M":
                assert self.y, "a reverse index at the top would scroll"
                self.y -= 1
            elif m[2] == "K":
                assert m[1] in ("", "0")
                self.cells[self.y][self.x :] = [" "] * (self.columns - self.x)
            else:
                raise AssertionError(f"unknown sequence {m[0]!r}")

    def _down(self) -> None:
        if self.y < self.rows - 1:
            self.y += 1
        else:
            self.away.append("".join(self.cells.pop(0)))
            self.cells.append([" "] * self.columns)

    def _put(self, c: str) -> None:
        width = 2 if unicodedata.east_asian_width(c) in "WF" else 1
        if self.x + width > self.columns:
            self.x = 0
            self._down()
        self.cells[self.y][self.x : self.x + width] = [c] + [""] * (width - 1)
        self.x += width

    def lines(self) -> list[str]:
        return [row.rstrip() for row in [*self.away, *("".join(row) for row in self.cells)]]

    def text(self) -> str:
        return "\n".join(self.lines()).rstrip()
