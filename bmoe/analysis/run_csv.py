"""Reading what `--csv` wrote: pure, no model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..accounting.bytes_by_cause import CAUSES
from ..accounting.token_record import TIME_COLUMNS
from ..errors import BmoeError
from ..observe.record_format import MAGIC

Floats = npt.NDArray[np.float64]

NEEDED = (
    "step", "phase", "wall_ms", "io_ms", *TIME_COLUMNS, "read_bytes", "hits", "misses", "rereads", "majflt", "cpu_ms",
    "mtp_batch", "drafted", "accepted", "reread_bytes", *(f"{cause}_bytes" for cause in CAUSES), "rss_mib",
    "rss_anon_mib", "rss_file_mib", "swap_mib", "mem_available_mib", "cgroup_usage_mib", "tight_usage_mib",
    "tight_limit_mib",
)  # fmt: skip
"""Columns that a report is made of; others are left alone."""
_ALWAYS = ("step", "phase", "wall_ms", *TIME_COLUMNS, "read_bytes", "hits", "misses", "mtp_batch")
"""Of these, those that no row may leave empty."""


class CsvError(BmoeError):
    """A file that is no whole CSV of a run; the message names it and the line."""


@dataclass(frozen=True)
class Run:
    """One run's rows. `columns`: float64 by name, NaN where a value was not measured.

    `facts`: the preamble (`engine`, `model`, `arch`, `config`); `summary`: the trailer, None where the run did not end;
    `notes`: what is worth knowing of the file, one line each.
    """

    path: Path
    facts: dict[str, Any]
    columns: dict[str, Floats]
    summary: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.columns["step"])

    @property
    def decode(self) -> npt.NDArray[np.bool_]:
        """The rows after each generation's first token, which has the prefill's cost."""
        return self.columns["phase"] > 0

    @property
    def config(self) -> dict[str, Any]:
        """The settings, resolved."""
        config = self.facts.get("config")
        return config if isinstance(config, dict) else {}


def read_run(path: Path) -> Run:
    """Reads a CSV file of `--csv`. Raises CsvError, with one line, for one that is damaged or none.

    A last row that is cut off, as a full disk or a power cut may leave it, is left out, with a note.
    """
    lines = _lines(path)
    facts: dict[str, Any] = {}
    at = 1
    while at < len(lines) and lines[at].startswith("# "):
        name, _, value = lines[at][2:].partition("=")
        try:
            facts[name] = json.loads(value)
        except ValueError:
            raise CsvError(f"{path}:{at + 1}: the preamble is damaged: {name[:40]!r} has no JSON value") from None
        at += 1
    if at == len(lines) or (at == len(lines) - 1 and not lines[at]):
        raise CsvError(f"{path}: no line of column names: cut off")
    names = lines[at].split(",")
    for name in NEEDED:
        if names.count(name) != 1:
            what = "no" if name not in names else "more than one"
            raise CsvError(f"{path}:{at + 1}: {what} column {name!r}: not what --csv writes, or damaged")
    places = [names.index(name) for name in NEEDED]
    must = [NEEDED.index(name) for name in _ALWAYS]
    rows: list[list[float]] = []
    summary: dict[str, Any] | None = None
    notes: list[str] = []
    for number, line in enumerate(lines[at + 1 :], at + 2):
        last = number == len(lines)  # not ended by a line break, or empty
        if last and not line:
            break
        try:
            if line.startswith("# summary "):
                summary = json.loads(line[10:])
                continue
            rows.append(_row(line, len(names), places, must))
        except ValueError:
            if not last:
                raise CsvError(f"{path}:{number}: not a whole row: damaged") from None
            notes.append(f"{path}:{number}: the last line is cut off: left out")
    if not rows:
        raise CsvError(f"{path}: no rows after line {at + 1}: no token was generated, or it is cut off")
    if summary is None:
        notes.append(f"{path}: no summary at its end: the run was killed, or its disk was full")
    table = np.array(rows, np.float64)
    return Run(path, facts, {name: table[:, i] for i, name in enumerate(NEEDED)}, summary, notes)


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CsvError(f"{path}: not a text file, so not what --csv writes") from None
    except OSError as e:
        raise CsvError(f"{path}: {e.strerror or e}") from None
    lines = text.split("\n")
    if lines[0].rstrip("\r") != MAGIC:
        raise CsvError(f"{path}:1: not {MAGIC!r}: not what --csv writes")
    return [line.removesuffix("\r") for line in lines]


def _row(line: str, n: int, places: Sequence[int], must: Sequence[int]) -> list[float]:
    """The values of one row, NaN for empty fields. Raises ValueError."""
    fields = line.split(",")
    if len(fields) != n:
        raise ValueError
    values = [float(fields[i]) if fields[i] else math.nan for i in places]
    if any(math.isinf(v) for v in values) or any("n" in fields[i].lower() for i in places):
        raise ValueError  # float() takes "nan" and "inf" too
    if any(math.isnan(values[i]) for i in must):
        raise ValueError
    return values
