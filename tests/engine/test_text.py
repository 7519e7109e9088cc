"""The text of the tokens is the text of the result, however a generation ends; and what ends it by a token's id."""

from __future__ import annotations

from itertools import pairwise

import pytest
from conftest import OpenEngine, Tiny
from hypothesis import given
from hypothesis import strategies as st

import bmoe
from bench.models.tiny import SPECIALS, vocabulary
from bmoe import llama
from bmoe.engine.stop_strings import StopStrings
from bmoe.engine.text import TokenText
from bmoe.speculation import Choice, DraftSpec, ModConfig

WIDE = DraftSpec(("ngram-mod",), policy="always", ngram_mod=ModConfig(2, 1, 16))
WORD = [60 + 7 * i % 60 for i in range(24)]
PROMPT = [*WORD, *WORD[:4]]
SCRIPT = [*WORD[4:], *WORD]
SPECIAL = {name: len(vocabulary()) - len(SPECIALS) + i for i, name in enumerate(SPECIALS)}
START, END = SPECIAL["<|im_start|>"], SPECIAL["<|im_end|>"]


@given(
    st.text("ab\u00e9\u20ac", max_size=20).map(lambda s: s.encode()),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 60), max_size=8),
    st.integers(0, 3),
)
def test_pieces_are_the_text(data: bytes, strings: list[str], cuts: list[int], cut_off: int) -> None:
    """Tokens that end anywhere in a character, and a text that does."""
    data = data[: len(data) - cut_off]
    at = sorted({0, *(min(c, len(data)) for c in cuts), len(data)})
    text = TokenText(StopStrings(strings), {}, True)
    for i, (a, b) in enumerate(pairwise(at)):
        text.add(Choice(i, False, data[a:b]))
        if text.stop:
            break
    text.finish()
    whole = data.decode("utf-8", "replace")
    assert "".join(text.pieces) == text.text
    if text.stop:
        assert text.stop_string in strings
        assert text.text == whole[: whole.find(text.stop_string)]
    elif not any(s in whole for s in strings):
        assert text.text == whole


def ended(engine: bmoe.Engine, how: str) -> tuple[list[bmoe.Token], bmoe.GenerationResult]:
    """A generation that holds text back, as the beginning of a stop string, when it ends in this way."""
    text = "".join(llama.piece(engine.model, t).decode("latin-1") for t in SCRIPT)
    n, script, settings = 20, list(SCRIPT), {"stop_at_end": False}
    if how == "end":
        script[n - 1], settings = END, {"stop_at_end": True}
        held = text[n - 3 : n - 1]
    elif how == "special":
        script[n - 1], settings = START, {"stop_at_end": True}
        held = text[n - 3 : n - 1]
    elif how == "context":
        n = engine.sequence.context.n_ctx - len(PROMPT) + 1
        script = (SCRIPT * 20)[:n]
        held = "".join(llama.piece(engine.model, t).decode("latin-1") for t in script[-2:])
    elif how == "character":
        script[n - 1] = vocabulary().index("\u00c3")  # the first of two bytes
        held = ""
    else:
        held = text[n - 2 : n]
    stop = [*([held + "\x00"] if held else []), *(["<|im_start|>"] if how == "special" else [])]
    wanted = {"length": n, "character": n, "context": n + 50}.get(how, 64)
    script = [*script, *SCRIPT * 20]
    generation = engine.generate(PROMPT, max_tokens=min(wanted, len(script)), script=script, stop=stop, **settings)
    tokens = []
    for token in generation:
        tokens.append(token)
        if how == "cancelled" and len(tokens) == n:
            assert token.text == ""
            engine.cancel()
    return tokens, generation.result


@pytest.mark.parametrize("spec", [DraftSpec(), WIDE], ids=["plain", "drafts"])
@pytest.mark.parametrize(
    ("how", "stop"),
    [("length", "length"), ("end", "end"), ("special", "stop"), ("context", "length"), ("character", "length"),
     ("cancelled", "cancelled")],
)  # fmt: skip
def test_what_was_held_back_comes_at_the_end(
    how: str, stop: str, spec: DraftSpec, tiny: Tiny, open_engine: OpenEngine
) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"), "few", draft=spec, ctx=64 if how == "context" else 256)
    tokens, result = ended(engine, how)
    assert result.stop == stop
    assert "".join(t.text for t in tokens) == result.text
    if how == "cancelled" and not spec.types:
        *tokens, last = tokens
        assert (last.id, last.record, last.stream.bytes) == (-1, None, 0)
        assert len(last.text) == 2
    assert [t.id for t in tokens if t.id >= 0] == result.token_ids
    if how != "cancelled":
        # The last token has what was held, and what it has itself.
        assert len(tokens[-1].text) >= (1 if how == "character" else 2)
        assert tokens[-1].id >= 0
    if how == "character":
        assert result.text.endswith("\ufffd")


@pytest.mark.parametrize("spec", [DraftSpec(), WIDE], ids=["plain", "drafts"])
@pytest.mark.parametrize(("name", "at"), [("<|im_start|>", 7), ("<|im_end|>", 12), ("<|endoftext|>", 0)])
def test_the_name_of_a_special_token_stops(
    name: str, at: int, spec: DraftSpec, tiny: Tiny, open_engine: OpenEngine
) -> None:
    """It has no text in the output: it is found by its id, and the text before it is whole."""
    engine = open_engine(tiny("qwen3moe", "Q8_0"), "few", draft=spec)
    script = [*SCRIPT[:at], SPECIAL[name], *SCRIPT[at:]]
    generation = engine.generate(PROMPT, max_tokens=40, script=script, stop_at_end=False, stop=["\x00never", name])
    shown = "".join(t.text for t in generation)
    result = generation.result
    assert (result.stop, result.stop_string) == ("stop", name)
    assert result.token_ids == script[: at + 1]
    plain = engine.generate(PROMPT, max_tokens=max(at, 1), script=script, stop_at_end=False)
    assert shown == result.text == ("".join(t.text for t in plain) if at else "")
    # Without the string nothing stops there.
    other = engine.generate(PROMPT, max_tokens=40, script=script, stop_at_end=False, stop=["\x00never"])
    assert len(list(other)) == 40


def test_only_the_whole_name_of_a_special_token_is_one(tiny: Tiny, open_engine: OpenEngine) -> None:
    model = open_engine(tiny("qwen3moe", "Q8_0"), "few").model
    assert {name: llama.special_token(model, name) for name in SPECIALS} == SPECIAL
    for text in ("", "a", "th", "<|im_end|>x", "<|im_end", "<|im_end|><|im_end|>", " <|im_end|>", "\ud800"):
        assert llama.special_token(model, text) is None


def test_an_end_token_is_the_end_before_it_is_a_stop_string(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"), "few")
    generation = engine.generate(PROMPT, max_tokens=9, script=[*SCRIPT[:4], END, *SCRIPT], stop=["<|im_end|>"])
    list(generation)
    assert generation.result.stop == "end"
