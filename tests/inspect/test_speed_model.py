"""The prediction without a model: hit rates of routes that are known, times of samples that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from bmoe.inspect import hit_model
from bmoe.inspect.hit_model import HitRange, RouteLaw, draw, fit, hit_rates, observe, recorded_hit_rate, replay
from bmoe.inspect.speed_model import Sample, TimeCurve, fit_curve, predict


def table(*tokens: list[list[int]], n_expert: int = 8) -> hit_model.Routes:
    """Routes of tokens, each a list of experts for each layer."""
    routes = np.zeros((len(tokens), len(tokens[0]), n_expert), np.bool_)
    for t, layers in enumerate(tokens):
        for layer, experts in enumerate(layers):
            routes[t, layer, experts] = True
    return routes


# ---- what is observed -------------------------------------------------------------------------------


def test_what_is_observed_is_counted() -> None:
    # Neighbours share one of two experts, tokens that are 4 or more apart none.
    steps = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7]]
    seen = observe(table(*([a] for a in steps)))
    assert seen is not None
    assert (seen.tokens, seen.near, seen.far, seen.distinct) == (7, 0.5, 0.0, 1.0)
    steps[6] = [0, 1]
    seen = observe(table(*([a] for a in steps)))
    assert seen is not None
    assert seen.near == pytest.approx(5 / 6 / 2)
    # Of the six pairs that far apart, (0, 6) shares 2 of 2 and (1, 6) shares 1.
    assert seen.far == pytest.approx((1.0 + 0.5) / 6)
    assert seen.distinct == 7 / 8


def test_a_layer_that_routes_nothing_does_not_count() -> None:
    steps = [[[0, 1], []] for _ in range(6)]
    seen = observe(table(*steps))
    assert seen is not None
    assert (seen.near, seen.far, seen.distinct) == (1.0, 1.0, 0.25)


def test_few_tokens_say_nothing() -> None:
    assert observe(table(*([[0]] for _ in range(5)))) is None
    assert observe(table(*([[]] for _ in range(9)))) is None
    assert observe(np.zeros((0, 0, 0), np.bool_)) is None


# ---- the law ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [RouteLaw(0.0, 1.3, 0.0), RouteLaw(0.4, 0.45, 0.15), RouteLaw(1.0, 0.1, 0.3)])
def test_a_law_is_found_again_from_its_routes(law: RouteLaw) -> None:
    routes = draw(law, 24, 128, 8, 24, seed=7)
    seen = observe(routes)
    assert seen is not None
    found = fit(seen, 128, 8).mid
    again = observe(draw(found, 24, 128, 8, 24, seed=8))
    assert again is not None
    assert again.near == pytest.approx(seen.near, abs=0.05)
    assert again.far == pytest.approx(seen.far, abs=0.04)
    assert again.distinct == pytest.approx(seen.distinct, abs=0.04)
    shares = (0.1, 0.2, 0.5)
    long = draw(law, 24, 128, 8, hit_model.PROMPT + hit_model.DECODE, seed=9)
    for hits, share in zip(hit_rates(fit(seen, 128, 8), 24, 128, 8, shares, "votes"), shares, strict=True):
        assert hits.mid == pytest.approx(replay(long, share, "votes"), abs=0.06)
        assert hits.low < hits.mid < hits.high


def test_routes_have_the_experts_that_a_token_uses() -> None:
    routes = draw(RouteLaw(0.3, 0.6, 0.5), 5, 16, 3, 40, seed=0)
    assert routes.shape == (40, 5, 16)
    assert (routes.sum(axis=2) == 3).all()


def test_what_is_kept_stays() -> None:
    uniform = [observe(draw(RouteLaw(0.0, 0.0, keep), 24, 64, 4, 40, seed=3)) for keep in (0.0, 0.5)]
    assert uniform[0] is not None
    assert uniform[1] is not None
    assert uniform[0].near == pytest.approx(4 / 64, abs=0.02)
    assert uniform[1].near == pytest.approx(0.5 + 0.5 * 4 / 64, abs=0.04)


def test_uniform_routes_hit_as_often_as_there_are_slots() -> None:
    routes = draw(RouteLaw(0.0, 0.0, 0.0), 12, 64, 4, 256, seed=1)
    for share in (0.25, 0.5, 0.75):
        assert replay(routes, share, "votes") == pytest.approx(share, abs=0.05)
    assert replay(routes, 1.0, "votes") > 0.98
    assert replay(routes, 0.0, "votes") == 0.0


def test_lru_below_one_token_all_but_never_hits() -> None:
    routes = draw(RouteLaw(0.0, 1.0, 0.0), 12, 64, 4, 200, seed=1)
    # The first tokens may find what the prompt has left.
    assert replay(routes, 0.9 * 4 / 64, "lru") < 0.01
    assert replay(routes, 0.9 * 4 / 64, "votes") > 0.1


def test_hit_rates_rise_with_the_share() -> None:
    seen = observe(draw(RouteLaw(0.4, 0.45, 0.15), 24, 128, 8, 16, seed=2))
    assert seen is not None
    shares = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0)
    hits = hit_rates(fit(seen, 128, 8), 48, 128, 8, shares, "votes")
    assert [h.mid for h in hits] == sorted(h.mid for h in hits)
    assert (hits[0].low, hits[0].mid, hits[0].high) == (0.0, 0.0, 0.0)
    assert all(0.0 <= h.low <= h.mid <= h.high <= 1.0 for h in hits)


def test_recorded_rates_between_the_shares() -> None:
    assert recorded_hit_rate(0.0) == HitRange(0.0, 0.0, 0.0)
    assert recorded_hit_rate(1.0) == HitRange(1.0, 1.0, 1.0)
    ten, fifteen, twenty = (recorded_hit_rate(share) for share in (0.1, 0.15, 0.2))
    assert (ten.low, ten.high) == (pytest.approx(0.606), pytest.approx(0.624))
    assert fifteen.low == pytest.approx((ten.low + twenty.low) / 2)


# ---- the time curve ---------------------------------------------------------------------------------


def test_the_curve_is_the_median_of_each_level() -> None:
    times = {1.0: [0.3, 0.2, 0.9], 0.5: [0.15, 0.16, 0.14], 0.0: [0.1, 0.1, 5.0]}
    curve = fit_curve([Sample(level, s, 0.0) for level, found in times.items() for s in found])
    assert curve is not None
    assert curve.points == ((0.0, 0.1), (0.5, 0.15), (1.0, 0.3))
    assert curve.hot
    assert curve.seconds(0.25) == pytest.approx(0.125)
    assert curve.seconds(0.75) == pytest.approx(0.225)
    assert (curve.seconds(-1), curve.seconds(2)) == (0.1, 0.3)


def test_more_read_never_takes_less() -> None:
    samples = [Sample(0.0, 0.1, 0), Sample(0.25, 0.3, 0), Sample(0.5, 0.2, 0), Sample(1.0, 0.4, 0)]
    curve = fit_curve(samples)
    assert curve is not None
    assert [seconds for _, seconds in curve.points] == pytest.approx([0.1, 0.25, 0.25, 0.4])


def test_without_a_token_that_missed_nothing_waiting_is_taken_off() -> None:
    curve = fit_curve([Sample(1.0, 0.3, 0.2), Sample(1.0, 0.32, 0.21), Sample(0.98, 0.31, 0.19)])
    assert curve is not None
    assert not curve.hot
    assert curve.seconds(0.0) == pytest.approx(0.11)
    assert curve.seconds(1.0) == pytest.approx(0.31)


def test_no_samples_no_curve() -> None:
    assert fit_curve([]) is None


# ---- a prediction -----------------------------------------------------------------------------------


def test_a_prediction_adds_up() -> None:
    curve = TimeCurve(((0.0, 0.1), (1.0, 0.3)), spread=0.1, hot=True)
    row = predict("20 %", 500, 0.2, True, HitRange(0.4, 0.5, 0.75), 1000, curve)
    assert (row.read.low, row.read.mid, row.read.high) == (250.0, 500.0, 600.0)
    assert row.tok_s is not None
    assert row.tok_s.mid == pytest.approx(1 / 0.2)
    assert row.tok_s.low == pytest.approx(1 / 0.22 / 1.1)
    assert row.tok_s.high == pytest.approx(1.1 / 0.15)


def test_no_time_no_speed() -> None:
    assert predict("none", 0, 0.0, True, HitRange(0, 0, 0), 1000, None).tok_s is None
