"""How much memory the expert cache gets. Pure policy: sizes and facts in, a decision with its sum out.

The sum is done in whole MiB, what there is rounded down and what it costs rounded up, so that the printed
line adds up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from bmoe.errors import MemoryBudgetError, UsageError
from bmoe.host.memory import MemoryFacts

MiB = 1 << 20

Mode = Literal["auto", "off", "fixed"]

DEFAULT_FLOOR_MB = 1536
"""Left to the system by `auto`, or an eighth of the machine or of the limit, if that is less."""


@dataclass(frozen=True)
class ModelSizes:
    """What a loaded model takes, in bytes.

    `dense`: the weights that are not routed experts, which must stay resident; `kv`: the KV cache;
    `compute`: the compute buffers; `recurrent`: recurrent-state snapshots; `experts`: all routed experts;
    `working_set`: the routed experts of one token, all layers; `smallest`: of one token and one layer.
    The last three with `ring`, what of a budget is not for slots.
    """

    dense: int
    kv: int
    compute: int
    recurrent: int
    experts: int
    working_set: int
    smallest: int = 0
    ring: int = 0

    @property
    def smallest_useful_mb(self) -> int:
        """The cache from which one token's routed experts fit, in MiB."""
        return _up(self.working_set)

    @property
    def smallest_mb(self) -> int:
        """The smallest cache that is granted without force, in MiB."""
        return _up(self.smallest)


@dataclass(frozen=True)
class CacheRequest:
    """The cache that the user asked for; all sizes in MiB.

    `mb` is the size for "fixed". `floor_mb` is what "auto" leaves to the system: the default shrinks on a
    small machine or limit (`DEFAULT_FLOOR_MB`), any other value is taken as it is. `ceil_mb` caps the cache.
    `force` accepts a cache that cannot hold one layer's routed experts of a token.
    Raises UsageError for a size that makes no sense, naming the flag.
    """

    mode: Mode = "auto"
    mb: int | None = None
    floor_mb: int = DEFAULT_FLOOR_MB
    ceil_mb: int | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.mode == "fixed" and (self.mb is None or self.mb < 0):
            raise UsageError(f"--cache-mb: a fixed cache needs a whole number of MiB, not {self.mb}")
        if self.floor_mb < 0:
            raise UsageError(f"--cache-floor-mb: {self.floor_mb} is negative; give 0 or more MiB")
        if self.ceil_mb is not None and self.ceil_mb < 1:
            raise UsageError(f"--cache-ceil-mb: {self.ceil_mb} leaves no cache; for none use --cache-mb 0")


@dataclass(frozen=True)
class Term:
    """One term of the sum: `mib` is negative for what is taken away."""

    mib: int
    name: str


@dataclass(frozen=True)
class CacheDecision:
    """The cache that is granted: `budget` bytes, 0 for none. The `terms` add up to what could be granted.

    `remark` says why the budget is not just that sum or that request; "" if it is.
    """

    mode: Mode
    budget: int
    sizes: ModelSizes
    terms: tuple[Term, ...] = ()
    remark: str = ""

    def explain(self) -> str:
        """One line for the start-up report, from which the user can argue with the decision."""
        experts, token = _up(self.sizes.experts), self.sizes.smallest_useful_mb
        about = f"all experts {experts} MiB; one token routes {token} MiB"
        if self.mode == "off":
            return f"cache: off, experts are streamed with no cache; {about}"
        budget = f"{self.mode} {_up(self.budget)} MiB" + (f" ({self.remark})" if self.remark else "")
        # An untouched auto budget is the sum; any other is a part of it.
        part = "" if self.mode == "auto" and not self.remark else f", of {_total(self.terms)} left"
        return f"cache: {budget}{part} = {_sum(self.terms)}; {about}"


def parse_cache_mb(text: str) -> tuple[Mode, int | None]:
    """The `mode` and `mb` of a CacheRequest from the value of --cache-mb: "auto", "0" or a number of MiB.

    Raises UsageError for anything else.
    """
    if text == "auto":
        return "auto", None
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise UsageError(f"--cache-mb: {text!r} is none of auto, 0 (no cache) and a whole number of MiB")
    return ("fixed", int(text)) if int(text) else ("off", None)


def decide(request: CacheRequest, sizes: ModelSizes, facts: MemoryFacts, already_resident: int = 0) -> CacheDecision:
    """Grants the cache that `request` asks for, or raises MemoryBudgetError with one that would do.

    `already_resident` is what of dense, kv, compute and recurrent was allocated when `facts` were read, in
    bytes: `facts` no longer counts it as available, so it is not subtracted again. Weights that are resident
    as pages of the mapped file are not part of it: the kernel counts those as available still.
    """
    if request.mode == "off" or (request.mode == "fixed" and request.mb == 0):
        return CacheDecision("off", 0, sizes)
    terms = _available(request, facts) + _costs(sizes, already_resident)
    fits = _total(terms)
    wanted = fits * MiB if request.mode == "auto" or request.mb is None else request.mb * MiB
    budget, remark = max(0, wanted), "" if wanted >= 0 else "nothing is left"
    if request.ceil_mb is not None and request.ceil_mb * MiB < budget:
        budget, remark = request.ceil_mb * MiB, f"capped by --cache-ceil-mb {request.ceil_mb}"
    if sizes.experts < budget:
        # To the byte: rounded down to a MiB, a small model would miss its last expert on every token.
        budget = sizes.experts
        remark = "all experts" if request.mode == "auto" else f"{request.mb} clipped to all experts"

    if budget < sizes.smallest and not request.force:
        raise MemoryBudgetError(_too_small(request, sizes, terms, budget))
    if request.mode == "fixed" and budget > max(0, fits) * MiB:
        raise MemoryBudgetError(_too_large(request, sizes, terms))
    if budget < sizes.working_set:
        remark = "below one token's routed experts" + (f", {remark}" if remark else "")
        remark = f"forced, {remark}" if budget < sizes.smallest else remark
    return CacheDecision(request.mode, budget, sizes, terms, remark)


_EXPECTED = ((0.0, 0, 0), (0.1, 5, 8), (0.25, 11, 17), (0.5, 17, 27), (0.75, 22, 35), (1.0, 25, 42))
"""Share of one token's routed experts that fits into the slots; lowest and highest decode hit rate, percent."""


def advice(decision: CacheDecision, policy: str) -> str:
    """One line against a cache below one token's routed experts, with the hit rate to expect; "" for any other.

    The range is that of the recorded routes of three models at the same share of a token's experts
    (docs/eviction.md), between measured shares by straight lines.
    """
    sizes, budget = decision.sizes, decision.budget
    if not 0 < budget < sizes.working_set:
        return ""
    below = f"the cache is below the {sizes.smallest_useful_mb} MiB that one token routes: expect"
    if policy == "lru":
        # A token visits the layers in a circle: each expert is evicted before it is asked for again.
        return f"{below} no hits at all from --cache-policy lru; the default policy has some"
    share = max(0, budget - sizes.ring) / max(1, sizes.working_set - sizes.ring)
    if share == 0:
        return f"{below} no hits at all: nothing is left beside the ring"
    at = next(i for i in range(1, len(_EXPECTED)) if share <= _EXPECTED[i][0])
    (a, low_a, high_a), (b, low_b, high_b) = _EXPECTED[at - 1], _EXPECTED[at]
    part = (share - a) / (b - a)
    low, high = low_a + part * (low_b - low_a), high_a + part * (high_b - high_a)
    return f"{below} {low:.0f} to {high:.0f} % hits in decode, as recorded routes of three models have at this share"


def _available(request: CacheRequest, facts: MemoryFacts) -> tuple[Term, ...]:
    """What there is, and what `auto` leaves of it to the system.

    The machine and every limit around us keep a floor of their own, and the one with the least left over
    decides: a small limit on a large machine costs a small floor, and the machine still keeps its 1536 MiB.
    """
    sums: list[tuple[Term, ...]] = []
    for bound in facts.bounds():
        there_is = Term(bound.room // MiB, f"available ({bound.name})")
        eighth = bound.size // 8 // MiB
        if request.mode != "auto":
            sums.append((there_is,))
        elif request.floor_mb == DEFAULT_FLOOR_MB and eighth < DEFAULT_FLOOR_MB:
            sums.append((there_is, Term(-eighth, f"floor (1/8 of {bound.size // MiB})")))
        else:
            sums.append((there_is, Term(-request.floor_mb, "floor")))
    return min(sums, key=_total)


def _costs(sizes: ModelSizes, already_resident: int) -> tuple[Term, ...]:
    """What the model takes besides its experts, less what of it is already taken."""
    costs = (
        Term(-_up(sizes.dense), "dense"),
        Term(-_up(sizes.kv), "KV"),
        Term(-_up(sizes.compute), "compute"),
        Term(-_up(sizes.recurrent), "recurrent"),
    )
    resident = min(max(0, already_resident) // MiB, -_total(costs))
    return (*costs, Term(resident, "already resident")) if resident else costs


def _too_small(request: CacheRequest, sizes: ModelSizes, terms: tuple[Term, ...], budget: int) -> str:
    """The refusal of a cache that cannot hold what one token routes in one layer."""
    need, fits = sizes.smallest_mb, _total(terms)
    routed = f"one layer's routed experts and the reads under way take {need} MiB"
    if request.ceil_mb is not None and budget == request.ceil_mb * MiB:
        return f"--cache-ceil-mb {request.ceil_mb} is too small: {routed}; it must be at least {need}"
    if request.mode == "fixed":
        though = "" if need <= fits else f", though only {max(0, fits)} fits"
        return (
            f"--cache-mb {request.mb} is too small: {routed}; the smallest that would do is {need}{though}"
            " (0 streams with no cache, --force-cache insists)"
        )
    return (
        f"--cache-mb auto is {need - fits} MiB short: {routed}, but {_left(terms)};"
        " use --cache-mb 0 to stream with no cache, a smaller -c, or --force-cache to take what is left"
    )


def _too_large(request: CacheRequest, sizes: ModelSizes, terms: tuple[Term, ...]) -> str:
    """The refusal of a cache that cannot be allocated."""
    need, fits = sizes.smallest_mb, _total(terms)
    advice = f"the largest that fits is {max(0, fits)}"
    if fits < max(1, need):
        advice += (
            f", and one layer's routed experts take {need}; use --cache-mb 0 to stream with no cache, or a smaller -c"
        )
    return f"--cache-mb {request.mb} does not fit: {_left(terms)}; {advice}"


def _left(terms: tuple[Term, ...]) -> str:
    left = _total(terms)
    return f"{f'{left} MiB' if left > 0 else 'nothing'} is left ({_sum(terms)})"


def _total(terms: tuple[Term, ...]) -> int:
    return sum(term.mib for term in terms)


def _sum(terms: tuple[Term, ...]) -> str:
    first, *rest = terms
    signed = (f" {'+' if term.mib > 0 else '-'} {abs(term.mib)} {term.name}" for term in rest)
    return f"{first.mib} {first.name}" + "".join(signed)


def _up(size: int) -> int:
    """Bytes as MiB, rounded up."""
    return -(-size // MiB)
