"""What the studies share: a measurement as a process of its own, cells in turn, and medians of their rows."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from bench import cgroup

MiB = 1 << 20
Row = dict[str, Any]
"""What one run of a cell measured, by name."""
Cell = TypeVar("Cell")


class ChildFailed(Exception):
    """A child's exit code was not 0. `errors`: what it wrote to stderr, "" where that went to the terminal."""

    def __init__(self, code: int, errors: str) -> None:
        self.code, self.errors = code, errors.strip()
        super().__init__((self.errors.splitlines() or [f"exit code {code}"])[-1])


def may_cap(otherwise: str = "") -> bool:
    """Whether memory can be capped here; prints why not, and `otherwise`."""
    why = cgroup.can_cap()
    if why:
        print(f"skipped: capped memory ({why}){otherwise}")
    return not why


def run_child(
    command: Sequence[str], cap_mib: int | None = None, *, stdin: str | None = None, show_errors: bool = False
) -> str:
    """What a process prints that has memory capped (None: not) and starts with the page cache dropped.

    `show_errors`: its stderr is the terminal's. Raises ChildFailed.
    """
    cgroup.drop_page_cache()
    with nullcontext() if cap_mib is None else cgroup.capped(cap_mib) as procs:

        def enter() -> None:
            if procs is not None:
                Path(procs).write_text(str(os.getpid()))

        errors = None if show_errors else subprocess.PIPE
        done = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=enter)
    if done.returncode:
        raise ChildFailed(done.returncode, done.stderr or "")
    return done.stdout


def run_self(script: str, arguments: Iterable[str], cap_mib: int | None = None, **how: Any) -> Any:
    """A study's own script as a child, as `run_child` has it: the JSON of the last line that it prints."""
    out = run_child([sys.executable, str(Path(script).resolve()), *arguments], cap_mib, **how)
    return json.loads(out.strip().splitlines()[-1])


def rounds(n: int, cells: Iterable[Cell]) -> Iterator[tuple[int, Cell]]:
    """Every cell in turn, `n` times over: a slow minute of the machine falls on all of them."""
    every = list(cells)
    return ((i, cell) for i in range(n) for cell in every)


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """The rows that agree in these values, by them, in the order of their first."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def median_of(rows: Iterable[Row], name: str) -> float | None:
    """The median of what the rows have under a name; None where none of them has a number there."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return float(statistics.median(values)) if values else None


def ratios(rows: Iterable[Row], base: Iterable[Row], name: str) -> list[float]:
    """Of each row, its value as a part of that of the base's row of the same round."""
    of_round = {row["round"]: row[name] for row in base}
    return [row[name] / of_round[row["round"]] for row in rows]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """`median (least-most)`."""
    middle, low, high = (format(v, form) for v in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"
