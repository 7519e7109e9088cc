"""How much of a draft is verified: what pays on a cost table, and what is never lost. No model, no clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe import drafting
from bmoe.speculation.draft_width import Adaptive, Always, DraftWidth, Holding, make_draft_width

# Time of a verify batch in plain steps, by its positions: experts streamed through a small cache, and everything
# in memory (docs/speculation.md).
STREAMED = {1: 1.0, 2: 1.87, 4: 2.97, 8: 5.06, 16: 7.48, 32: 10.06, 64: 11.99, 128: 14.0}
IN_MEMORY = {1: 1.0, 2: 1.25, 4: 1.7, 8: 2.4, 16: 3.6, 32: 6.0, 64: 10.5, 128: 20.0}
TABLES = pytest.mark.parametrize("table", [STREAMED, IN_MEMORY], ids=["streamed", "in memory"])


def cost(table: dict[int, float], width: int) -> float:
    return float(np.exp(np.interp(np.log(width), np.log(list(table)), np.log(list(table.values())))))


def speed(
    prompt: list[int], text: list[int], table: dict[int, float], draft_width: DraftWidth, n_max: int = 64
) -> float:
    """Tokens per plain step where `ngram` drafts and the table says what a batch takes, with 10 % noise."""
    noise, drafter = random.Random(1), drafting.make("ngram", n_max=n_max)
    drafter.begin(prompt)
    history, taken, i = [*prompt, text[0]], 0.0, 1
    draft_width.begin()
    while i < len(text):
        draft = drafter.draft(history[:-1], history[-1], len(text) - i).tolist()
        if draft:
            draft = draft[: draft_width.choose(draft, "ngram", drafter.matched)]
            drafter.trim(len(draft))
        accepted = next((k for k, token in enumerate(draft) if token != text[i + k]), len(draft))
        if draft:
            drafter.accept(accepted)
        confirmed = text[i : i + accepted + 1]
        seconds = cost(table, len(draft) + 1) * noise.lognormvariate(0.0, 0.1)
        draft_width.note(confirmed, len(draft), accepted, seconds)
        taken += seconds
        i += len(confirmed)
        history += confirmed
    return (len(text) - 1) / taken


def lines(n: int, seed: int, words: int = 400) -> list[int]:
    r = random.Random(seed)
    return [r.randrange(words) for _ in range(n)]


@TABLES
def test_a_copy_is_drafted_at_length(table: dict[int, float]) -> None:
    text = lines(600, 1)
    assert speed(text, text, table, Adaptive()) > 0.9 * speed(text, text, table, Always()) > 3.0


@TABLES
def test_an_edited_copy(table: dict[int, float]) -> None:
    text = lines(600, 1)
    edited = [t if i % 150 > 6 else 1000 + i for i, t in enumerate(text)]
    assert speed(text, edited, table, Adaptive()) > 0.9 * speed(text, edited, table, Always()) > 2.0


@TABLES
@pytest.mark.parametrize("repeat", [4, 5, 6])
def test_text_that_lures_a_drafter_costs_next_to_nothing(table: dict[int, float], repeat: int) -> None:
    """Runs of a few tokens come back and then go on in another way, so that every long draft fails."""
    r, common = random.Random(2), [lines(repeat, 10 + i) for i in range(5)]
    text: list[int] = []
    while len(text) < 1500:
        text += r.choice(common) + [r.randrange(10_000) for _ in range(12)]
    assert speed(text[:500], text[500:], table, Always()) < 0.8
    assert speed(text[:500], text[500:], table, Adaptive()) > 0.96


@TABLES
def test_it_finds_the_copy_after_a_stretch_that_loses(table: dict[int, float]) -> None:
    """Drafts that are not verified are scored all the same: no probe is needed to see that they hold again."""
    r, common = random.Random(3), [lines(5, 20 + i) for i in range(5)]
    lure: list[int] = []
    while len(lure) < 1000:
        lure += r.choice(common) + [r.randrange(10_000) for _ in range(12)]
    text, draft_width = lines(500, 4), Adaptive()
    alone = speed(text, text, table, Adaptive())
    both = speed([*text, *lure[:200]], [*lure[200:], *text], table, draft_width)
    taken = (len(lure) - 200 + len(text)) / both
    assert len(text) / (taken - (len(lure) - 200)) > 0.6 * alone


def test_no_draft_is_verified_far_beyond_its_evidence() -> None:
    draft_width = Adaptive()
    draft_width.note([1], 0, 0, 1.0)
    for state in (0, 3):
        draft_width._holding["x", state] = holding = Holding()
        for _ in range(20):
            holding.observe(64, 64)
    assert draft_width.choose([1] * 64, "x", 16) == 64
    assert 0 < draft_width.choose([1] * 64, "x", 0) <= 3


def test_losses_are_bounded_whatever_the_estimates() -> None:
    """Batches that cost far more than any before: the account is empty soon, and drafting stops."""
    draft_width = Adaptive()
    draft_width.note([1], 0, 0, 1.0)
    lost, steps = 0.0, 0
    for i in range(2000):
        n = draft_width.choose([i + 1] * 8, "x")
        # Every draft holds when nobody verifies it, and fails when somebody does.
        accepted, seconds = 0, 20.0 if n else 1.0
        lost += seconds - 1.0
        steps += 1
        draft_width.note([i + 1], n, accepted, seconds)
    assert lost < 0.1 * steps + 30.0


def test_it_drafts_nothing_before_it_knows_a_plain_step() -> None:
    draft_width = Adaptive()
    draft = list(range(40))
    assert draft_width.choose(draft, "x") == 0
    for i in range(10):
        draft_width.note([draft[i]], 0, 0, 1.0)
        draft_width.choose(draft[i + 1 :], "x")
    assert draft_width.choose(draft[10:], "x") > 8, "ten tokens in a row were right"
    assert Adaptive().choose(draft, "x", 24) == 0


def test_another_text_begins_without_the_last_one_s_record() -> None:
    draft_width = Adaptive()
    draft_width.note([1], 0, 0, 1.0)
    fresh = draft_width.expected("x", 0, 16)
    for _ in range(20):
        draft_width.choose([5] * 16, "x")
        draft_width.note([6], 0, 0, 1.0)
    assert draft_width.expected("x", 0, 16)[16] < 0.5 * fresh[16]
    draft_width.begin()
    assert draft_width.expected("x", 0, 16) == fresh
    assert draft_width.ratio(1) == 1.0


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=60), st.integers(1, 70))
def test_expected_is_a_count_of_tokens(drafts: Sequence[tuple[int, int]], n: int) -> None:
    draft_width, holding = Adaptive(), Holding()
    for length, held in drafts:
        holding.observe(length, min(held, length))
    draft_width._holding["x", 0] = holding
    expected = draft_width.expected("x", 0, n)
    assert len(expected) == n + 1
    steps = [b - a for a, b in pairwise(expected)]
    assert all(0.0 <= step <= 1.0 for step in steps)
    assert steps == sorted(steps, reverse=True)


def test_a_draft_that_ended_says_nothing_of_what_lay_behind() -> None:
    holding = Holding()
    holding.observe(3, 3)
    assert holding.tried == [1.0, 1.0], "lengths 1 and 2 were reached, 4 could not be"
    holding.observe(3, 2)
    assert len(holding.tried) == 3
    assert holding.held[2] == 0.0
    assert holding.tried[2] == 1.0


def test_what_a_flag_names() -> None:
    assert isinstance(make_draft_width("adaptive"), Adaptive)
    assert isinstance(make_draft_width("always"), Always)


def test_drafts_that_cost_and_are_not_used_are_paid_for() -> None:
    """A source that takes half a step, and whose drafts promise nothing, is asked for about 2 % of the time."""
    draft_width = Adaptive()
    draft_width.begin()
    asked = 0
    for _ in range(2000):
        ready = draft_width.ready()
        asked += ready
        draft_width.note([1], 0, 0, 0.1, 0.05 if ready else 0.0)
    assert 0.02 * 2000 / 0.5 <= asked <= 0.02 * 2000 / 0.5 + 2.0 / 0.5 + 2


def test_ready_says_when_nothing_would_be_verified() -> None:
    draft_width = Adaptive()
    draft_width.begin()
    assert not draft_width.ready(), "no plain step to compare with"
    assert draft_width.choose([1, 2, 3], "a") == 0
    draft_width.note([1], 0, 0, 0.1)
    assert draft_width.ready()
    assert draft_width.choose([1, 2, 3], "a", 12) > 0, "found by twelve tokens"
    draft_width.note([1, 2, 3, 4], 3, 3, 0.1)
    draft_width.note([1, 2, 3, 4], 3, 3, 0.1)
    assert not draft_width.ready(), "a plain step is due"
    assert Always().ready()


def head_speed(
    draft_width: DraftWidth, right: float, draft_cost: float, table: dict[int, float], steps: int = 1500
) -> float:
    """Tokens per plain step with a head that drafts three tokens in `draft_cost` plain steps whenever it is asked; each
    is right with the chance `right`."""
    r, taken, tokens = random.Random(2), 0.0, 0
    draft_width.begin()
    for _ in range(steps):
        held = next((k for k in range(3) if r.random() >= right), 3)
        used, spent = 0, 0.0
        if draft_width.ready():
            used = draft_width.choose([1 if k < held else 0 for k in range(3)], "mtp")
            spent = draft_cost
        accepted = min(used, held)
        confirmed = [1] * (accepted + 1)
        seconds = cost(table, used + 1) * r.lognormvariate(0.0, 0.05)
        draft_width.note(confirmed, used, accepted, seconds + spent * (used > 0), spent * (used == 0))
        taken += seconds + spent
        tokens += len(confirmed)
    return tokens / taken


@pytest.mark.parametrize("right", [0.5, 0.8, 1.0])
def test_a_head_that_cannot_pay_costs_what_plain_steps_bring_in(right: float) -> None:
    """The demo model's: a draft takes 1.3 plain steps, a batch of four 3.5. However often it is right."""
    assert head_speed(Adaptive(), right, 1.3, {1: 1.0, 2: 1.9, 4: 3.5}) > 0.965


def test_a_head_that_pays_is_used() -> None:
    assert head_speed(Adaptive(), 0.9, 0.1, IN_MEMORY) > 0.85 * head_speed(Always(), 0.9, 0.1, IN_MEMORY) > 1.5
