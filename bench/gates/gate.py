"""Ratio gates: bmoe's code against a reference measured in the same session, round by round.

No time is stored anywhere. A gate measures both sides in turn, many short rounds, and breaches where the ratio is
above its limit in every attempt. The limits, with their reasons, are in gates.toml. Pure: no model, no pytest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter_ns

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIMITS = Path(__file__).parent / "gates.toml"

Side = Callable[[], int]
"""Runs one round of one side and returns what it took, in nanoseconds."""


def timed(work: Callable[[], object]) -> Side:
    """`work` as a side: the whole call is what it took."""

    def run() -> int:
        started = perf_counter_ns()
        work()
        return perf_counter_ns() - started

    return run


def slowed(side: Side, factor: float) -> Side:
    """`side` made `factor` times as slow by work of no use: for the test which shows that a gate can fail."""

    def run() -> int:
        took = side()
        started = perf_counter_ns()
        while perf_counter_ns() - started < (factor - 1) * took:
            pass
        return took + perf_counter_ns() - started

    return run


@dataclass(frozen=True)
class Limit:
    """One gate's line of gates.toml: the highest ratio that passes, what the reference is, and why this number."""

    ratio: float
    reference: str
    why: str


@dataclass(frozen=True)
class Effort:
    """How hard a gate tries: rounds of an attempt, and attempts before it calls a breach. Each has twice the rounds
    of the one before."""

    rounds: int
    attempts: int


FULL = Effort(rounds=80, attempts=4)
SHORT = Effort(rounds=25, attempts=4)


@dataclass
class Verdict:
    """What a gate found. `ratios`: one number for each attempt, of which the last decides."""

    name: str
    limit: Limit
    ratios: list[float] = field(default_factory=list)
    rounds: int = 0

    @property
    def ratio(self) -> float:
        """The ratio of the last attempt: it passed, or none did."""
        return self.ratios[-1]

    @property
    def breached(self) -> bool:
        return self.ratio > self.limit.ratio

    @property
    def line(self) -> str:
        """What a person reads: one line, passed or not."""
        what = "gate breached" if self.breached else "gate passed"
        tries = f"{len(self.ratios)} attempt{'s' * (len(self.ratios) > 1)}"
        return (
            f"{what}: {self.name}: {self.ratio:.2f} x {self.limit.reference}, limit {self.limit.ratio:.2f} "
            f"({self.rounds} rounds in {tries}): {self.limit.why}"
        )


def read_limits(path: Path = LIMITS) -> dict[str, Limit]:
    """The gates of a limits file by name. Raises ValueError for one without a limit, a reference or a reason."""
    with path.open("rb") as f:
        table = tomllib.load(f)
    limits = {}
    for name, entry in table["ratio"].items():
        limit = Limit(float(entry.get("limit", 0)), entry.get("reference", ""), " ".join(entry.get("why", "").split()))
        if limit.ratio <= 0 or not limit.reference or not limit.why:
            raise ValueError(f'{path.name}: [ratio."{name}"] needs limit, reference and why')
        limits[name] = limit
    return limits


def read_tolerance(name: str, path: Path = LIMITS) -> float:
    """How far a count of the section `tolerance` may be off, as a part of it."""
    with path.open("rb") as f:
        return float(tomllib.load(f)["tolerance"][name]["part"])


def estimate(subject: list[int], reference: list[int]) -> float:
    """The ratio of two sides measured in turn, in nanoseconds.

    Two estimates that noise moves apart and a real slowdown moves together: of the fastest rounds, and the median of
    the ratios of neighbours. The lower of them.
    """
    pairs = [a / b for a, b in zip(subject, reference, strict=True)]
    return min(min(subject) / min(reference), median(pairs))


def measure(name: str, subject: Side, reference: Side, limit: Limit, effort: Effort) -> Verdict:
    """Runs a gate: interleaved rounds, again with more of them while the ratio is above the limit."""
    verdict = Verdict(name, limit)
    subject(), reference()  # caches, pages, branch predictors
    rounds = effort.rounds
    for _ in range(effort.attempts):
        a, b = [], []
        for i in range(rounds):
            # Who comes first changes, or one side would always meet the caches that the other has left.
            if i % 2:
                b.append(reference())
            a.append(subject())
            if not i % 2:
                b.append(reference())
        verdict.rounds += rounds
        verdict.ratios.append(estimate(a, b))
        if not verdict.breached:
            break
        rounds *= 2
    return verdict
