"""The votes policy against plain Python, and what it promises of prompts, drafts and small budgets."""

from __future__ import annotations

import random

import pytest
import reference_admission
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_admission import PlainVotes

from bmoe.streamer import ExpertCache

N_EXPERT, N_USED = 12, 3


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Classes of the layers and slots of the classes."""
    class_slots = draw(st.lists(st.integers(0, 14), min_size=1, max_size=3))
    layer_class = draw(st.lists(st.integers(0, len(class_slots) - 1), min_size=1, max_size=5))
    return layer_class, class_slots


@given(caches(), st.randoms(use_true_random=False), st.integers(1, 120), st.sampled_from([None, 1, 3]))
@settings(max_examples=80, deadline=None)
def test_the_same_victims_as_in_plain_python(
    shape: tuple[list[int], list[int]], rng: random.Random, steps: int, quota: int | None
) -> None:
    """Any order of layers, batches of any width, prompts, rejected drafts, a cache that is emptied."""
    layer_class, class_slots = shape
    n = len(layer_class)
    cache = ExpertCache([N_EXPERT] * n, layer_class, class_slots, "votes", N_USED)
    plain = PlainVotes(layer_class, class_slots, N_EXPERT, N_USED, None if quota is None else [quota] * n)
    orderly, favourites = rng.random() < 0.8, [rng.sample(range(N_EXPERT), N_USED + 1) for _ in range(3)]
    layer = width = -1
    for epoch in range(steps):
        layer = (layer + 1) % n if orderly else rng.randrange(n)
        if layer == 0 or width < 0:
            width = rng.choice([1, 1, 1, 1, 1, 1, 1, 2, 4, 40, 40, 150])
            left = rng.choice([-1, -1, -1, 0, 10, 50]) if width > 2 else -1
            cache.prompt(left)
            plain.prompt(left)
            if rng.random() < 0.1:
                cache.reject(rejected := rng.randrange(5))
                plain.reject(rejected)
        pool = rng.choice([*favourites, range(N_EXPERT)])
        # The router's own number of experts, or one that has more or less to say.
        rows = [rng.sample(pool, rng.choice([N_USED, N_USED, N_USED, 1, N_USED + 1])) for _ in range(width)]
        assert cache.route(layer, rows, epoch, quota) == plain.batch(layer, rows)
        if rng.random() < 0.01:
            cache.clear()
            plain.clear()
        if epoch % 7 == 0 or epoch == steps - 1:
            cache.check()
            for i in range(n):
                assert cache.resident(i) == plain.resident(i)
                assert cache.scores(i) == {e: s for (la, e), s in plain.scores.items() if la == i}
        assert cache.counters() == (plain.hits, plain.misses, plain.evictions, plain.rereads)


def test_the_reference_would_notice_another_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: with another constant the two part."""
    monkeypatch.setattr(reference_admission, "SHARPNESS", reference_admission.SHARPNESS + 16)
    with pytest.raises(AssertionError):
        test_the_same_victims_as_in_plain_python.hypothesis.inner_test(  # type: ignore[attr-defined]
            ([0, 0, 0, 0], [9]), random.Random(1), 260, None
        )


def tokens(cache: ExpertCache, rows: list[list[list[int]]], epoch: int) -> int:
    """Routes tokens one by one, `rows[token][layer]`; the hits."""
    hits = 0
    for token in rows:
        for layer, experts in enumerate(token):
            hits += len(cache.access(layer, experts, epoch)[0])
            epoch += 1
    return hits


def text(n: int, seed: int, low: int, high: int, n_layers: int = 4, top: int = 4) -> list[list[list[int]]]:
    """`n` tokens that use experts `low` to `high`."""
    rng = random.Random(seed)
    return [[rng.sample(range(low, high), top) for _ in range(n_layers)] for _ in range(n)]


def test_below_one_tokens_experts_there_are_hits_where_lru_has_none() -> None:
    """Eleven slots, sixteen experts for each token, of six in a layer."""
    rows = text(60, 1, 0, 6)
    lru, votes = (ExpertCache([32] * 4, [0] * 4, [11], policy, 4) for policy in ("lru", "votes"))
    assert tokens(lru, rows, 0) == 0
    assert tokens(votes, rows, 0) > 60 * 16 * 0.35
    assert votes.n_resident == 11


@pytest.mark.parametrize("ubatches", [1, 4])
def test_a_long_prompt_leaves_what_decode_uses(ubatches: int) -> None:
    """Decode uses 8 experts of each layer; a prompt of 480 tokens uses 40 others, its last 4 tokens 4 of them."""
    cache = ExpertCache([64] * 4, [0] * 4, [56], "votes", 4)
    tokens(cache, text(100, 1, 0, 8), 0)
    before = [set(cache.resident(i)) for i in range(4)]
    assert all(set(range(8)) <= held for held in before)
    prompt = text(476, 2, 16, 56) + text(4, 3, 56, 60)
    size = len(prompt) // ubatches
    for at in range(0, len(prompt), size):
        part = prompt[at : at + size]
        cache.prompt(len(prompt) - at - size)
        for layer in range(4):
            cache.route(layer, [token[layer] for token in part], 10_000 + at + layer, 14)
        cache.check()
    cache.prompt(-1)
    for layer in range(4):
        held = set(cache.resident(layer))
        assert set(range(56, 60)) <= held, "the last tokens' experts are there"
        assert len(held & set(range(8))) >= 7, "and so is what decode uses"
    assert tokens(cache, text(20, 4, 0, 8), 20_000) >= 20 * 16 - 4


def test_rejected_drafts_have_no_vote() -> None:
    rows = text(40, 1, 0, 8)
    draft = text(6, 2, 20, 28)
    caches = [ExpertCache([32] * 4, [0] * 4, [40], "votes", 4) for _ in range(2)]
    for cache in caches:
        tokens(cache, rows, 0)
        confirmed = [*rows[-1:], *draft] if cache is caches[0] else rows[-1:]
        for layer in range(4):
            cache.route(layer, [token[layer] for token in confirmed], 1000 + layer, 10)
    caches[0].reject(len(draft))
    # From the next token on the two judge alike what both hold.
    for cache in caches:
        tokens(cache, rows[:1], 2000)
    for layer in range(4):
        first, second = (cache.scores(layer) for cache in caches)
        both = {e for e in first.keys() & second.keys() if e < 8}
        assert len(both) >= 4
        assert {e: first[e] for e in both} == {e: second[e] for e in both}
        assert all(s == 0 for e, s in first.items() if e >= 20)


def test_what_does_not_go_together_is_refused() -> None:
    for policy, n_used, says in (("mru", 4, "no cache policy 'mru'"), ("votes", 0, "n_used"), ("votes", 256, "n_used")):
        with pytest.raises(ValueError, match=says):
            ExpertCache([4], [0], [2], policy, n_used)
    cache = ExpertCache([4], [0], [2])
    with pytest.raises(ValueError, match="sharpness"):
        cache.constants(sharpness=13)
    with pytest.raises(ValueError, match="out of range"):
        cache.time_tokens([(0, [1, 4])])
    with pytest.raises(ValueError, match="out of range"):
        cache.time_tokens([(1, [0])])


def test_timing_leaves_the_counters_of_a_replay() -> None:
    rows = [(layer, token[layer]) for token in text(30, 1, 0, 20) for layer in range(4)]
    timed, replayed = (ExpertCache([32] * 4, [0] * 4, [40], "votes", 4) for _ in range(2))
    assert timed.time_tokens(rows) > 0
    for epoch, (layer, experts) in enumerate(rows):
        replayed.access(layer, experts, epoch)
    assert timed.counters() == replayed.counters()
    assert [timed.resident(i) for i in range(4)] == [replayed.resident(i) for i in range(4)]
