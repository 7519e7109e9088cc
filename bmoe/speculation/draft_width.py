"""How much of a draft to verify: the part that is expected to pay, or none of it. Pure policy: no model, no clock.

A verify batch of w positions takes r(w) times a plain step and confirms 1 + a tokens, a of them accepted; it gains
1 + a - r(w) plain steps. `Adaptive` estimates both sides from what it sees and cuts each draft where the gain is
largest:

- a, from how far earlier drafts of the same source held: the hazard of each length (Kaplan and Meier's product
  limit, since a draft that held to its end says nothing of what lay behind it), by the evidence for them: how many
  tokens they were found by, or have been predicted right in a row. Drafts that were not verified count as well:
  whether they would have held is seen from the tokens that plain decoding gives, for nothing. So there are no probes.
- r, from the time of the batches that ran, in powers of two; before there is one, as w to the power of 0.75,
  which is what short batches cost with streamed experts (docs/speculation.md has a table).
- Since estimates can be wrong, losses are bounded: an account takes what each batch really gained or lost, a
  fiftieth of every plain step, and a tenth of what an unverified draft would have gained; while it is overdrawn
  nothing is verified.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

DraftPolicy = Literal["adaptive", "always"]
DRAFT_POLICIES: tuple[DraftPolicy, ...] = ("adaptive", "always")

_PRIOR_EXPONENT = 0.75
_MEMORY = 0.9  # weight of what was seen before, per observation: about ten drafts back
_EVIDENCE = (0, 4, 8, 16)  # states: at least so many tokens before the draft agree with it
# Chance that a draft holds for one power of two more, by state, before anything has been seen, and the
# observations that this counts for.
_PRIOR_HOLD = (0.5, 0.7, 0.85, 0.95)
_PRIOR_WEIGHT = 2.0
_PLAIN_EVERY = 32  # verify batches between two plain steps: what they are compared with must not go stale
_LEAST, _REACH = 3, 4  # tokens that may be verified on any evidence, and for each token of it
_MARGIN = 0.05  # plain steps that a batch must promise to gain
_CREDIT = 2.0  # plain steps that may be lost at first
_INCOME = 0.02  # per plain step: where drafting keeps losing it costs no more than this share of the time
_IMAGINED = 0.1  # part of what unverified drafts would have gained
_SAVED = 0.5  # part of what has been gained that later losses cannot take


class DraftWidth(Protocol):
    """Decides how many tokens of a draft are verified, and is told what came of it."""

    def begin(self) -> None:
        """Another text begins."""
        ...

    def ready(self) -> bool:
        """False where nothing that is drafted now will be verified: a source that costs time need not be asked."""
        ...

    def choose(self, draft: Sequence[int], source: str, matched: int = 0) -> int:
        """How many tokens of `draft`, which `source` made, to verify: 0 to len(draft).

        `matched`: tokens before it that it was found by.
        """
        ...

    def note(self, confirmed: Sequence[int], drafted: int, accepted: int, seconds: float, wasted: float = 0.0) -> None:
        """One step: the tokens it confirmed, how many were verified and accepted, its time; what beside it went into
        a draft that was not used, seconds."""
        ...


class Always:
    """Verifies whatever is drafted: what a run does then depends on the text alone, not on time."""

    def begin(self) -> None:
        pass

    def ready(self) -> bool:
        return True

    def choose(self, draft: Sequence[int], source: str, matched: int = 0) -> int:
        return len(draft)

    def note(self, confirmed: Sequence[int], drafted: int, accepted: int, seconds: float, wasted: float = 0.0) -> None:
        pass


class Holding:
    """How far drafts hold: for each power of two the chance to get there from the one before, with fading memory."""

    def __init__(self) -> None:
        self.held: list[float] = []
        self.tried: list[float] = []

    def observe(self, length: int, held: int) -> None:
        """A draft of `length` tokens held for its first `held`."""
        low, i = 0, 0
        while low < length and low <= held:
            high = 1 << i
            reached = held >= high
            if not reached and held == length:
                break  # it ended before it could fail
            if i == len(self.held):
                self.held.append(0.0)
                self.tried.append(0.0)
            self.held[i] = _MEMORY * self.held[i] + reached
            self.tried[i] = _MEMORY * self.tried[i] + 1.0
            low, i = high, i + 1

    def chance(self, i: int, prior: float) -> float:
        """Of getting from length 2^(i-1) (0 for i = 0) to 2^i."""
        held, tried = (self.held[i], self.tried[i]) if i < len(self.held) else (0.0, 0.0)
        return (held + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT)


_NOTHING_SEEN = Holding()


@dataclass
class _Shadow:
    """A draft whose tokens are compared with what is confirmed, whether they were verified or not."""

    source: str
    evidence: int  # tokens before it that agree with it
    tokens: list[int]
    held: int = 0
    verified: bool = False


@dataclass
class Adaptive:
    """Verifies what is expected to pay. Deterministic in what it is told, which has measured times in it."""

    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    _ratios: dict[int, deque[float]] = field(default_factory=dict)
    _holding: dict[tuple[str, int], Holding] = field(default_factory=dict)
    _shadow: _Shadow | None = None
    _run: int = 0
    _since_plain: int = 0
    _plain_steps: int = 0
    _credit: float = _CREDIT
    _gained: float = 0.0

    def begin(self) -> None:
        # What batches cost is the machine's and stays; how far drafts hold is the text's.
        self._holding.clear()
        self._shadow = None
        self._run = 0
        self._since_plain = self._plain_steps = 0
        self._credit, self._gained = _CREDIT, 0.0

    def ready(self) -> bool:
        # More plain steps at first: the very first are slow, their experts being cold.
        due = self._since_plain >= min(_PLAIN_EVERY, 2**self._plain_steps)
        return bool(self._plain) and not due and self._credit >= 0.0

    def choose(self, draft: Sequence[int], source: str, matched: int = 0) -> int:
        n, evidence = len(draft), max(self._run, matched)
        if n == 0:
            return 0
        if self._shadow is None:
            self._shadow = _Shadow(source, evidence, [int(t) for t in draft])
        if not self.ready():
            return 0
        best, gain = 0, _MARGIN
        expected = self.expected(source, evidence, n)
        for k in range(1, n + 1):
            # No draft is verified far beyond what supports it.
            if k > max(_LEAST, _REACH * evidence):
                break
            if k & (k - 1) and k != n:
                continue
            g = 1.0 + expected[k] - self.ratio(k + 1)
            if g > gain:
                best, gain = k, g
        self._shadow.verified |= best > 0
        return best

    def note(self, confirmed: Sequence[int], drafted: int, accepted: int, seconds: float, wasted: float = 0.0) -> None:
        if drafted:
            self._since_plain += 1
            plain = statistics.median(self._plain)
            ratio = seconds / plain if plain > 0 else 1.0
            self._ratios.setdefault(_bucket(drafted + 1), deque(maxlen=5)).append(ratio / _prior(drafted + 1))
            gain = len(confirmed) - ratio
            self._gained = max(0.0, self._gained + gain)
            self._earn(gain)
        else:
            self._since_plain = 0
            self._plain_steps += 1
            self._plain.append(seconds)
            self._earn(_INCOME)
            if wasted > 0.0:
                self._credit -= wasted / max(statistics.median(self._plain), 1e-9)
        for token in confirmed:
            self._follow(int(token))

    def expected(self, source: str, evidence: int, n: int) -> list[float]:
        """Tokens expected to be accepted of the first k of a draft of `n`, for k = 0..n.

        `evidence`: tokens before it that agree with it: those that it was found by, or that were predicted right.
        """
        state = sum(evidence >= least for least in _EVIDENCE) - 1
        seen, prior = self._holding.get((source, state)) or _NOTHING_SEEN, _PRIOR_HOLD[state]
        total, survives, sums = 0.0, 1.0, [0.0]
        low, i = 0, 0
        while low < n:
            high = 1 << i
            step = seen.chance(i, prior) ** (1.0 / (high - low))
            for _ in range(low, min(high, n)):
                survives *= step
                total += survives
                sums.append(total)
            low, i = high, i + 1
        return sums

    def ratio(self, width: int) -> float:
        """Time of a verify batch of `width` positions in plain steps; guessed from the nearest one measured."""
        bucket = _bucket(width)
        known = min(self._ratios, key=lambda b: abs(b - bucket), default=None)
        scale = 1.0 if known is None else statistics.median(self._ratios[known])
        return _prior(width) * scale

    def _earn(self, gain: float) -> None:
        self._credit = min(self._credit + gain, max(_CREDIT, (1.0 - _SAVED) * self._gained))

    def _follow(self, token: int) -> None:
        """Compares one confirmed token with the draft that is being followed."""
        shadow = self._shadow
        if shadow is None:
            self._run = 0
            return
        right = shadow.tokens[shadow.held] == token
        if right:
            self._run += 1
            shadow.held += 1
        else:
            self._run = 0
        if not right or shadow.held == len(shadow.tokens):
            self._learn(shadow)
            self._shadow = None

    def _learn(self, shadow: _Shadow) -> None:
        """Notes how far a draft held, for its own state and for those that its right tokens led to."""
        length, held = len(shadow.tokens), shadow.held
        for state, least in enumerate(_EVIDENCE):
            if state + 1 < len(_EVIDENCE) and shadow.evidence >= _EVIDENCE[state + 1]:
                continue
            skip = max(0, least - shadow.evidence)
            if skip <= held and skip < length:
                self._holding.setdefault((shadow.source, state), Holding()).observe(length - skip, held - skip)
        if not shadow.verified and self._plain:
            self._earn(_IMAGINED * max(0.0, 1.0 + held - self.ratio(length + 1)))


def make_draft_width(policy: DraftPolicy) -> DraftWidth:
    """The policy that `--draft-policy` names."""
    return Adaptive() if policy == "adaptive" else Always()


def _bucket(width: int) -> int:
    return max(0, (width - 1).bit_length())


def _prior(width: int) -> float:
    return math.pow(width, _PRIOR_EXPONENT)
