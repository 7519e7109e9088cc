"""Speculation on the demo model: a verify batch is not bit for bit the single-token run. What that changes."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator

import numpy as np
import pytest
from generating import generate

import bmoe
from bench.models.tiny import prompt_ids
from bmoe.speculation import DraftSpec, ModConfig, NgramConfig, draft_width, make_drafter
from bmoe.speculation.verify import Tokens

N = 150
# Logits. The widest that was seen: 0.088, with kernels for AVX2; below 0.05 with AVX-512 and AMX.
TIE = 0.15
CODE = inspect.getsource(textwrap)[:2400]
PROMPTS = {
    "copy": f"Repeat this file unchanged.\n{CODE}\n# again:\n",
    "code": 'def parse(text):\n    """Parse text.',
    "prose": "The following functions return",
}
SPECS = {
    "ngram 3": DraftSpec(("ngram",), policy="always", ngram=NgramConfig(n_max=3)),
    "ngram 16": DraftSpec(("ngram",), policy="always", ngram=NgramConfig(n_max=16)),
    "ngram-mod": DraftSpec(("ngram-mod",), policy="always", ngram_mod=ModConfig(6, 2, 32)),
    "adaptive": DraftSpec(("ngram",), ngram=NgramConfig(n_max=32)),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[bmoe.Engine]:
    """The demo model, with room for the widest batch of all."""
    with bmoe.Engine.open(threads=2, ctx=2048, draft=SPECS["ngram-mod"]) as engine:
        yield engine


def drafted(engine: bmoe.Engine, spec: DraftSpec, prompt: list[int]) -> bmoe.GenerationResult:
    engine.drafting.drafter, engine.drafting.width = make_drafter(spec), draft_width.make_draft_width(spec.policy)
    engine.sequence.context.clear()
    engine.sequence.ids.clear()
    return generate(engine, prompt, N)


def margin(engine: bmoe.Engine, prompt: list[int], text: list[int], a: int, b: int) -> float:
    """By how much plain decoding prefers token `a` to `b` after `text`, in logits, one token decoded at a time."""
    engine.drafting.drafter = make_drafter(DraftSpec())
    engine.sequence.context.clear()
    engine.sequence.ids.clear()
    generation = engine.generate(prompt, max_tokens=len(text) + 1, script=[*text, a], stop_at_end=False)
    for _ in generation:
        pass
    logits = engine.sequence.context.logits()
    assert logits[a] == logits.max(), "plain decoding chose it"
    return float(logits[a] - logits[b])


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", SPECS)
def test_accepted_is_argmax_and_what_differs_is_a_near_tie(
    engine: bmoe.Engine, name: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = engine.tokenize(PROMPTS[prompt])
    plain = drafted(engine, DraftSpec(), ids).token_ids

    batches: list[tuple[list[int], list[int]]] = []
    decode = engine.sequence.context.decode_each

    def watched(tokens: Tokens, *where: int) -> int:
        code = decode(tokens, *where)
        rows = [int(np.argmax(logits_of(engine, i))) for i in range(len(tokens))]
        batches.append((tokens.tolist(), rows))
        return code

    monkeypatch.setattr(engine.sequence.context, "decode_each", watched)
    result = drafted(engine, SPECS[name], ids)
    monkeypatch.undo()

    # Every accepted token is the argmax of the row before it, in the batch that verified it.
    accepted = 0
    for tokens, rows in batches:
        right = next((i for i, (t, r) in enumerate(zip(tokens[1:], rows, strict=False)) if t != r), len(tokens) - 1)
        accepted += right
    assert accepted == result.spec.accepted
    assert len(result.token_ids) == N
    if prompt == "copy" and name != "adaptive":
        assert accepted > 20

    at = next((i for i in range(N) if plain[i] != result.token_ids[i]), None)
    if at is None:
        return
    apart = margin(engine, ids, plain[:at], plain[at], result.token_ids[at])
    print(f"{name}, {prompt}: first differs at token {at}, a tie within {apart:.4f} logits")
    assert 0.0 <= apart < TIE


def logits_of(engine: bmoe.Engine, row: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    import ctypes

    from bmoe import llama

    address = llama.lib().llama_get_logits_ith(engine.sequence.context.handle, row)
    return np.ctypeslib.as_array((ctypes.c_float * engine.sequence.context.n_vocab).from_address(address))


def test_a_difference_that_is_no_tie_would_be_seen(engine: bmoe.Engine) -> None:
    ids = engine.tokenize(PROMPTS["code"])
    plain = drafted(engine, DraftSpec(), ids).token_ids
    wrong = prompt_ids(1, 5)[0]
    assert margin(engine, ids, plain[:3], plain[3], wrong) > TIE
