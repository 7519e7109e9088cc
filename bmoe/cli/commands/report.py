"""`python -m bmoe report RUN.csv ...`: what `--csv` files say, side by side, as text and drawn in one page."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...accounting.bytes_by_cause import CAUSES
from ...accounting.token_record import TIME_COLUMNS
from ...analysis import plots, run_page, run_stats
from ...analysis.run_csv import Run, read_run
from ...analysis.run_stats import METRICS, Estimate
from ...host.files import check_writable, write_output
from ..flags import Parser
from ..terminal import say, write

MiB = 1 << 20


def build_parser() -> argparse.ArgumentParser:
    """All flags, in groups."""
    p = Parser(
        prog="bmoe report",
        description="Summarises files that --csv wrote: rates with 95 % intervals, where the time went, bytes by "
        "cause, memory; several are compared with the first.",
        epilog="docs/telemetry.md explains it.",
    )
    g = p.add_argument_group("report")
    g.add_argument("files", metavar="RUN.csv", type=Path, nargs="+", help="what --csv wrote; the first is the base")
    g.add_argument("--html", metavar="OUT", type=Path, help="draw it, in one page that a browser opens offline")
    return p


def run(args: argparse.Namespace) -> int:
    """Prints the report on stdout."""
    if args.html is not None:
        plots.require_plotly()
        check_writable(args.html, "--html", args.files)
    runs = [read_run(path) for path in args.files]
    for each in runs:
        for note in each.notes:
            say(f"bmoe: {note}")
    names = short_names(args.files)
    groups = [run_stats.groups(each) for each in runs]
    found = [run_stats.estimates(g) for g in groups]
    lines: list[str] = []
    for name, each, estimates in zip(names, runs, found, strict=True):
        lines += [*summary_lines(name, each, estimates), ""]
    if len(runs) > 1:
        compared = [run_stats.ratios(groups[0], g) for g in groups[1:]]
        lines += [*setting_lines(names, runs), *comparison_lines(names, found, compared), ""]
    write("\n".join(lines[:-1]) + "\n")
    if args.html is not None:
        page = plots.page("bmoe report", lines, run_page.figures(names, runs, [each[0] for each in found]))
        write_output(args.html, page, "--html")
        say(f"bmoe: {args.html} written")
    return 0


def short_names(paths: Sequence[Path]) -> list[str]:
    """File names, with as much of the path before them as tells them apart; numbered where nothing does."""
    for depth in range(1, 1 + max(len(p.parts) for p in paths)):
        names = [str(Path(*p.parts[-depth:])) for p in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{i}: {p}" for i, p in enumerate(paths, 1)]


def summary_lines(name: str, run: Run, estimates: Sequence[Estimate]) -> list[str]:
    """What one run was and did."""
    facts, rows = run.facts, run.decode
    end = f", stopped: {run.summary.get('stop', '?')}" if run.summary is not None else ", not ended"
    lines = [
        f"{name}: {Path(str(facts.get('model', '?'))).name} ({facts.get('arch', '?')}), {facts.get('engine', '?')}, "
        f"{len(run)} tokens{end}"
    ]
    if not rows.all():
        first = run.columns["wall_ms"][~rows]
        size = run.columns["read_bytes"][~rows].sum() / MiB
        lines.append(f"  first token after {first.mean() / 1e3:.3f} s, {size:.1f} MiB read before it")
    if not rows.any():
        return [*lines, "  no token after the first: no decode to report"]
    for metric, e in zip(METRICS, estimates, strict=True):
        if not math.isnan(e.value) and (e.value or metric.name in ("decode", "read", "hit")):
            lines.append(f"  {metric.name + ':':<19}{e.value:>10.2f} {metric.unit:<9} {_interval(e)}".rstrip())
    return [*lines, *time_lines(run), *cause_lines(run), *memory_lines(run)]


def time_lines(run: Run) -> list[str]:
    """The parts of the wall time of decode, largest first."""
    rows = run.decode
    wall = run.columns["wall_ms"][rows].sum()
    if wall <= 0:
        return []
    shares = sorted(((run.columns[c][rows].sum() / wall, c) for c in TIME_COLUMNS), reverse=True)
    parts = [f"{run_page.PART_NAMES[c]} {100 * share:.1f} %" for share, c in shares if round(share, 3)]
    return [f"  time: {', '.join(parts)}"]


def cause_lines(run: Run) -> list[str]:
    """Bytes by cause, over the whole run."""
    total = {cause: run.columns[f"{cause}_bytes"].sum() / MiB for cause in CAUSES}
    parts = [f"{cause.replace('_', ' ')} {size:.1f}" for cause, size in total.items() if size]
    again = np.nansum(run.columns["reread_bytes"]) / MiB
    return [f"  MiB by cause: {', '.join(parts) or 'nothing read'}; {again:.1f} had been read before"]


def memory_lines(run: Run) -> list[str]:
    """What the run held at most, and how little was left."""
    c = run.columns
    parts = []
    for column, what, worst in (
        ("rss_mib", "{:.0f} MiB resident at most", np.nanmax),
        ("swap_mib", "{:.0f} swapped out at most", np.nanmax),
        ("mem_available_mib", "{:.0f} available at least", np.nanmin),
    ):
        if not np.isnan(c[column]).all() and (column != "swap_mib" or c[column].max() > 0):
            parts.append(what.format(worst(c[column])))
    room = c["tight_limit_mib"] - c["tight_usage_mib"]
    if not np.isnan(room).all():
        parts.append(
            f"{np.nanmin(room):.0f} under the tightest cgroup's limit of {np.nanmin(c['tight_limit_mib']):.0f}"
        )
    return [f"  memory: {', '.join(parts)}"] if parts else ["  memory: not measured"]


def setting_lines(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Settings that differ between the runs."""
    differing = run_stats.differing(runs)
    if not differing:
        return ["settings: the same in all of them"]
    return ["settings that differ:", *(f"  {key}: {' | '.join(values)}" for key, values in differing.items())]


def comparison_lines(
    names: Sequence[str], found: Sequence[Sequence[Estimate]], compared: Sequence[Sequence[Estimate]]
) -> list[str]:
    """Each metric of all runs, and each run's over the first's with the interval of that ratio."""
    lines = [f"compared with {names[0]} (ratios with 95 % intervals, tokens of a batch drawn together):"]
    for i, metric in enumerate(METRICS):
        base = found[0][i]
        if math.isnan(base.value) or not any(each[i].value for each in found):
            continue
        lines.append(
            f"  {metric.name}, {metric.unit}: {base.value:.2f}" if metric.unit else f"  {metric.name}: {base.value:.2f}"
        )
        for name, each, ratio in zip(names[1:], found[1:], compared, strict=True):
            how = f"x {_value(ratio[i].value, 3)} {_ratio(ratio[i], metric.better)}".rstrip()
            lines.append(f"    {name}: {_value(each[i].value)}, {how}")
    return lines


def _interval(e: Estimate) -> str:
    return "" if math.isnan(e.low) else f"[{e.low:.2f}, {e.high:.2f}]"


def _ratio(e: Estimate, better: str) -> str:
    if math.isnan(e.low):
        return ""
    verdict = "no difference that the tokens show"
    if e.low > 1 or e.high < 1:
        verdict = "better" if (e.low > 1) == (better == "more") else "worse"
    return f"[{e.low:.3f}, {e.high:.3f}] {verdict}"


def _value(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
