"""What a route trace says of locality: pure arithmetic on its columns, no model, no plotting."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .replay import POLICIES, CacheReplay
from .route_trace import DECODE, RouteTrace

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
"""Budgets of the hit-rate curve, as shares of the bytes of all experts."""
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Upper ends of the reuse-distance buckets, tokens."""


@dataclass(frozen=True)
class Tokens:
    """The rows of one layer by token: `of_row` is the token's place in the layer's order, `keys` what it is.

    A key is (turn, step, place among the layer's tokens of that step): a verify batch has several of one step.
    """

    rows: IntArray
    of_row: IntArray
    keys: list[tuple[int, int, int]]


def tokens_by_layer(trace: RouteTrace) -> dict[int, Tokens]:
    """The rows of each layer, in the order of the trace, and to which token each belongs."""
    c = trace.columns
    out = {}
    for layer in sorted(trace.expert_bytes):
        rows = np.flatnonzero(c["layer"] == layer)
        turn, step, slot = (c[k][rows] for k in ("turn", "step", "slot"))
        new = np.ones(len(rows), bool)
        new[1:] = (np.diff(turn) != 0) | (np.diff(step) != 0) | (np.diff(slot) <= 0)
        of_row = np.cumsum(new) - 1
        keys: list[tuple[int, int, int]] = []
        for t, s in zip(turn[new].tolist(), step[new].tolist(), strict=True):
            place = keys[-1][2] + 1 if keys and keys[-1][:2] == (t, s) else 0
            keys.append((t, s, place))
        out[layer] = Tokens(rows.astype(np.int64), of_row.astype(np.int64), keys)
    return out


# ---- reuse -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReuseDistances:
    """How many tokens ago a layer used the expert that decode routes: `counts` by `DISTANCES`, then beyond the last.

    `first`: never before in the trace. `median`: of those that were, tokens.
    """

    counts: tuple[int, ...]
    first: int
    median: float | None

    @property
    def total(self) -> int:
        return sum(self.counts) + self.first


def reuse_distances(trace: RouteTrace) -> ReuseDistances:
    """Reuse distances of the routed rows of decode; uses in prefill count as what came before."""
    phase, expert = trace.columns["phase"], trace.columns["expert"]
    distances: list[IntArray] = []
    first = 0
    for tokens in tokens_by_layer(trace).values():
        order = np.lexsort((tokens.of_row, expert[tokens.rows]))
        e, at = expert[tokens.rows][order], tokens.of_row[order]
        decode = phase[tokens.rows][order] == DECODE
        again = np.zeros(len(e), bool)
        again[1:] = e[1:] == e[:-1]
        gap = np.zeros(len(e), np.int64)
        gap[1:] = np.diff(at)
        distances.append(gap[again & decode])
        first += int((decode & ~again).sum())
    every = np.concatenate(distances) if distances else np.zeros(0, np.int64)
    edges = np.searchsorted(np.array(DISTANCES), every, "left")
    counts = np.bincount(edges, minlength=len(DISTANCES) + 1)
    return ReuseDistances(tuple(counts.tolist()), first, float(np.median(every)) if len(every) else None)


# ---- hot experts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HotExperts:
    """One layer's use: `counts` int64 [n_expert] of routed rows; `top` the most used experts, the first first."""

    layer: int
    counts: IntArray
    top: tuple[int, ...]

    @property
    def quarter(self) -> float:
        """Share of the rows that the most used quarter of the experts gets, 0..1."""
        n = max(1, len(self.counts) // 4)
        return float(np.sort(self.counts)[::-1][:n].sum() / max(1, self.counts.sum()))


def hot_experts(trace: RouteTrace, n_top: int = 5) -> list[HotExperts]:
    """How often each layer used each expert, over the whole trace."""
    c, out = trace.columns, []
    for layer in sorted(trace.expert_bytes):
        counts = np.bincount(c["expert"][c["layer"] == layer], minlength=trace.n_expert).astype(np.int64)
        top = np.lexsort((np.arange(len(counts)), -counts))[:n_top]
        out.append(HotExperts(layer, counts, tuple(int(e) for e in top if counts[e])))
    return out


# ---- predictors --------------------------------------------------------------------------------------

Key = tuple[int, int, int]
Rows = dict[Key, list[int]]
Guess = tuple[int, Key, set[int]]
"""A layer, one of its tokens, and the experts that are guessed for it: as many as it routes."""


def _before(rows: dict[int, Rows], back: int) -> Iterator[Guess]:
    for layer, tokens in rows.items():
        keys = list(tokens)
        for i in range(back, len(keys)):
            yield layer, keys[i], set(tokens[keys[i - back]])


def _frequent(rows: dict[int, Rows], n_expert: int) -> Iterator[Guess]:
    for layer, tokens in rows.items():
        counts = np.zeros(n_expert)
        for key, actual in tokens.items():
            if counts.any():
                yield layer, key, _best(counts, len(actual))
            counts[actual] += 1


def _layer_before(rows: dict[int, Rows], n_expert: int) -> Iterator[Guess]:
    # How often each pair of experts of two neighbouring layers went together, as learned on the way.
    layers = sorted(rows)
    for below, layer in itertools.pairwise(layers):
        together = np.zeros((n_expert, n_expert))
        for key, actual in rows[layer].items():
            if key not in rows[below]:
                continue
            score = together[rows[below][key]].sum(axis=0)
            if score.any():
                yield layer, key, _best(score, len(actual))
            together[np.ix_(rows[below][key], actual)] += 1


def _best(score: FloatArray, n: int) -> set[int]:
    return set(np.argpartition(-score, n - 1)[:n].tolist())


PREDICTORS: dict[str, Callable[[dict[int, Rows], int], Iterator[Guess]]] = {
    "the token before": lambda rows, n_expert: _before(rows, 1),
    "two tokens before": lambda rows, n_expert: _before(rows, 2),
    "most used so far": _frequent,
    "layer before, learned": _layer_before,
}
"""Ways to guess what a layer will route for a token; none needs the model."""


@dataclass(frozen=True)
class Agreement:
    """How much of what decode routed a predictor named: share of the experts, 0..1, over all guesses and by layer."""

    name: str
    share: float
    by_layer: dict[int, float]


def predictor_agreement(trace: RouteTrace) -> list[Agreement]:
    """Every predictor on the decode tokens of the trace, learning from all that came before; those that guessed."""
    c = trace.columns
    rows: dict[int, Rows] = {}
    decode: set[Key] = set()
    for layer, tokens in tokens_by_layer(trace).items():
        here: list[list[int]] = [[] for _ in tokens.keys]
        for token, e in zip(tokens.of_row.tolist(), c["expert"][tokens.rows].tolist(), strict=True):
            here[token].append(e)
        rows[layer] = dict(zip(tokens.keys, here, strict=True))
        first = np.unique(tokens.of_row, return_index=True)[1]
        in_decode = (c["phase"][tokens.rows[first]] == DECODE).tolist()
        decode |= {key for key, yes in zip(tokens.keys, in_decode, strict=True) if yes}
    out = []
    for name, guesses in PREDICTORS.items():
        right: dict[int, int] = defaultdict(int)
        routed: dict[int, int] = defaultdict(int)
        for layer, key, guess in guesses(rows, trace.n_expert):
            if key in decode:
                right[layer] += len(guess.intersection(rows[layer][key]))
                routed[layer] += len(rows[layer][key])
        if routed:
            share = sum(right.values()) / sum(routed.values())
            out.append(Agreement(name, share, {layer: right[layer] / routed[layer] for layer in sorted(routed)}))
    return out


# ---- the cache ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CurvePoint:
    """A point of the hit-rate curve: `rates` in decode by policy, 0..1."""

    budget: int
    share: float
    rates: dict[str, float]


def hit_rate_curve(trace: RouteTrace) -> list[CurvePoint]:
    """Hit rate in decode by memory for experts (bytes), through the engine's own policies.

    Budgets that hold no expert of some size are left out.
    """
    whole = trace.n_expert * sum(trace.expert_bytes.values())
    out = []
    for share in SHARES:
        budget = round(share * whole)
        rates = {}
        for policy in POLICIES:
            rate = CacheReplay.of_budget(trace, budget, policy).run().rate(DECODE)
            if rate is not None:
                rates[policy] = rate
        if rates:
            out.append(CurvePoint(budget, share, rates))
    return out


@dataclass(frozen=True)
class RecordedHits:
    """What the run itself had, by the column `residency`: `hits` of `looked`, each expert of a batch once, by phase."""

    hits: tuple[int, int]
    looked: tuple[int, int]

    def rate(self, phase: int) -> float | None:
        return self.hits[phase] / self.looked[phase] if self.looked[phase] else None


def recorded_hits(trace: RouteTrace) -> RecordedHits | None:
    """Hits of the run that wrote the trace; None where it has no column `residency`."""
    c = trace.columns
    if "residency" not in c:
        return None
    kept = c["dropped"] == 0 if "dropped" in c else np.ones(len(trace), bool)
    batch = batch_numbers(trace)
    pairs = batch * (trace.n_expert + 1) + c["expert"]
    first = np.unique(np.where(kept, pairs, -1), return_index=True)[1]
    first = first[kept[first]]
    phase, hit = c["phase"][first], _hits(trace)[first]
    return RecordedHits(
        (int(hit[phase == 0].sum()), int(hit[phase == 1].sum())), (int((phase == 0).sum()), int((phase == 1).sum()))
    )


def _hits(trace: RouteTrace) -> npt.NDArray[np.bool_]:
    # What had been read ahead counts as a hit for the engine that the columns come from; bmoe's cache did not have it.
    residency = trace.columns["residency"]
    return residency == 1 if trace.header.get("engine", "").startswith("bmoe-") else residency > 0


def batch_numbers(trace: RouteTrace) -> IntArray:
    """The number of each row's batch, from 0: `RouteTrace.batches` by row."""
    c = trace.columns
    if "batch" in c:
        return c["batch"]
    new = np.zeros(len(trace), bool)
    new[1:] = (np.diff(c["turn"]) != 0) | (np.diff(c["phase"]) != 0) | (np.diff(c["layer"]) != 0)
    new[1:] |= (np.diff(c["step"]) != 0) & (c["phase"][1:] != 0)
    return np.cumsum(new).astype(np.int64)


def residency_map(trace: RouteTrace) -> tuple[list[int], list[tuple[int, int, int]], FloatArray]:
    """Layers, columns as (turn, phase, step), and the share of routed rows that were resident.

    The shares are float64 [layers, columns], NaN where a layer routed nothing, all NaN where the trace has no column
    `residency`.
    """
    c = trace.columns
    layers = sorted(trace.expert_bytes)
    steps = np.stack([c["turn"], c["phase"], c["step"]], axis=1)
    columns, at = np.unique(steps, axis=0, return_inverse=True)
    cell = np.searchsorted(layers, c["layer"]) * len(columns) + at.reshape(-1)
    size = len(layers) * len(columns)
    routed = np.bincount(cell, minlength=size).astype(np.float64)
    hits = np.bincount(cell, weights=c["residency"] > 0, minlength=size) if "residency" in c else np.full(size, np.nan)
    with np.errstate(invalid="ignore"):
        share = np.where(routed > 0, hits / routed, np.nan).reshape(len(layers), len(columns))
    return layers, [(int(t), int(p), int(s)) for t, p, s in columns.tolist()], share
