"""Statistics of runs: groups of tokens, intervals, comparisons, and the rate along a run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from run_files import row, steady, write_run

from bmoe.analysis import run_page, run_stats
from bmoe.analysis.run_csv import read_run


def test_groups_are_batches(tmp_path: Path) -> None:
    rows = [row(0, 100), row(1, 9, 3), row(2, 0.5, 0), row(3, 0.5, 0), row(4, 4, 1), row(5, 8, 2), row(6, 1, 0)]
    g = run_stats.groups(read_run(write_run(tmp_path / "a.csv", rows)))
    assert g.tokens.tolist() == [3, 1, 2]
    assert g.sums["wall_ms"].tolist() == [10, 4, 9]
    rate, wall = run_stats.METRICS[:2]
    assert rate.value(g) == pytest.approx(1e3 * 6 / 23)
    assert wall.value(g) == pytest.approx(23 / 6)
    # Each sample is made of whole groups: three drawn from three.
    possible = {
        sum(g.tokens[i] for i in (a, b, c)) / sum(g.sums["wall_ms"][i] for i in (a, b, c)) * 1e3
        for a in range(3) for b in range(3) for c in range(3)
    }  # fmt: skip
    samples = run_stats.resampled(g, [rate], n=500)[:, 0]
    assert {round(s, 6) for s in samples.tolist()} <= {round(p, 6) for p in possible}


def test_intervals_cover(tmp_path: Path) -> None:
    """Of many runs with a known rate, about 95 of 100 intervals have it; the seed decides all of it."""
    metric = run_stats.METRICS[1]
    rng, inside = np.random.default_rng(3), 0
    for _ in range(120):
        n = 60
        sums = {name: np.zeros(n) for name in run_stats.SUMMED} | {"wall_ms": rng.gamma(4.0, 2.5, n)}
        g = run_stats.Groups(np.ones(n), sums)
        e = run_stats.estimates(g, [metric])[0]
        inside += e.low <= 10.0 <= e.high
        assert e == run_stats.estimates(g, [metric])[0]
        assert e.low <= e.value <= e.high
    assert 102 <= inside <= 119


def test_a_comparison_tells_runs_apart(tmp_path: Path) -> None:
    slow = run_stats.groups(read_run(write_run(tmp_path / "a.csv", steady(200, 10.0))))
    same = run_stats.groups(read_run(write_run(tmp_path / "b.csv", steady(200, 10.0))))
    fast = run_stats.groups(read_run(write_run(tmp_path / "c.csv", steady(200, 8.0))))
    rate = run_stats.METRICS[:1]
    e = run_stats.ratios(slow, fast, rate)[0]
    assert e.value == pytest.approx(1.25)
    assert 1.2 < e.low < 1.25 < e.high < 1.3
    e = run_stats.ratios(slow, same, rate)[0]
    assert e.low < 1.0 < e.high
    nothing = run_stats.Groups(np.empty(0), {name: np.empty(0) for name in run_stats.SUMMED})
    assert all(math.isnan(v) for v in run_stats.ratios(slow, nothing, rate)[0])


def test_a_moving_rate() -> None:
    rate = run_page.moving_rate(np.array([100.0, 100.0, 0.0, 300.0]), 2)
    assert rate.tolist() == pytest.approx([10.0, 10.0, 20.0, 2000 / 300])
