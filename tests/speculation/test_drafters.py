"""The compiled drafters against the plain ones of reference_drafters.py, on random and adversarial histories."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import numpy as np
import pytest
import reference_drafters
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe import drafting
from bmoe.speculation._drafters import Drafter, replay

LONG = 131072


def fibonacci(n: int) -> list[int]:
    a, b = [1], [1, 2]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


def adversarial(n: int) -> dict[str, list[int]]:
    rng = random.Random(n)
    common = [7 if i % 5 else 100 + i for i in range(n)]  # the end is everywhere, what precedes it nowhere
    return {
        "one token": [9] * n,
        "period 2": [5, 6] * (n // 2),
        "fibonacci": fibonacci(n),
        "two letters": [rng.randint(0, 1) for _ in range(n)],
        "four letters": [rng.randint(0, 3) for _ in range(n)],
        "nothing": [rng.randint(0, 50000) for _ in range(n)],
        "common end": common,
    }


def configs(draw: Any) -> tuple[str, dict[str, Any]]:
    """A drafter and settings small enough that everything happens within a few dozen tokens."""
    name = draw(st.sampled_from(drafting.TYPES))
    sizes = {"size_n": draw(st.integers(1, 4)), "size_m": draw(st.integers(1, 6)), "min_hits": draw(st.integers(0, 3))}
    compat = draw(st.booleans())
    if name == "ngram":
        low = draw(st.integers(1, 4))
        config = {"min_match": low, "max_match": low + draw(st.integers(0, 8)), "n_max": draw(st.integers(1, 9))}
    elif name == "ngram-mod":
        config = {
            "n_match": draw(st.integers(1, 4)),
            "n_min": draw(st.integers(0, 3)),
            "n_max": draw(st.integers(0, 8)),
        }
        config["table_size"] = draw(st.sampled_from([5, 64, 4096]))
    else:
        config = sizes
    return name, {**config, "compat": compat}


@st.composite
def sessions(draw: Any) -> tuple[str, dict[str, Any], list[tuple[str, Any]]]:
    """A drafter and what happens to it: requests, steps, histories cut, rewritten at the end, or shifted."""
    letters = draw(st.sampled_from([1, 2, 3, 8]))
    token = st.integers(0, letters - 1)
    event = st.one_of(
        st.tuples(st.just("begin"), st.lists(token, max_size=40)),
        st.tuples(st.just("begin like"), st.integers(0, 60)),
        st.tuples(
            st.just("steps"), st.lists(st.tuples(token, st.integers(0, 9), st.none() | st.integers(0, 5)), min_size=1)
        ),
        st.tuples(st.just("cut"), st.integers(0, 60)),
        st.tuples(st.just("rewrite"), st.tuples(st.integers(0, 20), st.lists(token, max_size=20))),
        st.tuples(st.just("shift"), st.tuples(st.integers(0, 10), st.integers(1, 10))),
        st.tuples(st.just("again"), token),
    )
    return *configs(draw), draw(st.lists(event, min_size=1, max_size=12))


def step(
    ours: Drafter, plain: reference_drafters.Reference, history: list[int], last: int, n_max: int | None
) -> list[int]:
    try:
        want = plain.draft(history, last, n_max) if n_max != 0 else []
    except reference_drafters.HistoryShrank:
        with pytest.raises(ValueError, match=r"ngram-map-k\w* aborts"):
            ours.draft(history, last, n_max)
        return []
    got = ours.draft(np.array(history, np.int32), last, n_max)
    assert got.dtype == np.int32
    assert got.tolist() == want
    return want


@settings(max_examples=600, deadline=None)
@given(sessions())
def test_equals_plain_reference(session: tuple[str, dict[str, Any], list[tuple[str, Any]]]) -> None:
    name, config, events = session
    ours, plain = drafting.make(name, **config), reference_drafters.make(name, **config)
    history: list[int] = []
    for kind, what in events:
        # At most 60 tokens: a rewrite that leaves the newest 64 known tokens in place is not noticed.
        if kind == "steps":
            for last, accepted, n_max in what:
                if len(history) > 50:
                    break
                draft = step(ours, plain, history, last, n_max)
                if draft and (n_max is None or n_max > 0):
                    accepted = min(accepted, len(draft))
                    ours.accept(accepted)
                    plain.accept(accepted)
                    history = [*history, last, *draft[:accepted]]
                else:
                    history = [*history, last]
        elif kind == "begin like" or kind == "begin":
            history = history[:what] if kind == "begin like" else list(what)
            ours.begin(np.array(history, np.int32))
            plain.begin(history)
        elif kind == "cut":
            history = history[:what]
        elif kind == "rewrite":
            history = history[: max(len(history) - what[0], 0)] + what[1]
        elif kind == "shift":
            history = history[: what[0]] + history[what[0] + what[1] :]
        elif kind == "again" and len(history) < 60:
            step(ours, plain, history, what, None)
            step(ours, plain, history, what, None)


@st.composite
def texts(draw: Any) -> tuple[str, dict[str, Any], list[int], int]:
    """A drafter, and a text of a few phrases that come again and again with different continuations."""
    phrases = draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=4))
    order = draw(st.lists(st.integers(0, len(phrases) - 1), min_size=8, max_size=50))
    text = [token for i in order for token in phrases[i]]
    return *configs(draw), text, draw(st.integers(0, len(text)))


@settings(max_examples=600, deadline=None)
@given(texts())
def test_whole_text_equals_plain_reference(case: tuple[str, dict[str, Any], list[int], int]) -> None:
    name, config, text, pos = case
    plain = reference_drafters.make(name, **config)
    plain.begin(text[:pos])
    want, steps = [], 0
    while pos + 1 < len(text):
        draft = plain.draft(text[:pos], text[pos])
        steps += 1
        accepted = 0
        while accepted < len(draft) and text[pos + 1 + accepted : pos + 2 + accepted] == [draft[accepted]]:
            accepted += 1
        if draft:
            plain.accept(accepted)
            want.append((pos, accepted, len(draft), draft))
        pos += 1 + accepted
    got_steps, at, accepted_, sizes, flat = replay(drafting.make(name, **config), text, case[3])
    assert got_steps == steps
    assert list(zip(at.tolist(), accepted_.tolist(), sizes.tolist(), strict=True)) == [w[:3] for w in want]
    assert flat.tolist() == [token for w in want for token in w[3]]


@settings(max_examples=300, deadline=None)
@given(sessions(), st.lists(st.integers(0, 2), max_size=60), st.integers(0, 30))
def test_nothing_leaks_into_the_next_request(
    session: tuple[str, dict[str, Any], list[tuple[str, Any]]], text: list[int], prompt_len: int
) -> None:
    """After `begin`, a used drafter drafts what a new one does; and after a cut, what it would after `begin`."""
    name, config, events = session
    config["compat"] = False
    used = drafting.make(name, **config)
    history: list[int] = []
    for kind, what in events:
        if kind == "begin":
            history = list(what)
            used.begin(history)
        elif kind == "steps":
            for last, accepted, n_max in what:
                size = len(used.draft(history, last, n_max))
                used.accept(min(accepted, size))
                history = [*history, last][:50]
    prompt_len = min(prompt_len, len(text))
    for start in ("begin", "cut", "truncate"):
        if start == "begin":
            used.begin(text[:prompt_len])
        elif start == "cut" and used.draft(text[:prompt_len], 1, 0).size == 0 and len(text) > prompt_len:
            used.begin(text + text)
            used.draft(text + text, 2)
        elif start == "truncate":
            used.begin([*text, 4])
            used.draft([*text, 4], 2)
            used.truncate(prompt_len)
        new = drafting.make(name, **config)
        new.begin(text[:prompt_len])
        for pos in range(prompt_len, len(text)):
            draft = new.draft(text[:pos], text[pos])
            assert used.draft(text[:pos], text[pos]).tolist() == draft.tolist(), start
            for drafter in (new, used):
                drafter.accept(min(pos % 3, len(draft)))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ngram", {"min_match": 2}),
        ("ngram-simple", {"size_n": 2, "size_m": 4}),
        ("ngram-map-k", {"size_n": 2, "size_m": 4}),
        ("ngram-map-k4v", {"size_n": 2, "size_m": 4}),
        ("ngram-mod", {"n_match": 2, "n_min": 1, "n_max": 4}),
    ],
)
def test_a_chat_grows_turn_by_turn(name: str, config: dict[str, Any]) -> None:
    """Each prompt holds the one before it, with hundreds of keys: still, every request begins like the first."""
    rng = random.Random(2)
    phrases = [[rng.randint(0, 60) for _ in range(rng.randint(3, 9))] for _ in range(60)]
    text = [token for _ in range(500) for token in rng.choice(phrases)]
    used = drafting.make(name, **config)
    drafted = 0
    for prompt_len in [*range(100, 2000, 240), 700, 1200]:
        fresh = drafting.make(name, **config)
        for drafter in (used, fresh):
            drafter.begin(text[:prompt_len])
        for pos in range(prompt_len, prompt_len + 330):
            draft = fresh.draft(text[:pos], text[pos]).tolist()
            assert used.draft(text[:pos], text[pos]).tolist() == draft
            accepted = rng.choice([0, len(draft)])
            for drafter in (used, fresh):
                drafter.accept(accepted)
            drafted += len(draft)
    assert drafted > 1000


@pytest.mark.parametrize("kind", list(adversarial(8)))
@pytest.mark.parametrize(("min_match", "max_match", "n_max"), [(1, 1, 4), (3, 16, 3), (2, 40, 24), (3, 300, 9)])
def test_ngram_equals_the_scan(kind: str, min_match: int, max_match: int, n_max: int) -> None:
    text = adversarial(360)[kind]
    config = {"min_match": min_match, "max_match": max_match, "n_max": n_max}
    ours, plain = drafting.make("ngram", **config), reference_drafters.make("ngram", **config)
    for prompt_len in (0, 5, 300):
        ours.begin(text[:prompt_len])
        plain.begin(text[:prompt_len])
        for pos in range(prompt_len, len(text), 3):
            assert ours.draft(text[:pos], text[pos]).tolist() == plain.draft(text[:pos], text[pos]), pos


@pytest.mark.parametrize("kind", list(adversarial(8)))
def test_ngram_rolls_back(kind: str) -> None:
    """Cut anywhere and grown again, the index is that of the text alone. With max_match 1024 the undo log does
    not hold all of it, so that deep cuts rebuild."""
    text = adversarial(3000)[kind]
    rng = random.Random(1)
    for max_match in (16, 1024):
        ours = drafting.make("ngram", min_match=1, max_match=max_match, n_max=16)
        ours.begin(text)
        for _ in range(12):
            size = rng.choice([rng.randint(0, 2999), 2999 - rng.randint(0, 40)])
            history = text[:size] + [rng.choice(text) for _ in range(rng.randint(0, 30))]
            fresh = drafting.make("ngram", min_match=1, max_match=max_match, n_max=16)
            fresh.begin(history)
            for last in rng.choices(text, k=150):
                assert ours.draft(history, last).tolist() == fresh.draft(history, last).tolist()
                history.append(last)


def test_ngram_rules() -> None:
    ngram = drafting.make("ngram", min_match=2, n_max=3)
    assert ngram.draft([1, 2, 3, 9, 1, 2, 4, 9, 1], 2).tolist() == [4, 9, 1]  # equal lengths: the most recent
    assert ngram.draft([5, 1, 2, 3, 9, 1, 2, 4, 5, 1], 2).tolist() == [3, 9, 1]  # the longest first
    assert ngram.draft([1, 2, 8, 7], 1).tolist() == []  # one token is below min_match
    assert ngram.draft([4, 4, 4], 4).tolist() == [4]  # overlaps the end, clipped at it
    assert ngram.draft([1, 2], 1, 2).tolist() == []
    assert ngram.draft([1, 2, 1], 2, 1).tolist() == [1]
    assert ngram.draft([], 2).tolist() == []


@pytest.mark.parametrize("compat", [False, True])
def test_asking_twice(compat: bool) -> None:
    """Like llama.cpp's, ngram-map does not find a second time the occurrence that it has just listed."""
    history = [*range(100, 110), 5, 6, 7]
    config = {"size_n": 1, "size_m": 1, "compat": compat}
    ours, plain = drafting.make("ngram-map-k", **config), reference_drafters.make("ngram-map-k", **config)
    for want in ([6], []):
        assert plain.draft(history, 5) == want
        assert ours.draft(history, 5).tolist() == want


def test_history_may_be_anything_that_holds_integers() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    want = [4, 5, 1]
    wide = np.array(text * 2, np.int64)
    for history in (text[:-1], tuple(text[:-1]), np.array(text[:-1]), np.array(text[:-1], np.uint16), wide[:7]):
        assert drafting.make("ngram").draft(history, 3).tolist() == want
    spaced = np.repeat(np.array(text[:-1], np.int32), 2)[::2]
    assert drafting.make("ngram").draft(spaced, np.int32(3)).tolist() == want
    for bad in ([1.5], [[1]], [2**31], [-(2**31) - 1], [2**70], np.array([2**31]), ["a"]):
        with pytest.raises(ValueError, match=r"integers|one-dimensional|int32"):
            drafting.make("ngram").draft(bad, 1)
    with pytest.raises(OverflowError):
        drafting.make("ngram").draft([], 2**31)
    with pytest.raises(ValueError, match="n_max is -1"):
        drafting.make("ngram").draft([1], 1, -1)


def test_accept_is_checked() -> None:
    drafter = drafting.make("ngram", n_max=3)
    drafter.begin([1, 2, 3, 4, 5, 1, 2])
    assert len(drafter.draft([1, 2, 3, 4, 5, 1, 2], 3)) == 3
    with pytest.raises(ValueError, match="4 tokens accepted of a draft of 3"):
        drafter.accept(4)
    drafter.accept(2)
    drafter.accept(7)  # nothing waits for it
    assert drafter.stats["accepted"] == 2
    with pytest.raises(ValueError, match="-1"):
        drafter.accept(-1)


def test_abstaining_allocates_nothing() -> None:
    drafter = drafting.make("ngram")
    assert drafter.draft([1], 2) is drafter.draft([1, 2], 3)


def test_long_lag_of_a_window_is_noticed() -> None:
    """A history that was cut and grew past its old length between two calls."""
    for name in ("ngram", "ngram-simple", "ngram-map-k", "ngram-mod"):
        config: dict[str, int] = {"n_match": 3, "n_min": 1} if name == "ngram-mod" else {}
        if name.startswith("ngram-map") or name == "ngram-simple":
            config = {"size_n": 3, "size_m": 4}
        used, new = (drafting.make(name, **config) for _ in range(2))
        rng = random.Random(3)
        first = [rng.randint(0, 3) for _ in range(500)]
        second = first[:200] + [rng.randint(0, 3) for _ in range(400)]
        used.begin(first)
        used.draft(first, 1)
        new.begin(second)
        drafts = [(used.draft(second, t).tolist(), new.draft(second, t).tolist()) for t in range(4)]
        assert all(a == b for a, b in drafts), name
        assert any(a for a, _ in drafts), name
        assert used.stats["restarts"] >= 1


@pytest.mark.parametrize("kind", list(adversarial(8)))
def test_ngram_step_is_under_ten_microseconds(kind: str) -> None:
    """At a history of 131,072 tokens; CPU time, so that a busy machine does not count."""
    text = np.array(adversarial(LONG)[kind], np.int32)
    drafter = drafting.make("ngram", max_match=64, n_max=64)
    drafter.begin(text[: LONG - 600])
    took = []
    for pos in range(LONG - 600, LONG):
        history, last = text[:pos], int(text[pos])
        start = time.thread_time_ns()
        drafter.draft(history, last)
        took.append(time.thread_time_ns() - start)
    assert statistics.median(took) < 10_000


def test_memory_is_stated() -> None:
    """Bytes per token of history beside the fixed part, as in docs/drafting.md, on the worst of these streams."""
    bound = {"ngram": 110, "ngram-simple": 30, "ngram-map-k": 40, "ngram-map-k4v": 60, "ngram-mod": 20}
    fixed = {"ngram": 1 << 21, "ngram-map-k": 1 << 20, "ngram-map-k4v": 1 << 20, "ngram-mod": 1 << 24}
    for name, limit in bound.items():
        for kind, text in adversarial(30000).items():
            drafter = drafting.make(name)
            replay(drafter, text, 29000)
            per_token = (drafter.nbytes - fixed.get(name, 0)) / 30000
            assert drafter.nbytes >= 4 * 30000
            assert per_token <= limit, (name, kind, per_token)
