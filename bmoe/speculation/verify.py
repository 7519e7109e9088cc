"""Draft, verify, accept, roll back: the greedy loop and its accounts. Pure: no model, no llama.cpp.

The loop is the only one there is: without speculation its drafter never drafts, and every step is a plain decode
of one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..accounting.timing import DRAFT, LOOP, Clock
from .draft_width import Always, Pace

Tokens = npt.NDArray[np.int32]


class Choice(NamedTuple):
    """A token the target has chosen: its id, whether it ends a generation, its bytes."""

    id: int
    end: bool
    text: bytes


class Target(Protocol):
    """What verifies: a model, or a table in a test."""

    def room(self) -> int:
        """Positions that can still be decoded."""
        ...

    def decode(self, tokens: Tokens) -> Sequence[Choice]:
        """Appends int32[n] tokens to the sequence; the target's choice after each of them."""
        ...

    def drop(self, n: int) -> None:
        """Takes the last `n` tokens of the sequence back."""
        ...


class Drafter(Protocol):
    """What drafts (`drafting.DrafterStack`). `free_only`: sources whose drafts cost time are not asked."""

    free_only: bool

    def draft(self, history: Tokens, n_max: int | None = None) -> Tokens:
        """Up to `n_max` tokens expected after `history` (int32, the last confirmed token at its end)."""
        ...

    def trim(self, n: int) -> None:
        """Only the first `n` tokens of the last draft are verified, or none."""
        ...

    def accept(self, n_accepted: int) -> None:
        """How many tokens of the last draft were confirmed; only called where some were verified."""
        ...

    @property
    def matched(self) -> int:
        """Tokens by which the last draft was found."""
        ...

    @property
    def winner(self) -> str | None:
        """The source of the last draft."""
        ...


class Step(NamedTuple):
    """One verify batch: the tokens it confirmed, how many were drafted and accepted."""

    confirmed: list[Choice]
    drafted: int
    accepted: int


def accepted_prefix(draft: Sequence[int], choices: Sequence[Choice]) -> int:
    """How many drafted tokens the target would have chosen itself: `draft[i]` is checked by `choices[i]`."""
    for i, token in enumerate(draft):
        if choices[i].id != token:
            return i
    return len(draft)


def verify_steps(
    target: Target,
    drafter: Drafter,
    history: list[int],
    first: Choice,
    wanted: int,
    widest: int,
    pace: Pace | None = None,
    clock: Clock | None = None,
) -> Iterator[Step]:
    """Decodes greedily from `first`, which is chosen but not yet decoded, drafting where the drafter can.

    `history`: the tokens before `first`; it is extended in place by what is confirmed. `wanted`: how many more
    tokens are asked for; a draft never reaches past them, nor past the target's room, nor `widest` tokens, and `pace`
    (None: `Always`) decides how much of it is verified. Drafting is charged to `clock`. The confirmed tokens are, one
    after the other, what single-token greedy decoding by this target gives.
    """
    pace, clock = pace or Always(), clock or Clock()
    buffer = np.empty(max(256, 2 * len(history)), np.int32)
    buffer[: len(history)] = history
    filled = len(history)
    history.append(first.id)
    while wanted > 0 and target.room() > 0:
        most = min(widest, wanted - 1, target.room() - 1)
        if most <= 0:
            choices = target.decode(np.array(history[-1:], np.int32))
            history.append(choices[0].id)
            wanted -= 1
            yield Step([choices[0]], 0, 0)
            continue
        n = len(history)
        if n > len(buffer):
            buffer = np.concatenate([buffer, np.empty(n, np.int32)])
        buffer[filled:n] = history[filled:]
        filled = n
        started = perf_counter()
        clock.switch(DRAFT)
        drafter.free_only = not pace.ready()
        draft = drafter.draft(buffer[:n], most)
        draft_s = perf_counter() - started
        if len(draft) and (keep := pace.choose(draft.tolist(), drafter.winner or "", drafter.matched)) < len(draft):
            drafter.trim(keep)
            draft = draft[:keep]
        clock.switch(LOOP)
        choices = target.decode(np.concatenate([buffer[n - 1 : n], draft]) if len(draft) else buffer[n - 1 : n])
        accepted = accepted_prefix(draft.tolist(), choices)
        if accepted < len(draft):
            target.drop(len(draft) - accepted)
        if len(draft):
            clock.switch(DRAFT)
            drafter.accept(accepted)
            clock.switch(LOOP)
        confirmed = list(choices[: accepted + 1])
        tokens = [c.id for c in confirmed]
        # A plain step is compared without what was spent on a draft that was not used.
        wasted = 0.0 if len(draft) else draft_s
        pace.note(tokens, len(draft), accepted, perf_counter() - started - wasted, wasted)
        history.extend(tokens)
        wanted -= len(confirmed)
        yield Step(confirmed, len(draft), accepted)


CAUSES = ("prefill", "base", "accepted", "rejected", "draft_source", "prefetch_used", "prefetch_wasted", "recovery")
"""What a byte read from disk is charged to: the prompt; what the confirmed position routed; widening by drafts that
were accepted, by drafts that were not; the draft source's own routing; reading ahead; decoding again what a memory
that cannot go back had lost."""


@dataclass
class FlashSplit:
    """Bytes read from disk by cause, and of these the part of experts that had been read before."""

    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    rereads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))

    def charge(self, cause: str, total: int, again: int) -> None:
        """Charges `total` bytes, `again` of them re-reads, to one cause."""
        self.bytes[cause] += total
        self.rereads[cause] += again

    def charge_batch(self, total: Sequence[int], again: Sequence[int], accepted: int) -> None:
        """Charges a verify batch by position: 0 is the confirmed token, then the drafts, `accepted` of them right."""
        self.charge("base", total[0], again[0])
        self.charge("accepted", sum(total[1 : 1 + accepted]), sum(again[1 : 1 + accepted]))
        self.charge("rejected", sum(total[1 + accepted :]), sum(again[1 + accepted :]))

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def copy(self) -> FlashSplit:
        """As it is now."""
        return FlashSplit(dict(self.bytes), dict(self.rereads))

    def since(self, before: FlashSplit) -> dict[str, tuple[int, int]]:
        """What was charged after `before` was copied: cause -> (bytes, re-reads among them), causes of 0 left out."""
        return {
            cause: (n - before.bytes[cause], self.rereads[cause] - before.rereads[cause])
            for cause, n in self.bytes.items()
            if n != before.bytes[cause]
        }

    def as_dict(self) -> dict[str, int]:
        """Cause -> bytes."""
        return dict(self.bytes)


@dataclass
class SpecResult:
    """What speculation did in one generation. `type`: the drafters, "none" without; seconds.

    `decodes` are verify batches and plain decodes together, `drafted_steps` those that had a draft.
    `draft_s`: drafting, the head's graphs
    included. `recoveries`: times that a rejected tail could not be taken back and the sequence was decoded again.
    """

    type: str = "none"
    drafted: int = 0
    accepted: int = 0
    decodes: int = 0
    drafted_steps: int = 0
    confirmed: int = 0
    draft_s: float = 0.0
    recoveries: int = 0
    recovery_s: float = 0.0
    recovery_bytes: int = 0

    def count(self, step: Step) -> None:
        """Adds one step."""
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.decodes += 1
        self.drafted_steps += step.drafted > 0
        self.confirmed += len(step.confirmed)

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were accepted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_decode(self) -> float | None:
        return self.confirmed / self.decodes if self.decodes else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "acceptance": self.acceptance, "tokens_per_decode": self.tokens_per_decode}
