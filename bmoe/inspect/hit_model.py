"""How often a cache of a given size hits, from a few tokens' routes. Pure policy: no model, no I/O.

Two numbers of the observed tokens say how concentrated the routing is: what share of a token's experts a token some
places later has too (popular experts recur, whatever the distance), and how many different experts came at all. From
them a law follows: how popular a layer's experts are, from the first to the last, and how likely an expert stays for
the next token. Routes drawn from that law then go through the engine's own cache policy. docs/inspect.md compares the
result with recorded routes of three models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..streamer import ExpertCache

Routes = npt.NDArray[np.bool_]
"""Which experts were routed: [tokens, layers, experts]."""

FAR = 4
"""Tokens this far apart have in common what is popular; nearer ones also what stays from token to token."""
FEWEST = 6
"""Tokens below which nothing is concluded from routes."""
TAILS = (0.0, 0.2, 0.4, 0.7, 1.0)
PROMPT, DECODE = 128, 128
"""A hit rate is that of so many decoded tokens after a prompt of so many."""
MARGIN = 0.03
"""Half the width of the narrowest range: the median error on recorded routes is 2.2 points."""
LAYERS = 24
"""Layers that are drawn, at most: more make the answer smoother, not different."""
_DRAWS = 240
_STEPS = 14

TRACES = (
    (0.0, 0.0, 0.0),
    (0.02, 24.0, 29.7),
    (0.05, 42.8, 48.0),
    (0.1, 60.6, 62.4),
    (0.2, 76.3, 78.8),
    (0.35, 85.2, 92.3),
    (0.5, 89.0, 96.5),
    (0.75, 89.1, 97.1),
    (1.0, 100.0, 100.0),
)
"""Share of all experts that have a slot; lowest and highest decode hit rate of three recorded models, percent.

`python bench/studies/inspect_accuracy.py traces ../shared/data/route-traces/*.route.csv.gz` prints it; the last row is
what remains once every expert has been read.
"""


@dataclass(frozen=True)
class Observed:
    """What the routes of `tokens` tokens say. Shares, 0..1.

    `near`: of a token's experts, those that the next token has too; `far`: that a token `FAR` or more places later
    has; `distinct`: of a layer's experts, those that any of the tokens had.
    """

    tokens: int
    near: float
    far: float
    distinct: float


@dataclass(frozen=True)
class RouteLaw:
    """How experts are drawn: the i-th most popular of a layer weighs exp(-slope * (i^tail - 1) / tail).

    Tail 0 is the limit, a power law; 1 is exponential. `keep`: probability that a token's expert is the next one's too.
    """

    tail: float
    slope: float
    keep: float


@dataclass(frozen=True)
class LawRange:
    """The law that fits best, and the least and the most concentrated ones that the observation allows."""

    low: RouteLaw
    mid: RouteLaw
    high: RouteLaw


@dataclass(frozen=True)
class HitRange:
    """Hit rate, 0..1: as expected, and how low and how high it may be."""

    low: float
    mid: float
    high: float


def observe(routes: Routes) -> Observed | None:
    """Counts; None where there are too few tokens. Layers that routed nothing are left out."""
    n = len(routes)
    used = routes[:, routes.any(axis=(0, 2)), :] if n else routes
    if n < FEWEST or used.shape[1] == 0:
        return None
    flat = used.reshape(n, -1).astype(np.float64)
    common = flat @ flat.T / flat.sum() * n
    far = [common[i, j] for i in range(n) for j in range(i + FAR, n)]
    return Observed(n, float(np.diag(common, 1).mean()), float(np.mean(far)), float(used.any(axis=0).mean()))


def fit(seen: Observed, n_expert: int, n_used: int) -> LawRange:
    """The laws whose routes look like what was seen."""
    far = min(max(seen.far, n_used / n_expert), 0.95)
    keep = min(max(0.0, (seen.near - far) / (1.0 - far)), 0.95)
    spread = []
    for tail in TAILS:
        law = RouteLaw(tail, _slope(tail, n_expert, n_used, far), keep)
        spread.append(float(draw(law, LAYERS, n_expert, n_used, seen.tokens, seed=2).any(axis=0).mean()))
    # More different experts than a power law of this concentration gives: still a power law.
    tail = float(np.interp(-seen.distinct, -np.minimum.accumulate(spread), TAILS))
    mid = RouteLaw(tail, _slope(tail, n_expert, n_used, far), keep)
    # A few tokens of one text: the concentration itself is known to about a seventh.
    less, more = max(n_used / n_expert, far * 0.85), min(0.95, far * 1.15)
    low, high = max(0.0, tail - 0.3), min(1.0, tail + 0.3)
    return LawRange(
        replace(mid, tail=low, slope=_slope(low, n_expert, n_used, less)),
        mid,
        replace(mid, tail=high, slope=_slope(high, n_expert, n_used, more)),
    )


def draw(law: RouteLaw, n_layers: int, n_expert: int, n_used: int, n_tokens: int, seed: int) -> Routes:
    """Routes of `n_tokens` tokens by the law, in each layer with an order of popularity of its own."""
    rng = np.random.default_rng(seed)
    weight = law.slope * _shape(law.tail, n_expert)
    logits = weight[np.argsort(rng.random((n_layers, n_expert)), axis=1)]
    routes = np.zeros((n_tokens, n_layers, n_expert), np.bool_)
    for t in range(n_tokens):
        # The largest of weight + Gumbel noise are a draw without putting back.
        score = logits + rng.gumbel(size=(n_layers, n_expert))
        if t and law.keep:
            score[routes[t - 1] & (rng.random((n_layers, n_expert)) < law.keep)] += 1e6
        chosen = np.argpartition(-score, n_used - 1, axis=1)[:, :n_used]
        np.put_along_axis(routes[t], chosen, True, axis=1)
    return routes


def replay(routes: Routes, share: float, policy: str, prompt: int = PROMPT) -> float:
    """Decode hit rate, 0..1, of a cache with slots for `share` of all experts, after the first `prompt` tokens."""
    n, n_layers, n_expert = routes.shape
    n_used = int(routes[0, 0].sum())
    slots = round(min(1.0, share) * n_layers * n_expert)
    if not slots:
        return 0.0
    cache = ExpertCache([n_expert] * n_layers, [0] * n_layers, [slots], policy, max(1, min(n_used, 255)))
    rows = [[np.flatnonzero(routes[t, layer]).tolist() for t in range(n)] for layer in range(n_layers)]
    epoch = hits = looked = 0
    cache.prompt(0)
    for layer in range(n_layers):
        cache.route(layer, rows[layer][:prompt], epoch, slots // n_layers)
        epoch += 1
    cache.prompt(-1)
    for t in range(prompt, n):
        for layer in range(n_layers):
            found, missed = cache.route(layer, [rows[layer][t]], epoch)
            epoch += 1
            hits += len(found)
            looked += len(found) + len(missed)
    return hits / looked if looked else 0.0


def hit_rates(
    laws: LawRange, n_layers: int, n_expert: int, n_used: int, shares: Sequence[float], policy: str
) -> list[HitRange]:
    """The decode hit rate to expect where `shares` of all experts have a slot."""
    n_layers = min(n_layers, LAYERS)
    found = [
        [replay(routes, share, policy) for share in shares]
        for law in (laws.low, laws.mid, laws.high)
        for routes in [draw(law, n_layers, n_expert, n_used, PROMPT + DECODE, seed=1)]
    ]
    return [_at_least(share, *rates) for share, *rates in zip(shares, *found, strict=True)]


def _at_least(share: float, low: float, mid: float, high: float) -> HitRange:
    """A range that is no narrower than what a few tokens can tell; exact where no expert has a slot."""
    margin = MARGIN if share > 0 else 0.0
    return HitRange(max(0.0, min(low, mid - margin)), mid, min(1.0, max(high, mid + margin)))


def recorded_hit_rate(share: float) -> HitRange:
    """What recorded routes of three models have where `share` of all experts has a slot: nothing known of this one."""
    share = min(max(share, 0.0), 1.0)
    at, low, high = zip(*TRACES, strict=True)
    a, b = (float(np.interp(share, at, column)) / 100 for column in (low, high))
    return HitRange(a, (a + b) / 2, b)


def _shape(tail: float, n_expert: int) -> npt.NDArray[np.float64]:
    rank = np.arange(1, n_expert + 1, dtype=np.float64)
    return -np.log(rank) if tail == 0.0 else -(rank**tail - 1.0) / tail


def _slope(tail: float, n_expert: int, n_used: int, far: float) -> float:
    """The slope with which two tokens have a share `far` of their experts in common; by bisection on draws."""
    shape = _shape(tail, n_expert)
    noise = np.random.default_rng(0).gumbel(size=(_DRAWS, n_expert))
    low, high = 0.0, 6.0
    for _ in range(_STEPS):
        slope = (low + high) / 2
        chosen = np.argpartition(-(slope * shape + noise), n_used - 1, axis=1)[:, :n_used]
        p = np.bincount(chosen.ravel(), minlength=n_expert) / _DRAWS
        # The square of a measured share is too large by its variance.
        common = float((p * p - p * (1 - p) / (_DRAWS - 1)).sum()) / n_used
        low, high = (slope, high) if common < far else (low, slope)
    return (low + high) / 2
