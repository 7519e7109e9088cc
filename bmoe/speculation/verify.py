"""Draft, verify, accept, roll back: the greedy loop. Pure: no model, no llama.cpp.

The loop is the only one there is: without speculation its drafter never drafts, and every step is a plain decode
of one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..accounting.timing import DRAFT, LOOP, Clock
from .draft_width import Always, DraftWidth

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
    """What drafts (`DrafterStack`). `free_only`: sources whose drafts cost time are not asked."""

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
    draft_width: DraftWidth | None = None,
    clock: Clock | None = None,
) -> Iterator[Step]:
    """Decodes greedily from `first`, which is chosen but not yet decoded, drafting where the drafter can.

    `history`: the tokens before `first`; it is extended in place by what is confirmed. `wanted`: how many more
    tokens are asked for; a draft never reaches past them, nor past the target's room, nor `widest` tokens, and
    `draft_width` (None: `Always`) decides how much of it is verified. Drafting is charged to `clock`. The confirmed
    tokens are, one after the other, what single-token greedy decoding by this target gives.
    """
    draft_width, clock = draft_width or Always(), clock or Clock()
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
        drafter.free_only = not draft_width.ready()
        draft = drafter.draft(buffer[:n], most)
        draft_s = perf_counter() - started
        if len(draft):
            width = draft_width.choose(draft.tolist(), drafter.winner or "", drafter.matched)
            if width < len(draft):
                drafter.trim(width)
                draft = draft[:width]
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
        draft_width.note(tokens, len(draft), accepted, perf_counter() - started - wasted, wasted)
        history.extend(tokens)
        wanted -= len(confirmed)
        yield Step(confirmed, len(draft), accepted)
