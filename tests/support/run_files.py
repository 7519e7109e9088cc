"""Files as `--csv` writes them, of rows that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bmoe.accounting.token_record import COLUMNS
from bmoe.observe.record_format import csv_head, csv_row, csv_summary

Row = dict[str, float | None]


def row(step: int, wall: float, batch: int = 1, **values: float | None) -> Row:
    """One row: `wall` ms, three quarters of it computing and one waiting; all else 0."""
    out: Row = dict.fromkeys(COLUMNS, 0)
    out |= {"step": step, "steps": 9, "wall_ms": wall, "compute_ms": 0.75 * wall, "stall_ms": 0.25 * wall}
    out |= {"phase": int(step > 0), "mtp_batch": batch if step else 0, "hits": 3 * batch, "misses": batch}
    return out | {"read_bytes": batch << 20, "base_bytes": batch << 20, "cgroup_limit_mib": None} | values


def write_run(path: Path, rows: Sequence[Row], end: bool = True, **config: object) -> Path:
    """A whole file, or with `end` False one of a run that was killed."""
    run_facts = {"engine": "bmoe-0", "model": "/m/tiny.gguf", "arch": "qwen3moe", "config": {"overlap": True, **config}}
    text = csv_head(run_facts) + "".join(csv_row(list(r.values())) for r in rows)
    path.write_text(text + (csv_summary({"stop": "length"}) if end else ""))
    return path


def steady(n: int, wall: float) -> list[Row]:
    """Rows of `n` tokens that take about `wall` ms each."""
    rng = np.random.default_rng(1)
    return [row(0, 500.0), *(row(i, wall + float(rng.normal(0, 0.05 * wall))) for i in range(1, n))]
