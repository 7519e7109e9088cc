"""The verify loop against a target that is a table: whatever drafts, the output is plain greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.accounting.results import SpecResult
from bmoe.speculation.verify import Choice, Tokens, accepted_prefix, verify_steps


class TableTarget:
    """Greedy continuation by a rule of the whole sequence; checks that its own sequence stays in step."""

    def __init__(self, prompt: list[int], n_ctx: int, vocabulary: int, period: int) -> None:
        self.sequence = list(prompt)
        self.n_ctx, self.vocabulary, self.period = n_ctx, vocabulary, period
        self.batches: list[int] = []

    def next_after(self, sequence: Sequence[int]) -> int:
        if self.period and len(sequence) % 7:
            return sequence[-self.period] if len(sequence) >= self.period else len(sequence) % self.vocabulary
        return (3 * sequence[-1] + len(sequence)) % self.vocabulary

    def room(self) -> int:
        return self.n_ctx - len(self.sequence)

    def decode(self, tokens: Tokens) -> list[Choice]:
        assert 1 <= len(tokens) <= self.room()
        self.batches.append(len(tokens))
        choices = []
        for token in tokens.tolist():
            self.sequence.append(token)
            choices.append(Choice(self.next_after(self.sequence), False, b""))
        return choices

    def drop(self, n: int) -> None:
        assert 0 < n < self.batches[-1]
        del self.sequence[-n:]


class Oracle:
    """Drafts the target's continuation, wrong from position `wrong` on; notes what it was told."""

    def __init__(self, target: TableTarget, size: int, wrong: int, every: int = 1) -> None:
        self.target, self.size, self.wrong, self.every = target, size, wrong, every
        self.asked = 0
        self.waiting = False
        self.trimmed = 0
        self.seen: list[int] = []

    def draft(self, history: Tokens, n_max: int | None = None) -> Tokens:
        assert not self.waiting, "asked for a draft before the last one was judged"
        self.seen = history.tolist()
        self.asked += 1
        if self.asked % self.every:
            return np.empty(0, np.int32)
        sequence, draft = list(self.seen), []
        for i in range(min(self.size, n_max if n_max is not None else self.size)):
            token = self.target.next_after(sequence)
            draft.append(token if i < self.wrong else (token + 1) % self.target.vocabulary)
            sequence.append(token)
        self.waiting, self.trimmed = bool(draft), len(draft)
        return np.array(draft, np.int32)

    matched = 0

    @property
    def winner(self) -> str | None:
        return "oracle" if self.waiting else None

    def trim(self, n: int) -> None:
        assert self.waiting
        self.waiting = n > 0
        self.trimmed = n

    def accept(self, n_accepted: int) -> None:
        assert self.waiting
        self.waiting = False
        assert 0 <= n_accepted <= self.trimmed


class Cutting:
    """Cuts drafts to given lengths, whatever they are."""

    def __init__(self, cuts: list[int]) -> None:
        self.cuts, self.confirmed, self.drafted = cuts, list[int](), 0

    def begin(self) -> None:
        pass

    def ready(self) -> bool:
        return True

    def choose(self, draft: Sequence[int], source: str, matched: int = 0) -> int:
        assert source == "oracle"
        self.cuts = [*self.cuts[1:], self.cuts[0]]
        return min(self.cuts[-1], len(draft))

    def note(self, confirmed: Sequence[int], drafted: int, accepted: int, seconds: float, wasted: float = 0.0) -> None:
        assert len(confirmed) == accepted + 1
        assert accepted <= drafted
        assert seconds >= 0.0
        assert wasted == 0.0 or drafted == 0
        self.confirmed += confirmed
        self.drafted += drafted


def plain(prompt: list[int], n_ctx: int, vocabulary: int, period: int, wanted: int) -> list[int]:
    """Single-token greedy decoding."""
    target = TableTarget(prompt, n_ctx, vocabulary, period)
    out = [target.next_after(target.sequence)]
    while len(out) < wanted + 1 and target.room() > 0:
        out.append(target.decode(np.array([out[-1]], np.int32))[0].id)
    return out


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=20),
    n_ctx=st.integers(21, 90),
    vocabulary=st.integers(5, 9),
    period=st.integers(0, 4),
    wanted=st.integers(0, 70),
    widest=st.integers(0, 12),
    size=st.integers(0, 15),
    wrong=st.integers(0, 16),
    every=st.integers(1, 3),
    cuts=st.none() | st.lists(st.integers(0, 16), min_size=1, max_size=8),
)
def test_any_drafter_gives_plain_greedy_output(
    prompt: list[int],
    n_ctx: int,
    vocabulary: int,
    period: int,
    wanted: int,
    widest: int,
    size: int,
    wrong: int,
    every: int,
    cuts: list[int] | None,
) -> None:
    expected = plain(prompt, n_ctx, vocabulary, period, wanted)
    target = TableTarget(prompt, n_ctx, vocabulary, period)
    drafter = Oracle(target, size, wrong, every)
    history = list(prompt)
    first = Choice(target.next_after(target.sequence), False, b"")
    out, spec = [first.id], SpecResult()
    draft_width = None if cuts is None else Cutting(cuts)
    for step in verify_steps(target, drafter, history, first, wanted, widest, draft_width):
        out += [c.id for c in step.confirmed]
        spec.count(step.drafted, step.accepted, len(step.confirmed))
        # Every confirmed token but the newest is in the target's sequence, and nothing else is.
        assert target.sequence == history[:-1]
        assert step.drafted <= widest
        assert len(step.confirmed) == step.accepted + 1
    assert out == expected
    assert history == prompt + out
    assert len(target.sequence) <= n_ctx
    assert spec.decodes == len(target.batches)
    assert spec.confirmed == len(out) - 1
    if draft_width is not None:
        # Once there is no room left to draft, it is not asked any more.
        assert draft_width.confirmed == out[1 : 1 + len(draft_width.confirmed)]
        assert len(draft_width.confirmed) >= min(len(out) - 1, wanted - 1, n_ctx - len(prompt) - 1) or widest == 0
        assert draft_width.drafted == spec.drafted
    elif wrong >= size and every == 1 and size and widest >= size and wanted > size and n_ctx - len(prompt) > size + 1:
        assert spec.accepted == spec.drafted, "a perfect drafter is always accepted"
        assert spec.tokens_per_decode is not None
        assert spec.tokens_per_decode > 1
    if wrong == 0:
        assert spec.accepted == 0


def test_an_abstaining_step_is_a_plain_decode() -> None:
    target = TableTarget([1, 2, 3], 64, 7, 0)
    silent = Oracle(target, 0, 0)
    list(verify_steps(target, silent, [1, 2, 3], Choice(4, False, b""), 10, 8))
    assert target.batches == [1] * 10


def test_the_drafter_sees_every_confirmed_token() -> None:
    target = TableTarget([1, 2, 3], 64, 7, 0)
    drafter = Oracle(target, 4, 2)
    for _ in verify_steps(target, drafter, [1, 2, 3], Choice(4, False, b""), 20, 8):
        assert drafter.seen[: len(drafter.seen) - 1] == target.sequence[: len(drafter.seen) - 1]


@pytest.mark.parametrize(
    ("draft", "chosen", "expected"), [([5, 6], [5, 6, 7], 2), ([5, 6], [5, 9, 7], 1), ([5], [4, 5], 0)]
)
def test_accepted_prefix(draft: list[int], chosen: list[int], expected: int) -> None:
    assert accepted_prefix(draft, [Choice(c, False, b"") for c in chosen]) == expected


def test_a_source_that_costs_is_not_asked_where_nothing_would_be_verified() -> None:
    """And what went into a draft that was not used is reported apart from the step's own time."""

    class Silent(Cutting):
        asked = 0
        wasted = 0.0

        def ready(self) -> bool:
            self.asked += 1
            return self.asked % 2 == 0

        def note(self, *step: object) -> None:
            self.wasted += step[4]  # type: ignore[operator]

    class Watched(Oracle):
        free_only = False

        def draft(self, history: Tokens, n_max: int | None = None) -> Tokens:
            seen.append(self.free_only)
            return super().draft(history, n_max)

    seen = list[bool]()
    target, draft_width = TableTarget([1, 2, 3], 64, 7, 0), Silent([0])
    for _ in verify_steps(target, Watched(target, 4, 4), [1, 2, 3], Choice(4, False, b""), 20, 8, draft_width):
        pass
    assert seen == [i % 2 == 0 for i in range(len(seen))]
    assert len(seen) > 10
    assert draft_width.wasted > 0.0
