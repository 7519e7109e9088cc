"""Figures of a route trace or an I/O trace, for one page that a browser opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .io_trace import IoTrace
from .locality import DISTANCES, Agreement, CurvePoint, HotExperts, RecordedHits, ReuseDistances, residency_map
from .plots import require_plotly
from .route_trace import RouteTrace

if TYPE_CHECKING:
    from types import ModuleType

MOST_COLUMNS = 4000
"""Columns of the residency map at most; more steps are averaged."""
MiB = 1 << 20


def route_figures(
    trace: RouteTrace,
    points: Sequence[CurvePoint],
    run: RecordedHits | None,
    budget: int | None,
    distances: ReuseDistances,
    heat: Sequence[HotExperts],
    agreements: Sequence[Agreement],
) -> list[Any]:
    """Figures of a route trace. `budget`: bytes of slots of the run that wrote it, None where that is not known."""
    go = require_plotly()
    return [
        _map(go, trace),
        _curve(go, points, run, budget),
        _reuse(go, distances),
        _hot(go, heat),
        _agreement(go, agreements),
    ]


def _map(go: ModuleType, trace: RouteTrace) -> Any:
    layers, columns, share = residency_map(trace)
    names = [f"turn {t}, {'decode' if p else 'prefill'}, step {s}" for t, p, s in columns]
    if len(names) > MOST_COLUMNS:
        group = -(-len(names) // MOST_COLUMNS)
        cuts = list(range(0, len(names), group))
        wide = np.ma.masked_invalid(share)
        share = np.stack([wide[:, a : a + group].mean(axis=1).filled(np.nan) for a in cuts], axis=1)
        names = [f"{names[a]} and the {min(group, len(names) - a) - 1} after it" for a in cuts]
    figure = go.Figure(
        go.Heatmap(
            z=[[None if np.isnan(v) else round(v, 3) for v in row] for row in share.tolist()],
            y=[f"{layer}" for layer in layers],
            text=[names] * len(layers),
            hovertemplate="layer %{y}, %{text}<br>%{z:.0%} resident<extra></extra>",
            colorscale="Viridis",
            zmin=0,
            zmax=1,
            colorbar={"title": "resident", "tickformat": ".0%"},
        )
    )
    first = next((i for i, (_, phase, _) in enumerate(columns) if phase), None)
    if first and len(names) == len(columns):
        figure.add_vline(x=first - 0.5, line={"color": "white", "dash": "dot"})
    figure.update_layout(title="What was resident when a layer routed to it", height=max(360, 14 * len(layers) + 160))
    figure.update_xaxes(title="steps, prefill first (dotted: decode begins)")
    figure.update_yaxes(title="layer", autorange="reversed", type="category")
    return figure


def _curve(go: ModuleType, points: Sequence[CurvePoint], run: RecordedHits | None, budget: int | None) -> Any:
    figure = go.Figure()
    for policy in points[0].rates if points else ():
        figure.add_scatter(
            x=[p.budget / MiB for p in points],
            y=[p.rates[policy] for p in points],
            mode="lines+markers",
            name=policy,
            hovertemplate="%{x:.0f} MiB: %{y:.1%}",
        )
    rate = run.rate(1) if run is not None else None
    if rate is not None and budget:
        figure.add_scatter(
            x=[budget / MiB], y=[rate], mode="markers", name="this run", marker={"size": 13, "symbol": "star"}
        )
    figure.update_layout(title="Hit rate in decode by memory for experts", hovermode="x unified")
    figure.update_xaxes(title="MiB", rangemode="tozero")
    figure.update_yaxes(title="hit rate", tickformat=".0%", range=[0, 1.02])
    return figure


def _reuse(go: ModuleType, distances: ReuseDistances) -> Any:
    names = bucket_names()
    total = max(1, distances.total)
    values = [n / total for n in (*distances.counts, distances.first)]
    figure = go.Figure(go.Bar(x=[*names, "first use"], y=values, hovertemplate="%{x}: %{y:.1%}<extra></extra>"))
    figure.update_layout(title="Tokens since the layer last used the expert (decode)")
    figure.update_yaxes(title="of routed experts", tickformat=".0%")
    figure.update_xaxes(type="category")
    return figure


def bucket_names() -> list[str]:
    """Names of the buckets of `Reuse.counts`."""
    lower = [1, *(d + 1 for d in DISTANCES[:-1])]
    names = [str(b) if a == b else f"{a}-{b}" for a, b in zip(lower, DISTANCES, strict=True)]
    return [*names, f"over {DISTANCES[-1]}"]


def _hot(go: ModuleType, heat: Sequence[HotExperts]) -> Any:
    ranked = [np.sort(h.counts)[::-1] / max(1, h.counts.sum()) for h in heat]
    order = [np.argsort(-h.counts, kind="stable").tolist() for h in heat]
    figure = go.Figure(
        go.Heatmap(
            z=[np.round(r, 5).tolist() for r in ranked],
            y=[f"{h.layer}" for h in heat],
            text=order,
            hovertemplate="layer %{y}, expert %{text}: %{z:.2%}<extra></extra>",
            colorscale="Inferno",
            colorbar={"title": "of routes", "tickformat": ".1%"},
        )
    )
    figure.update_layout(title="Experts of each layer by use, the hottest first", height=max(360, 14 * len(heat) + 160))
    figure.update_xaxes(title="rank")
    figure.update_yaxes(title="layer", autorange="reversed", type="category")
    return figure


def _agreement(go: ModuleType, agreements: Sequence[Agreement]) -> Any:
    figure = go.Figure()
    for a in agreements:
        figure.add_scatter(x=list(a.by_layer), y=list(a.by_layer.values()), mode="lines+markers", name=a.name)
    figure.update_layout(title="How much of a layer's routing is foreseen (decode)", hovermode="x unified")
    figure.update_xaxes(title="layer")
    figure.update_yaxes(title="of routed experts", tickformat=".0%", rangemode="tozero")
    return figure


def io_figures(trace: IoTrace) -> list[Any]:
    """Figures of an I/O trace: bytes over time and latencies, by cause."""
    go = require_plotly()
    c = trace.columns
    over, latency = go.Figure(), go.Figure()
    end = float(c["time_us"].max()) / 1e6
    edges = np.linspace(0, max(end, 1e-3), 201)
    for cause in dict.fromkeys(trace.causes.tolist()):
        at = trace.causes == cause
        moved, _ = np.histogram(c["time_us"][at] / 1e6, edges, weights=c["bytes"][at] / MiB)
        over.add_bar(x=edges[:-1].round(4).tolist(), y=(moved / (edges[1] - edges[0])).round(2).tolist(), name=cause)
        levels = np.linspace(0, 100, 201)
        latency.add_scatter(
            x=np.percentile(c["latency_us"][at], levels).round(1).tolist(), y=(levels / 100).tolist(), name=cause
        )
    over.update_layout(title="Bytes read by the time the read began", barmode="stack", bargap=0)
    over.update_xaxes(title="s")
    over.update_yaxes(title="MiB/s")
    latency.update_layout(title="Latency of a read: share of reads that took no longer")
    latency.update_xaxes(title="us", type="log")
    latency.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return [over, latency]
