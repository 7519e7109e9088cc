"""Reuse, hot experts and predictors of routes, on traces written by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bmoe.analysis.route_trace import RouteTrace


def plain_trace(rows: list[tuple[int, int, int, int, int, int]], n_expert: int = 8) -> RouteTrace:
    names = ("turn", "phase", "step", "layer", "slot", "expert")
    table = np.array(rows, np.int64)
    layers = {int(layer): 100 for layer in set(table[:, 3])}
    return RouteTrace(Path("x"), {}, layers, n_expert, {n: table[:, i] for i, n in enumerate(names)})


def test_the_analysis_by_hand() -> None:
    from bmoe.analysis import locality as analysis

    # One layer, one expert per token: prefill 5, then decode 5, 6, 5, 5, 7.
    trace = plain_trace([(0, 0, 0, 0, 0, 5), *((0, 1, 1 + i, 0, 0, e) for i, e in enumerate([5, 6, 5, 5, 7]))])
    reuse = analysis.reuse_distances(trace)
    assert (reuse.counts[:2], reuse.first, reuse.median) == ((2, 1), 2, 1.0)
    assert reuse.total == 5
    (hot,) = analysis.hot_experts(trace)
    assert hot.top == (5, 6, 7)
    assert hot.counts.tolist() == [0, 0, 0, 0, 0, 4, 1, 1]
    shares = {a.name: a.share for a in analysis.predictor_agreement(trace)}
    # Before: 5 5 6 5 5; two before (from the second decode token on): 5 5 6 5; most used: 5 throughout.
    assert shares["the token before"] == 2 / 5
    assert shares["two tokens before"] == 1 / 4
    assert shares["most used so far"] == 3 / 5
    assert "layer before, learned" not in shares
    assert analysis.recorded_hits(trace) is None


def test_the_layer_before_is_learned() -> None:
    from bmoe.analysis import locality as analysis

    rng = np.random.default_rng(0)
    rows = []
    for step in range(60):
        e = int(rng.integers(8))
        # The second layer's expert follows from the first's.
        rows += [(0, 1, step, 0, 0, e), (0, 1, step, 1, 0, (e + 3) % 8)]
    shares = {a.name: a.share for a in analysis.predictor_agreement(plain_trace(rows))}
    assert shares["layer before, learned"] > 0.95
    assert shares["the token before"] < 0.4
