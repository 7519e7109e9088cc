"""What the rows of a run say: rates, shares, and how sure they are. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..accounting.token_record import TIME_COLUMNS
from .run_csv import Floats, Run

MiB = 1 << 20
RESAMPLES = 2000
SEED = 0
_AT_ONCE = 1 << 21  # drawn indices that are held at once
SUMMED = (
    "wall_ms", *TIME_COLUMNS, "io_ms", "read_bytes", "hits", "misses", "majflt", "cpu_ms", "drafted", "accepted",
)  # fmt: skip


class Groups(NamedTuple):
    """The decoded rows of a run, by the batch that decoded them: a group's whole cost sits on its first row.

    `tokens`: rows of each group; `sums`: for each column of SUMMED the sum over each group's rows. float64 [groups].
    """

    tokens: Floats
    sums: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.tokens)


def groups(run: Run) -> Groups:
    """The groups of a run's decode. Rows before the first that begins a group, of a damaged file, are one too."""
    rows = run.decode
    begins = run.columns["mtp_batch"][rows] > 0
    if not len(begins):
        return Groups(np.empty(0), {name: np.empty(0) for name in SUMMED})
    begins[0] = True
    first = np.flatnonzero(begins)
    tokens = np.diff(np.append(first, len(begins))).astype(np.float64)
    sums = {name: np.add.reduceat(np.nan_to_num(run.columns[name][rows]), first) for name in SUMMED}
    return Groups(tokens, sums)


@dataclass(frozen=True)
class Metric:
    """A ratio of sums over tokens. `name`, `unit`: for people; `better`: "more", "less" or "" where neither is."""

    name: str
    unit: str
    better: str
    above: Callable[[Groups], Floats]
    below: Callable[[Groups], Floats]
    scale: float = 1.0

    def value(self, g: Groups) -> float:
        """Over all groups; NaN where the denominator is 0."""
        return _ratio(self.scale * float(self.above(g).sum()), float(self.below(g).sum()))


def _tokens(g: Groups) -> Floats:
    return g.tokens


def _column(name: str) -> Callable[[Groups], Floats]:
    return lambda g: g.sums[name]


METRICS = (
    Metric("decode", "tok/s", "more", _tokens, _column("wall_ms"), 1e3),
    Metric("wall", "ms/token", "less", _column("wall_ms"), _tokens),
    Metric("computing", "ms/token", "less", _column("compute_ms"), _tokens),
    Metric("waiting for reads", "ms/token", "less", _column("stall_ms"), _tokens),
    Metric("drafting", "ms/token", "less", _column("mtp_draft_ms"), _tokens),
    Metric(
        "all else",
        "ms/token",
        "less",
        lambda g: sum(
            (g.sums[n] for n in TIME_COLUMNS if n not in ("compute_ms", "stall_ms", "mtp_draft_ms")), np.zeros(len(g))
        ),
        _tokens,
    ),
    Metric("read", "MiB/token", "less", _column("read_bytes"), _tokens, 1 / MiB),
    Metric("hit", "%", "more", _column("hits"), lambda g: g.sums["hits"] + g.sums["misses"], 100.0),
    Metric("drafts accepted", "%", "more", _column("accepted"), _column("drafted"), 100.0),
    Metric("tokens per batch", "", "more", _tokens, lambda g: np.ones(len(g))),
    Metric("major faults", "/token", "less", _column("majflt"), _tokens),
    Metric("processor", "ms/token", "less", _column("cpu_ms"), _tokens),
)


class Estimate(NamedTuple):
    """A value and its 95 % interval; NaN where there is none."""

    value: float
    low: float
    high: float


def resampled(g: Groups, metrics: Sequence[Metric], seed: int = SEED, n: int = RESAMPLES) -> npt.NDArray[np.float64]:
    """Each metric of `n` bootstrap samples of the groups, drawn with replacement: float64 [n, metrics].

    A group is drawn whole. The same seed gives the same samples.
    """
    rng = np.random.default_rng(seed)
    tops = np.stack([m.scale * m.above(g) for m in metrics], axis=1)
    bottoms = np.stack([m.below(g) for m in metrics], axis=1)
    out = np.empty((n, len(metrics)))
    step = max(1, _AT_ONCE // max(1, len(g)))
    for at in range(0, n, step):
        k = min(step, n - at)
        drawn = rng.integers(0, len(g), (k, len(g)))
        # How often each group is in each sample: sums then are products of matrices.
        flat = (drawn + len(g) * np.arange(k)[:, None]).ravel()
        counts = np.bincount(flat, minlength=k * len(g)).reshape(k, len(g)).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            out[at : at + k] = np.where((counts @ bottoms) > 0, (counts @ tops) / (counts @ bottoms), np.nan)
    return out


def interval(samples: Floats) -> tuple[float, float]:
    """The middle 95 % of bootstrap samples; NaN where some sample had no value."""
    if not len(samples) or np.isnan(samples).any():
        return float("nan"), float("nan")
    low, high = np.percentile(samples, [2.5, 97.5]).tolist()
    return low, high


def estimates(g: Groups, metrics: Sequence[Metric] = METRICS, seed: int = SEED) -> list[Estimate]:
    """Each metric with its interval."""
    if not len(g):
        return [Estimate(float("nan"), float("nan"), float("nan"))] * len(metrics)
    samples = resampled(g, metrics, seed)
    return [Estimate(m.value(g), *interval(samples[:, i])) for i, m in enumerate(metrics)]


def ratios(base: Groups, other: Groups, metrics: Sequence[Metric] = METRICS, seed: int = SEED) -> list[Estimate]:
    """Each metric of `other` over that of `base`; the two runs are resampled independently of each other."""
    if not len(base) or not len(other):
        return [Estimate(float("nan"), float("nan"), float("nan"))] * len(metrics)
    a, b = resampled(base, metrics, seed), resampled(other, metrics, seed + 1)
    out = []
    for i, m in enumerate(metrics):
        with np.errstate(divide="ignore", invalid="ignore"):
            quotients = np.where(a[:, i] > 0, b[:, i] / a[:, i], np.nan)
        out.append(Estimate(_ratio(m.value(other), m.value(base)), *interval(quotients)))
    return out


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else float("nan")


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Settings that are not the same in all runs: name -> each run's, "-" where it does not tell."""
    flat = [_flat("", {"model": run.facts.get("model"), **run.config}) for run in runs]
    names = list(dict.fromkeys(name for f in flat for name in f))
    values = {name: [f.get(name, "-") for f in flat] for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _flat(prefix: str, value: object) -> dict[str, str]:
    if isinstance(value, dict):
        out: dict[str, str] = {}
        for name, inner in value.items():
            out |= _flat(f"{prefix}.{name}" if prefix else str(name), inner)
        return out
    return {prefix: str(value)}
