"""How fast a model will run with a cache of a given size. Pure policy: measured samples in, predictions out.

The time of a token depends on how much of what it routes has to be read. That curve is measured: single tokens, of
which a chosen share of the experts is taken out of the cache before. The hit rate of a budget comes from
`route_model`; the two together give the speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .hit_model import HitRange

LEVELS = (1.0, 0.0, 0.5, 0.25, 0.75, 0.1)
"""Shares of a token's routed bytes that are read in the measured tokens, those that matter most first."""


@dataclass(frozen=True)
class Sample:
    """One measured token. `missed`: share of its routed bytes that was read; seconds of its graph, and of that spent
    waiting for reads (mean over compute threads)."""

    missed: float
    seconds: float
    stall: float


@dataclass(frozen=True)
class TimeCurve:
    """Seconds of a token by the share of its routed bytes that is read: points, ascending, joined by straight lines.

    `spread`: half of the middle half of the measured times, relative. `hot`: tokens without a miss were measured;
    else the first point is what tokens took beside waiting.
    """

    points: tuple[tuple[float, float], ...]
    spread: float
    hot: bool

    def seconds(self, missed: float) -> float:
        """Between the points by straight lines, beyond them as at the last one."""
        before = self.points[0]
        for at in self.points:
            if missed <= at[0]:
                part = (missed - before[0]) / (at[0] - before[0]) if at[0] > before[0] else 1.0
                return before[1] + part * (at[1] - before[1])
            before = at
        return before[1]


@dataclass(frozen=True)
class Range:
    """A value as expected, and how low and how high it may be."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """What to expect of one budget. `share`: of all experts, those that have a slot; `read`: bytes per token.

    `tok_s` is None where no time was measured.
    """

    name: str
    budget: int
    share: float
    fits: bool
    hits: HitRange
    read: Range
    tok_s: Range | None


def fit_curve(samples: Sequence[Sample]) -> TimeCurve | None:
    """The curve of measured tokens: the median of each level, never falling with what is read; None without any."""
    groups: dict[float, list[Sample]] = {}
    for s in samples:
        groups.setdefault(min(LEVELS, key=lambda level: abs(level - s.missed)), []).append(s)
    if not groups:
        return None
    points = [
        (statistics.fmean(s.missed for s in groups[level]), statistics.median(s.seconds for s in groups[level]))
        for level in sorted(groups)
    ]
    hot = 0.0 in groups
    if not hot:
        lowest = groups[min(groups)]
        points.insert(0, (0.0, statistics.median(max(0.0, s.seconds - s.stall) for s in lowest)))
    return TimeCurve(tuple(_rising(points)), _spread(list(groups.values())), hot)


def _rising(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The nearest curve that never falls: neighbours that fall get their mean."""
    blocks: list[list[float]] = []  # sum of times, number
    for _, seconds in points:
        blocks.append([seconds, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, n = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += n
    times = [total / n for total, n in blocks for _ in range(int(n))]
    return [(missed, seconds) for (missed, _), seconds in zip(points, times, strict=True)]


def _spread(groups: Sequence[Sequence[Sample]]) -> float:
    found = []
    for group in groups:
        times = sorted(s.seconds for s in group)
        if len(times) >= 3:
            low, middle, high = statistics.quantiles(times, n=4)
            found.append((high - low) / 2 / middle if middle else 0.0)
    return statistics.median(found) if found else 0.0


def predict(
    name: str,
    budget: int,
    share: float,
    fits: bool,
    hits: HitRange,
    token_bytes: int,
    curve: TimeCurve | None,
) -> Prediction:
    """The speed of one budget. `token_bytes`: what a token routes."""
    read = Range(*(token_bytes * (1.0 - hit) for hit in (hits.high, hits.mid, hits.low)))
    tok_s = None
    if curve is not None:
        slow, mid, fast = (curve.seconds(1.0 - hit) for hit in (hits.low, hits.mid, hits.high))
        tok_s = Range(1.0 / (slow * (1.0 + curve.spread)), 1.0 / mid, (1.0 + curve.spread) / fast)
    return Prediction(name, budget, share, fits, hits, read, tok_s)
