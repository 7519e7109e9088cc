"""The CSV files that runs write, as any reader has them that skips lines with a #."""

from __future__ import annotations

import csv
from pathlib import Path


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows by column name; each has as many fields as there are columns."""
    head, *rows = csv.reader(line for line in path.read_text().splitlines() if not line.startswith("#"))
    return [dict(zip(head, row, strict=True)) for row in rows]
