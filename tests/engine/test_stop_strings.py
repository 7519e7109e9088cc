"""Stop strings: the text ends where plain decoding would have ended it, however it comes in pieces."""

from __future__ import annotations

import pytest
from conftest import OpenEngine, Tiny
from hypothesis import given
from hypothesis import strategies as st

import bmoe
from bmoe.engine.stop_strings import StopStrings
from bmoe.speculation import DraftSpec, ModConfig

# What is drafted depends on the text alone.
WIDE = DraftSpec(("ngram-mod",), policy="always", ngram_mod=ModConfig(2, 1, 16))
# A text that is the same with every processor's kernels: its prompt's, three tokens edited. Each byte is a character.
WORD = [60 + 7 * i % 60 for i in range(24)]
PROMPT = [*WORD, *WORD[:4]]
SCRIPT = [*WORD[4:15], 33, *WORD[16:], *WORD[:9], 34, *WORD[10:], *WORD[:5], 35, *WORD[6:]]


@given(st.text("ab\u00e9", max_size=30), st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3), st.data())
def test_pieces_do_not_matter(text: str, strings: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stops, out = StopStrings(strings), ""
    for piece in pieces:
        out += stops.feed(piece)
        assert text.startswith(out)
        # Whatever has been given out cannot be part of a stop string any more.
        assert not any(s in out for s in strings)
    out += stops.finish()
    # A whole text: the string that is complete first ends it.
    ends = [text.find(s) + len(s) for s in strings if s in text]
    if not ends:
        assert (out, stops.hit) == (text, "")
    else:
        assert stops.hit in strings
        assert out == text[: text.find(stops.hit)]


def test_the_first_and_the_longest_wins() -> None:
    stops = StopStrings(["bc", "bcd", "d"])
    assert stops.feed("abcd") == "a"
    assert stops.hit == "bcd"
    assert stops.feed("more") == ""
    assert stops.finish() == ""


@pytest.mark.parametrize("strings", [[""], ["a", ""], "abc"])
def test_strings_that_make_no_sense(strings: list[str]) -> None:
    with pytest.raises(bmoe.UsageError, match="stop"):
        StopStrings(strings)


@pytest.mark.parametrize("spec", [DraftSpec(), WIDE])
def test_a_string_inside_an_accepted_group(spec: DraftSpec, tiny: Tiny, open_engine: OpenEngine) -> None:
    """The same end with drafts as without, and the engine goes on from the right place."""
    engine = open_engine(tiny("qwen3moe", "Q8_0"), "few", draft=spec)
    whole = engine.generate(PROMPT, max_tokens=60, script=SCRIPT, stop_at_end=False)
    texts = [t.text for t in whole]
    text = whole.result.text
    assert not spec.types or whole.result.spec.accepted > 0
    ends = 0
    for at in range(1, 40, 3):
        stop = text[at : at + 2]
        if len(stop) < 2:
            continue
        begins = text.find(stop)
        generation = engine.generate(PROMPT, max_tokens=60, script=SCRIPT, stop_at_end=False, stop=[stop])
        shown = "".join(t.text for t in generation)
        result = generation.result
        assert (result.stop, result.stop_string) == ("stop", stop)
        assert shown == result.text == text[:begins]
        # It ends with the token that completed the string.
        n = len(result.token_ids)
        assert result.token_ids == whole.result.token_ids[:n]
        assert stop in "".join(texts[:n])
        assert stop not in "".join(texts[: n - 1])
        ends += 1
    assert ends > 5
    never = engine.generate(PROMPT, max_tokens=60, script=SCRIPT, stop_at_end=False, stop=["\x00never\x00"])
    assert "".join(t.text for t in never) == text == never.result.text


def test_what_each_token_was_charged_adds_up(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"), "few", draft=WIDE)
    generation = engine.generate(PROMPT, max_tokens=60, script=SCRIPT, stop_at_end=False)
    tokens = list(generation)
    split = generation.result.flash_split
    for cause, n in split.bytes.items():
        assert sum(t.flash.get(cause, (0, 0))[0] for t in tokens) == n
        assert sum(t.flash.get(cause, (0, 0))[1] for t in tokens) == split.rereads[cause]
    assert split.bytes["rejected"] > 0
    assert split.bytes["accepted"] > 0
    assert tokens[0].flash.keys() == {"prefill"}
    assert [sum(n for n, _ in t.flash.values()) for t in tokens[1:]] == [t.stream.bytes for t in tokens[1:]]
