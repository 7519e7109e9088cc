"""Each mend of docs/drafting.md, shown both ways: what llama.cpp's drafter does (compat), and the default."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bmoe import drafting
from bmoe.speculation._drafters import Drafter

MAPS = ("ngram-map-k", "ngram-map-k4v")
SMALL = {"size_n": 2, "size_m": 4}
MOD = {"n_match": 2, "n_min": 1, "n_max": 6}


def both(name: str, **config: Any) -> tuple[Drafter, Drafter]:
    return drafting.make(name, compat=True, **config), drafting.make(name, **config)


def noise(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1000, 50000) for _ in range(n)]


@pytest.mark.parametrize("name", MAPS)
def test_history_shrinks_in_mid_generation(name: str) -> None:
    text = noise(40) * 2
    compat, default = both(name, **SMALL)
    for drafter in (compat, default):
        drafter.begin(text[:60])
        assert len(drafter.draft(text[:60], text[60])) == 4
    with pytest.raises(ValueError, match="shrank to 50 tokens"):
        compat.draft(text[:50], text[50])
    assert default.draft(text[:50], text[50]).tolist() == text[51:55]
    assert default.stats["restarts"] == 1


@pytest.mark.parametrize("name", MAPS)
def test_history_is_shorter_than_the_prompt_that_was_announced(name: str) -> None:
    text = noise(30) * 2
    compat, default = both(name, **SMALL)
    for drafter in (compat, default):
        drafter.begin(text)
    with pytest.raises(ValueError, match="aborts"):
        compat.draft(text[:40], text[40])
    assert default.draft(text[:40], text[40]).tolist() == text[41:45]


@pytest.mark.parametrize("name", MAPS)
def test_context_shift(name: str) -> None:
    """The context is full: the 20 tokens after the first 10 are dropped, and generation goes on."""
    text = noise(10) + noise(20, 1) + noise(40, 2) * 2
    compat, default = both(name, **SMALL)
    for drafter in (compat, default):
        drafter.begin(text[:70])
        drafter.draft(text[:90], text[90])
    shifted = text[:10] + text[30:]
    with pytest.raises(ValueError, match="shrank"):
        compat.draft(shifted[:75], shifted[75])
    assert default.draft(shifted[:75], shifted[75]).tolist() == shifted[76:80]


def test_ngram_mod_after_a_cut() -> None:
    """llama.cpp's keeps what was cut off, and indexes nothing until the history is longer than it was."""
    old, new = noise(60), noise(20, 1)
    history = old[:10] + new
    compat, default = both("ngram-mod", **MOD)
    for drafter in (compat, default):
        drafter.begin(old)
        assert drafter.draft([*old, *old[:8]], old[8]).tolist() == old[9:15]
    removed = [*history, old[40], old[41]]
    assert compat.draft(removed[:-1], removed[-1]).tolist() == old[42:48]
    assert default.draft(removed[:-1], removed[-1]).tolist() == []
    repeated = [*history, *new[:4]]
    assert compat.draft(repeated[:-1], repeated[-1]).tolist() == []
    default.begin(history)
    assert default.draft(repeated[:-1], repeated[-1]).tolist() == new[4:10]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ngram", {}),
        ("ngram-simple", {"size_n": 8}),
        *[(n, {"size_n": 8, "size_m": 4}) for n in MAPS],
        ("ngram-mod", {}),
    ],
)
def test_prompt_shorter_than_n(name: str, config: dict[str, int]) -> None:
    """Nothing breaks, and drafting begins once there is enough history."""
    text = noise(90) * 2
    for drafter in both(name, **config):
        for size in range(8):
            drafter.begin(text[:size])
            assert drafter.draft(text[:size], text[size]).tolist() == []
        drafted = [len(drafter.draft(text[:pos], text[pos])) for pos in range(8, 130)]
        assert not any(drafted[:80])
        assert any(drafted)


@pytest.mark.parametrize("name", MAPS)
def test_a_key_refused_once_drafts_again(name: str) -> None:
    text = noise(20)
    history = text * 2
    for drafter, after in zip(both(name, **SMALL), ([0, 0, 0, 0], [1, 2, 4, 4]), strict=True):
        drafter.begin(history)
        sizes = []
        for accepted in (0, 1, 2, 4, 4):
            draft = drafter.draft([*history, text[0]], text[1])
            drafter.accept(min(accepted, len(draft)))
            sizes.append(len(draft))
            history = history + text
        assert sizes == [4, *after]
        history = text * 2


@pytest.mark.parametrize("name", MAPS)
def test_a_limit_grows_back(name: str) -> None:
    """llama.cpp drafts no more than was accepted last, so that a limit never rises."""
    text = noise(20)
    for drafter, want in zip(both(name, size_n=2, size_m=8), ([8, 3, 3, 3], [8, 3, 6, 8]), strict=True):
        history = text * 2
        drafter.begin(history)
        sizes = []
        for _ in want:
            draft = drafter.draft([*history, text[0]], text[1])
            sizes.append(len(draft))
            drafter.accept(3 if len(draft) == 8 else len(draft))
            history += text
        assert sizes == want


@pytest.mark.parametrize("name", MAPS)
def test_a_draft_cut_short_by_the_caller_is_no_refusal(name: str) -> None:
    """Two tokens were asked for and accepted: llama.cpp then drafts no more than two."""
    text = noise(20)
    for drafter, want in zip(both(name, size_n=2, size_m=8), (2, 8), strict=True):
        drafter.begin(text * 2)
        assert len(drafter.draft([*text, *text, text[0]], text[1], 2)) == 2
        drafter.accept(2)
        assert len(drafter.draft([*text, *text, *text[:1]], text[1])) == want


def test_ngram_mod_a_draft_cut_short_by_the_caller_is_no_refusal() -> None:
    """One token of nine is under a quarter: five times, and llama.cpp drops its table, with the other request's."""
    other, text = noise(50, 1), noise(50)
    config = {**MOD, "n_max": 9}
    for drafter in both("ngram-mod", **config):
        drafter.begin(other)
        drafter.begin(text)
        for _ in range(5):
            assert len(drafter.draft([*text, text[0]], text[1], 1)) == 1
            drafter.accept(1)
        seen = drafter.draft([*text, other[0]], other[1])
        assert seen.tolist() == []
    compat, _ = both("ngram-mod", **config)
    compat.begin(other)
    compat.begin(text)
    assert len(compat.draft([*text, other[0]], other[1])) == 9  # it was there before


def poor_drafts(drafter: Drafter, text: list[int], n: int) -> None:
    for _ in range(n):
        assert len(drafter.draft([*text, text[0]], text[1])) == 9
        drafter.accept(0)


def test_ngram_mod_what_counts_as_poor() -> None:
    """Seen by what the fifth poor draft in a row brings: new tokens are indexed at once, not from the 33rd on."""
    text, new = noise(50), noise(10, 1)
    asked = [*text, *text[:2], *new, new[0]]
    found = [*new[2:], new[0]]

    def of(drafter: Drafter) -> Drafter:
        drafter.begin(text)
        return drafter

    waiting = of(both("ngram-mod", **{**MOD, "n_max": 9})[1])
    assert waiting.draft(asked, new[1]).tolist() == []
    poor = of(both("ngram-mod", **{**MOD, "n_max": 9})[1])
    poor_drafts(poor, text, 5)
    assert poor.draft(asked, new[1]).tolist() == found
    for drafter, want in zip(both("ngram-mod", **{**MOD, "n_max": 9}), (found, []), strict=True):
        of(drafter)
        for _ in range(5):
            drafter.draft([*text, text[0]], text[1], 1)
            drafter.accept(1)  # all that was asked for
        assert drafter.draft(asked, new[1]).tolist() == want
    for drafter, want in zip(both("ngram-mod", **{**MOD, "n_max": 9}), (found, []), strict=True):
        poor_drafts(of(drafter), text, 4)  # of an earlier request
        poor_drafts(of(drafter), text, 1)
        assert drafter.draft(asked, new[1]).tolist() == want


def test_ngram_mod_keeps_to_its_request() -> None:
    secret, text = noise(40), noise(40, 1)
    compat, default = both("ngram-mod", **MOD)
    for drafter in (compat, default):
        drafter.begin(secret)
        drafter.begin(text)
    asked = [*text, *secret[:2]]
    assert compat.draft(asked[:-1], asked[-1]).tolist() == secret[2:8]
    assert default.draft(asked[:-1], asked[-1]).tolist() == []


@pytest.mark.parametrize("name", MAPS)
def test_map_limits_keep_to_their_request(name: str) -> None:
    text = noise(20) * 2
    for drafter, want in zip(both(name, **SMALL), (0, 4), strict=True):
        drafter.begin(text)
        assert len(drafter.draft([*text, text[0]], text[1])) == 4
        drafter.accept(0)
        drafter.begin(text)
        assert len(drafter.draft([*text, text[0]], text[1])) == want


def test_map_limits_do_not_pass_to_other_keys() -> None:
    """llama.cpp knows a key by its place: in the next text another key stands there, and inherits its limit."""
    first, second = noise(20) * 2, noise(60, 1)
    second[40:42] = second[20:22]
    for drafter, want in zip(both("ngram-map-k", **SMALL), ([], second[42:46]), strict=True):
        drafter.begin(first)
        assert drafter.draft([*first, first[0]], first[1]).tolist() == first[2:6]  # copied from position 22
        drafter.accept(0)
        drafter.begin(second)
        assert drafter.draft([*second, second[20]], second[21]).tolist() == want


def test_map_values_keep_to_their_request() -> None:
    """Two continuations of the last request forbid, in llama.cpp, the draft that this one allows."""
    key = [1, 2]
    last = [*key, *noise(4, 1), *noise(9, 2), *key, *noise(4, 3), *noise(9, 4)]
    text = [*key, *noise(4, 1), *noise(40, 5)]
    for drafter, want in zip(both("ngram-map-k4v", **SMALL), ([], noise(4, 1)), strict=True):
        drafter.begin([0, *last])
        assert drafter.draft([0, *last, 1], 2).tolist() == []
        drafter.begin([0, *text])
        assert drafter.draft([0, *text, 1], 2).tolist() == want


def test_map_hits_keep_to_their_request() -> None:
    text = noise(20) * 2
    for drafter, want in zip(both("ngram-map-k4v", **SMALL, min_hits=2), (text[2:6], []), strict=True):
        for prompt in (text, [*text, 7, 8]):
            drafter.begin(prompt)
            seen = drafter.draft([*prompt, text[0]], text[1]).tolist()
        assert seen == want


def test_ngram_mod_keeps_a_long_prompt() -> None:
    """A prompt that fills more than a quarter of the table is thrown away by llama.cpp as soon as it is read."""
    text = noise(300)
    compat, default = both("ngram-mod", **MOD, table_size=701)
    for drafter in (compat, default):
        drafter.begin(text)
    assert compat.draft([*text, text[280]], text[281]).tolist() == []
    assert default.draft([*text, text[280]], text[281]).tolist() == text[282:288]


@pytest.mark.parametrize("name", ["ngram-simple", "ngram-map-k"])
def test_min_hits_is_honoured(name: str) -> None:
    """llama.cpp has the flags, and these two drafters do not read them."""
    text = noise(20) * 2
    compat, default = both(name, **SMALL, min_hits=2)
    for drafter in (compat, default):
        drafter.begin(text[:30])
    first = [drafter.draft(text[:30], text[30]).tolist() for drafter in (compat, default)]
    assert first == [text[31:35], []]


def test_ngram_simple_sees_the_whole_history() -> None:
    """llama.cpp's passes over the first position, and over a match one token back."""
    text = noise(20)
    compat, default = both("ngram-simple", **SMALL)
    assert compat.draft([*text, text[0]], text[1]).tolist() == []
    assert default.draft([*text, text[0]], text[1]).tolist() == text[2:6]
    run = [*text, 7, 7]
    compat, default = both("ngram-simple", size_n=1, size_m=4)
    assert compat.draft(run, 7).tolist() == [7]
    assert default.draft(run, 7).tolist() == [7]
    assert compat.draft([*text, 7], 7).tolist() == []
    assert default.draft([*text, 7], 7).tolist() == [7]
