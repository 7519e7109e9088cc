"""Reading what `--csv` wrote: pure, no model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..accounting.bytes_by_cause import CAUSES
from ..accounting.token_record import TIME_COLUMNS
from ..observe.record_format import MAGIC
from .table import Parse, Table, TableError, number

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
    """Reads a CSV file of `--csv`. Raises TableError, with one line, for one that is damaged or none.

    A last row that is cut off, as a full disk or a power cut may leave it, is left out, with a note.
    """
    table = Table(path, "what --csv writes", row_fault="not a whole row: ")
    if not table.lines or table.lines[0] != MAGIC:
        raise TableError(f"{table.where(1)}: not {MAGIC!r}: not {table.kind}")
    facts = _facts(table)
    table.need(NEEDED)
    parsers = {name: _present if name in _ALWAYS else _measured for name in NEEDED}
    notes: list[str] = []
    if not table.ended and not _is_whole(table, parsers):
        notes.append(f"{table.where(len(table.lines))}: the last line is cut off: left out")
        table.lines.pop()
    values = table.columns(parsers)
    summary = None
    for line_number, line in table.comments():
        summary = _summary(line)
        if summary is None:
            raise TableError(f"{table.where(line_number)}: not a whole row: neither a token nor a summary")
    if summary is None:
        notes.append(f"{path}: no summary at its end: the run was killed, or its disk was full")
    return Run(path, facts, {name: np.array(values[name], np.float64) for name in NEEDED}, summary, notes)


def _facts(table: Table) -> dict[str, Any]:
    """The preamble's settings, after its first line."""
    facts = {}
    for line_number, line in islice(table.preamble(), 1, None):
        name, _, value = line.removeprefix("# ").partition("=")
        try:
            facts[name] = json.loads(value)
        except ValueError:
            raise TableError(
                f"{table.where(line_number)}: the preamble is damaged: {name[:40]!r} has no JSON value"
            ) from None
    return facts


def _summary(line: str) -> dict[str, Any] | None:
    """The trailer, None where a line is none or not whole."""
    try:
        return dict(json.loads(line.removeprefix("# summary ")))
    except (ValueError, TypeError):
        return None


def _is_whole(table: Table, parsers: Mapping[str, Parse]) -> bool:
    """Whether the last line, which no line break ends, is all there."""
    last = table.lines[-1]
    return _summary(last) is not None if last.startswith("#") else not table.fault(last, parsers)


def _measured(text: str) -> float:
    """A number, NaN where nothing was measured; "nan" and "inf", which float() takes, are none."""
    if not text:
        return math.nan
    value = number(text)
    if math.isfinite(value):
        return value
    raise ValueError("is not a number")


def _present(text: str) -> float:
    if not text:
        raise ValueError("is missing")
    return _measured(text)
