"""What to expect of a model at several budgets: `inspection`, `probe`, `route_model` and `predict_speed` together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .hit_model import HitRange, LawRange, Observed, fit, hit_rates, observe, recorded_hit_rate
from .inspection import Inspection
from .measurement import DiskSpeed, Probe, Progress, measure_disk, run_probe
from .speed_model import Prediction, TimeCurve, fit_curve, predict

SHARES = (10, 20, 35, 50, 100)
"""Percent of the experts that have a slot, for the table."""


@dataclass(frozen=True)
class Measured:
    """What was measured at the file. `uncached`: the curve without a cache, where everything is read. Curves and what
    was `seen` of the routes are None where too little could be."""

    disk: DiskSpeed
    probe: Probe
    curve: TimeCurve | None
    uncached: TimeCurve | None
    seen: Observed | None
    laws: LawRange | None


def measure(found: Inspection, progress: Progress | None = None) -> Measured:
    """Measures at the file of a model with experts: seconds. Raises ReadError where it cannot be read."""
    disk = measure_disk(found.file, found.layers, found.config)
    probe = run_probe(Path(found.file.paths[0]), found.config, found.sizes.working_set, progress)
    seen = observe(probe.routes)
    laws = fit(seen, found.n_expert, min(found.n_used, found.n_expert)) if seen is not None else None
    uncached = fit_curve(probe.uncached)
    # What tokens take without waiting is all that is known where there was no memory for a cache.
    return Measured(disk, probe, fit_curve(probe.samples) or uncached, uncached, seen, laws)


def budgets(found: Inspection) -> list[tuple[str, int]]:
    """The budgets of the table: a name and bytes, ascending; the one that a run gets last."""
    rows = [("none", 0), ("one token", found.sizes.working_set)]
    rows += [(f"{share} %", found.sizes.experts if share == 100 else found.budget_of(share / 100)) for share in SHARES]
    rows = sorted(dict(rows).items(), key=lambda row: row[1])
    if found.decision is not None:
        rows.append(("auto" if found.decision.mode == "auto" else "as asked", found.decision.budget))
    return rows


def forecast(found: Inspection, measured: Measured | None, rows: list[tuple[str, int]]) -> list[Prediction]:
    """What to expect of each budget."""
    shares = [found.share(budget) for _, budget in rows]
    out = []
    for (name, budget), share, hits in zip(rows, shares, _hits(found, measured, shares), strict=True):
        curve = None
        if measured is not None:
            curve = measured.curve if share else measured.uncached
        out.append(predict(name, budget, share, found.fits(budget), hits, found.token_bytes, curve))
    return out


def _hits(found: Inspection, measured: Measured | None, shares: list[float]) -> list[HitRange]:
    if measured is None or measured.laws is None:
        return [recorded_hit_rate(share) for share in shares]
    n_used = min(found.n_used, found.n_expert)
    return hit_rates(measured.laws, len(found.layers), found.n_expert, n_used, shares, found.config.policy)
