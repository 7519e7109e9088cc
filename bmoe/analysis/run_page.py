"""Figures of one or several runs' CSV files, for one page that a browser opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..accounting.bytes_by_cause import CAUSES
from ..accounting.token_record import TIME_COLUMNS
from .plots import require_plotly
from .run_csv import Floats, Run
from .run_stats import Estimate

if TYPE_CHECKING:
    from types import ModuleType

MOST_BARS = 400
"""Bars of one figure at most: more tokens are taken together."""
MiB = 1 << 20
PART_NAMES = {
    "compute_ms": "computing",
    "stall_ms": "waiting for reads",
    "mgmt_ms": "cache management",
    "build_ms": "building graphs",
    "mtp_draft_ms": "drafting",
    "loop_overhead_ms": "loop around them",
    "output_ms": "text out",
    "rest_ms": "rest of the graphs (a remainder)",
}
_MEMORY = {
    "rss_anon_mib": "anonymous, resident",
    "rss_file_mib": "of files, resident",
    "swap_mib": "swapped out",
    "mem_available_mib": "MemAvailable",
    "cgroup_usage_mib": "own cgroup",
    "tight_usage_mib": "tightest cgroup",
    "tight_limit_mib": "its limit",
}


def figures(names: Sequence[str], runs: Sequence[Run], rates: Sequence[Estimate]) -> list[Any]:
    """All figures; `names`: of the runs; `rates`: tokens per second of each."""
    go = require_plotly()
    out = [_speed(go, names, runs)]
    if len(runs) > 1:
        out.append(_compared(go, names, rates))
    for name, run in zip(names, runs, strict=True):
        out.append(_time(go, name, run))
    for name, run in zip(names, runs, strict=True):
        out.append(_bytes(go, name, run))
    for name, run in zip(names, runs, strict=True):
        out.append(_memory(go, name, run))
    return out


class Bins:
    """Rows taken together so that at most `most` remain; `starts`: the first row of each, `counts`: rows in it."""

    def __init__(self, n: int, most: int = MOST_BARS) -> None:
        size = max(1, -(-n // most))
        self.starts: npt.NDArray[np.intp] = np.arange(0, n, size)
        self.counts = np.diff(np.append(self.starts, n)).astype(np.float64)

    def per_token(self, values: Floats) -> list[float]:
        """The mean over each bin's rows; what was not measured counts as nothing."""
        return _short(np.add.reduceat(np.nan_to_num(values), self.starts) / self.counts)


def _speed(go: ModuleType, names: Sequence[str], runs: Sequence[Run]) -> Any:
    figure = go.Figure()
    for name, run in zip(names, runs, strict=True):
        rows = run.decode
        wall = run.columns["wall_ms"][rows]
        if not len(wall):
            continue
        window = max(8, len(wall) // 100)
        figure.add_scatter(
            x=run.columns["step"][rows].astype(int).tolist(),
            y=_short(moving_rate(wall, window)),
            mode="lines",
            name=name,
            hovertemplate="token %{x}: %{y:.2f} tok/s",
        )
    figure.update_layout(title="Tokens per second, over the last tokens (1 % of the run, 8 at least)")
    figure.update_layout(hovermode="x unified", showlegend=True)
    figure.update_xaxes(title="token")
    figure.update_yaxes(title="tok/s", rangemode="tozero")
    return figure


def moving_rate(wall_ms: Floats, window: int) -> Floats:
    """Tokens per second over the last `window` tokens, fewer at the beginning."""
    total = np.concatenate([[0.0], np.cumsum(wall_ms)])
    ends = np.arange(1, len(wall_ms) + 1)
    starts = np.maximum(0, ends - window)
    took = total[ends] - total[starts]
    return np.where(took > 0, 1e3 * (ends - starts) / np.where(took > 0, took, 1.0), np.nan)


def _compared(go: ModuleType, names: Sequence[str], rates: Sequence[Estimate]) -> Any:
    figure = go.Figure(
        go.Scatter(
            x=[_number(r.value) for r in rates],
            y=list(names),
            mode="markers",
            marker={"size": 11},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [_number(r.high - r.value) for r in rates],
                "arrayminus": [_number(r.value - r.low) for r in rates],
            },
            hovertemplate="%{y}: %{x:.2f} tok/s<extra></extra>",
        )
    )
    figure.update_layout(title="Decode, tokens per second with 95 % intervals", height=160 + 50 * len(names))
    figure.update_xaxes(title="tok/s", rangemode="tozero")
    figure.update_yaxes(type="category", autorange="reversed")
    return figure


def _time(go: ModuleType, name: str, run: Run) -> Any:
    figure = go.Figure()
    rows = run.decode
    if rows.any():
        bins = Bins(int(rows.sum()))
        steps = run.columns["step"][rows][bins.starts].astype(int).tolist()
        for column in TIME_COLUMNS:
            values = run.columns[column][rows]
            if values.any():
                figure.add_bar(x=steps, y=bins.per_token(values), name=PART_NAMES[column])
    figure.update_layout(title=f"Where the time went: {name}", barmode="relative", bargap=0, showlegend=True)
    figure.update_xaxes(title="token")
    figure.update_yaxes(title="ms/token")
    return figure


def _bytes(go: ModuleType, name: str, run: Run) -> Any:
    figure = go.Figure()
    rows = run.decode
    if rows.any():
        bins = Bins(int(rows.sum()))
        steps = run.columns["step"][rows][bins.starts].astype(int).tolist()
        for cause in CAUSES:
            values = run.columns[f"{cause}_bytes"][rows] / MiB
            if values.any():
                figure.add_bar(x=steps, y=bins.per_token(values), name=cause.replace("_", " "))
        again = run.columns["reread_bytes"][rows] / MiB
        figure.add_scatter(x=steps, y=bins.per_token(again), name="of it read before", mode="lines")
    figure.update_layout(title=f"Bytes read by cause: {name}", barmode="stack", bargap=0, showlegend=True)
    figure.update_xaxes(title="token")
    figure.update_yaxes(title="MiB/token", rangemode="tozero")
    return figure


def _memory(go: ModuleType, name: str, run: Run) -> Any:
    figure = go.Figure()
    at = Bins(len(run), 4 * MOST_BARS).starts
    steps = run.columns["step"][at].astype(int).tolist()
    for column, what in _MEMORY.items():
        values = run.columns[column][at]
        if not np.isnan(values).all():
            figure.add_scatter(x=steps, y=[_number(v) for v in values.tolist()], name=what, mode="lines")
    figure.update_layout(title=f"Memory: {name}", hovermode="x unified", showlegend=True)
    figure.update_xaxes(title="token")
    figure.update_yaxes(title="MiB, log", type="log")
    return figure


def _short(values: Floats) -> list[float]:
    return [round(v, 4) for v in values.tolist()]


def _number(value: float) -> float | None:
    """What JSON can hold."""
    return None if value != value else round(value, 4)
