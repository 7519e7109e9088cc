"""Tables in text files: a preamble, a line of column names, rows of typed fields. Whatever is damaged is told."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import BmoeError

Parse = Callable[[str], Any]
"""What makes a value of a field, or raises ValueError with what the field is not."""

_MOST = 1 << 31  # of a whole number
_KNOWN = 1 << 14


class TableError(BmoeError):
    """A file that is not what it should be: the message names it and, where there is one, the line."""


class _WholeNumbers(dict[str, int]):
    """Whole numbers by their text. Traces repeat few of them: to find one is faster than to read it again."""

    def __missing__(self, text: str) -> int:
        digits = text.strip()
        if not (digits.isascii() and digits.isdigit() and len(digits) < 12) or int(digits) >= _MOST:
            raise ValueError("is not a whole number in range")
        value = int(digits)
        if len(self) < _KNOWN:
            self[text] = value
        return value


def whole_numbers() -> Parse:
    """A `Parse` of whole numbers from 0 to 2^31 - 1."""
    return _WholeNumbers().__getitem__


def integer(text: str) -> int:
    """A `Parse` of whole numbers of any size and sign."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("is not a whole number") from None


def number(text: str) -> float:
    """A `Parse` of numbers, NaN where there is none."""
    try:
        return float(text or "nan")
    except ValueError:
        raise ValueError("is not a number") from None


class Table:
    """A file's lines as a table: those before the column names that are empty or begin with `#` are its preamble.

    After the names, such lines are no rows: `comments`. `kind`: what the file should be, for messages; `row_fault`:
    how a message on a row begins. `ended`: the last line has its line break. Raises TableError for a file that is not
    there or no text, gzipped (told by its first bytes) or not.
    """

    def __init__(self, path: Path, kind: str, row_fault: str = "") -> None:
        self.path, self.kind = path, kind
        self._row_fault = row_fault
        text = _text(path, kind)
        self.ended = text.endswith("\n")
        self.lines = text.splitlines()
        self.at = next((i for i, line in enumerate(self.lines) if not _is_comment(line)), len(self.lines))
        self.names = [n.strip() for n in self.lines[self.at].split(",")] if self.at < len(self.lines) else []

    def where(self, number: int) -> str:
        """A line as messages name it; `number` counts from 1."""
        return f"{self.path}:{number}"

    def preamble(self) -> Iterator[tuple[int, str]]:
        """Its lines and their numbers."""
        return enumerate(self.lines[: self.at], 1)

    def comments(self) -> Iterator[tuple[int, str]]:
        """Lines after the column names that begin with `#`, and their numbers."""
        after = enumerate(islice(self.lines, self.at + 1, None), self.at + 2)
        return ((number, line) for number, line in after if line.startswith("#"))

    def need(self, names: Iterable[str]) -> None:
        """Raises TableError where there is no line of column names, or one does not have each of `names` once."""
        if not self.names:
            raise TableError(f"{self.path}: no line of column names: not {self.kind}, or cut off")
        for name in names:
            if self.names.count(name) != 1:
                what = "no" if name not in self.names else "more than one"
                raise TableError(
                    f"{self.where(self.at + 1)}: {what} column {name!r}: not {self.kind} "
                    f"(columns {', '.join(self.names)[:80]})"
                )

    def columns(self, parsers: Mapping[str, Parse]) -> dict[str, list[Any]]:
        """The values of the columns in `parsers`. Raises TableError for a row that is not whole, and for no rows."""
        n = len(self.names)
        out: dict[str, list[Any]] = {name: [] for name in parsers}
        steps = [(out[name].append, parse, self.names.index(name)) for name, parse in parsers.items()]
        for i, line in enumerate(islice(self.lines, self.at + 1, None), self.at + 2):
            if _is_comment(line):
                continue
            fields = line.split(",")
            try:
                if len(fields) != n:
                    raise ValueError
                for add, parse, place in steps:
                    add(parse(fields[place]))
            except ValueError:
                raise TableError(f"{self.where(i)}: {self._row_fault}{self.fault(line, parsers)}") from None
        if not any(out.values()):
            raise TableError(f"{self.path}: no rows after line {self.at + 1}: cut off, or nothing was written")
        return out

    def fault(self, line: str, parsers: Mapping[str, Parse]) -> str:
        """Why a line is no whole row; "" where it is one."""
        fields = line.split(",")
        if len(fields) != len(self.names):
            return f"{len(fields)} fields where the header has {len(self.names)} (cut off?)"
        for name, parse in parsers.items():
            field = fields[self.names.index(name)]
            try:
                parse(field)
            except ValueError as e:
                return f"{name} {field[:40]!r} {e}"
        return ""


def _is_comment(line: str) -> bool:
    return line.startswith("#") or not line.strip()


def _text(path: Path, kind: str) -> str:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as f:
                data = f.read()
        return data.decode("utf-8")
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TableError(f"{path}: damaged or cut off (gzip)") from None
    except UnicodeDecodeError:
        raise TableError(f"{path}: not a text file, so not {kind}") from None
    except OSError as e:
        raise TableError(f"{path}: {e.strerror or e}") from None
