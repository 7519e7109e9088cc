"""`python -m bmoe trace FILE`: what a route trace or an I/O trace says, as text, and drawn in one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...analysis import locality, plots, trace_page
from ...analysis.io_trace import IoTrace, is_io_trace, read_io_trace, summarise
from ...analysis.replay import CacheReplay
from ...analysis.route_trace import RouteTrace, read_trace
from ...analysis.table import TableError
from ...host.files import check_writable, write_output
from ..flags import Parser
from ..terminal import say, write

MiB = 1 << 20


def build_parser() -> argparse.ArgumentParser:
    """All flags, in groups."""
    p = Parser(
        prog="bmoe trace",
        description="Summarises a trace that --route-trace or --io-trace wrote: reuse distances, hit rate by memory, "
        "hot experts, agreement of predictors; or reads by cause.",
        epilog="docs/traces.md explains it.",
    )
    g = p.add_argument_group("trace")
    g.add_argument("file", metavar="FILE", type=Path, help="the trace, CSV, gzipped or not")
    g.add_argument("--html", metavar="OUT", type=Path, help="draw it, in one page that a browser opens offline")
    return p


def run(args: argparse.Namespace) -> int:
    """Prints the summary on stdout."""
    if args.html is not None:
        plots.require_plotly()
        check_writable(args.html, "--html", [args.file])
    lines, figures = _io(args) if is_io_trace(args.file) else _routes(args)
    write("\n".join(lines) + "\n")
    if args.html is not None:
        write_output(args.html, plots.page(f"bmoe trace: {args.file.name}", lines, figures), "--html")
        say(f"bmoe: {args.html} written")
    return 0


def _io(args: argparse.Namespace) -> tuple[list[str], list[object]]:
    trace = read_io_trace(args.file)
    return io_lines(trace), trace_page.io_figures(trace) if args.html is not None else []


def _routes(args: argparse.Namespace) -> tuple[list[str], list[object]]:
    trace = read_trace(args.file)
    distances, points, heat = (
        locality.reuse_distances(trace),
        locality.hit_rate_curve(trace),
        locality.hot_experts(trace),
    )
    agreements, had = locality.predictor_agreement(trace), locality.recorded_hits(trace)
    lines = head_lines(trace, had)
    lines += reuse_lines(distances) + curve_lines(points) + agreement_lines(agreements) + hot_lines(heat)
    figures: list[object] = []
    if args.html is not None:
        figures = trace_page.route_figures(trace, points, had, slot_bytes(trace), distances, heat, agreements)
    return lines, figures


def slot_bytes(trace: RouteTrace) -> int | None:
    """Memory of the slots of the run that wrote the trace, bytes; None where the preamble does not tell."""
    try:
        slots, sizes = (trace.header[key].split(",") for key in ("slots", "slot_bytes"))
        return sum(int(n) * int(size) for n, size in zip(slots, sizes, strict=True))
    except (KeyError, ValueError):
        return None


def head_lines(trace: RouteTrace, had: locality.RecordedHits | None) -> list[str]:
    """What was traced, what the run had, and what a replay of it gives."""
    h, batches = trace.header, list(trace.batches())
    tokens = [len({(b.turn, b.step, i) for b in batches if b.phase == p for i in range(len(b.rows))}) for p in (0, 1)]
    if batches and any(b.prefill for b in batches):
        steps = trace.columns["step"][trace.columns["phase"] == 0]
        turns = trace.columns["turn"][trace.columns["phase"] == 0]
        tokens[0] = len(set(zip(turns.tolist(), steps.tolist(), strict=True)))
    lines = [
        f"trace: {h.get('model', '?')} ({h.get('arch', '?')}), {len(trace.expert_bytes)} layers of {trace.n_expert} "
        f"experts, {tokens[0]} tokens of prefill and {tokens[1]} of decode, {len(trace)} rows"
    ]
    if had is not None:
        lines.append(f"run: {_percent(had.rate(1))} hit in decode, {_percent(had.rate(0))} in prefill")
    if "slots" in h:
        try:
            counts = CacheReplay.recorded(trace).run()
        except TableError as e:
            return [*lines, f"replay: {e}"]
        same = had is not None and all(counts.count(p) == (had.hits[p], had.looked[p]) for p in (0, 1))
        lines.append(
            f"replay: {_percent(counts.rate(1))} and {_percent(counts.rate(0))} with the run's own slots and policy "
            f"({h.get('policy', '?')}), {'every hit and miss the same' if same else 'NOT the same hits and misses'}"
        )
    return lines


def reuse_lines(distances: locality.ReuseDistances) -> list[str]:
    if not distances.total:
        return ["reuse: no decode step"]
    parts = [
        f"{name}: {100 * n / distances.total:.1f} %"
        for name, n in zip(trace_page.bucket_names(), distances.counts, strict=True)
    ]
    median = "-" if distances.median is None else f"{distances.median:g}"
    return [
        f"reuse: tokens since the layer last used the expert, of decode's routes: {', '.join(parts)}; first use "
        f"{100 * distances.first / distances.total:.1f} %; median {median}"
    ]


def curve_lines(points: list[locality.CurvePoint]) -> list[str]:
    if not points:
        return []
    policies = list(points[0].rates)
    lines = [
        "hit rate in decode by memory for experts:",
        f"{'MiB':>10}{'share':>8}" + "".join(f"{p:>10}" for p in policies),
    ]
    for p in points:
        cells = "".join(f"{100 * p.rates[policy]:>8.2f} %" for policy in policies)
        lines.append(f"{p.budget / MiB:>10.1f}{100 * p.share:>6.0f} %{cells}")
    return lines


def agreement_lines(agreements: list[locality.Agreement]) -> list[str]:
    if not agreements:
        return []
    parts = [f"{a.name} {100 * a.share:.1f} %" for a in agreements]
    return [f"predictors: of decode's routed experts, named by {', '.join(parts)}"]


def hot_lines(heat: list[locality.HotExperts]) -> list[str]:
    lines = ["hot experts (share of the layer's routes; then what the most used quarter gets):"]
    for h in heat:
        total = max(1, int(h.counts.sum()))
        top = ", ".join(f"{e} {100 * h.counts[e] / total:.1f} %" for e in h.top)
        lines.append(f"  layer {h.layer}: {top or 'none'}; quarter {100 * h.quarter:.1f} %")
    return lines


def io_lines(trace: IoTrace) -> list[str]:
    """The reads by cause."""
    lines = [f"trace: {len(trace)} reads, {int(trace.columns['bytes'].sum()) / MiB:.1f} MiB moved"]
    for r in summarise(trace):
        p50, p90, p99, most = r.latency
        speed = "-" if r.mib_s is None else f"{r.mib_s:.0f}"
        odd = (f", {r.buffered} through the page cache" if r.buffered else "") + (
            f", {r.failed} failed" if r.failed else ""
        )
        lines.append(
            f"  {r.cause}: {r.n} reads, {r.slice_bytes / MiB:.1f} MiB wanted, {r.bytes / MiB:.1f} moved, {speed} MiB/s "
            f"while one is under way; latency {p50:.0f} us median, {p90:.0f} p90, {p99:.0f} p99, {most:.0f} longest; "
            f"queued {r.queue_p50:.0f} us{odd}"
        )
    return lines


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
