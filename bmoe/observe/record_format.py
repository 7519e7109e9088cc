"""Records of tokens as files and programs read them: CSV, JSON. Pure: no model, no I/O. docs/telemetry.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..accounting.token_record import COLUMNS, TokenRecord, Value

MAGIC = "# bmoe run v1"
"""The first line of a CSV file."""


def csv_row(values: Sequence[Value]) -> str:
    """One row; floats to six digits behind the point, which keeps nanoseconds and bytes of MiB exact."""
    return ",".join("" if v is None else f"{v:.6f}" if isinstance(v, float) else str(v) for v in values) + "\n"


def csv_head(run: Mapping[str, Any]) -> str:
    """The preamble and the line of column names. `run`: `engine`, `model`, `arch`, `config`, each of them JSON."""
    lines = [MAGIC, *(f"# {key}={json.dumps(value)}" for key, value in run.items())]
    return "\n".join(lines) + "\n" + ",".join(COLUMNS) + "\n"


def csv_summary(summary: Mapping[str, Any]) -> str:
    """The trailer: the run has ended, and how."""
    return f"# summary {json.dumps(summary)}\n"


def json_line(record: TokenRecord, text: str) -> str:
    """The record as one line of JSON, with the text that it brought."""
    values = {name: round(v, 6) if isinstance(v, float) else v for name, v in record.values().items()}
    return json.dumps({**values, "text": text})
