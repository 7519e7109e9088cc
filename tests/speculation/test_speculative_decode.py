"""Speculation on real (tiny) models: the same tokens as plain decoding, state and accounts included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from conftest import OpenEngine, Tiny

import bmoe
from bench.models.tiny import prompt_ids
from bmoe.speculation import DraftSpec, MapConfig, ModConfig, make_drafter
from bmoe.speculation.verify import Tokens

# What is drafted must depend on the text alone: counters are compared exactly.
WIDE = DraftSpec(types=("ngram-mod",), policy="always", ngram_mod=ModConfig(n_match=2, n_min=1, n_max=16))
N = 40


class Scripted:
    """Drafts the tokens of `answer`, `size` at a time, every fourth wrong, from its second token if it has one."""

    name = "scripted"

    def __init__(self, prompt_len: int, answer: Sequence[int], size: int) -> None:
        self.prompt_len, self.answer, self.size = prompt_len, list(answer), size
        self.drafts = self.accepted = 0

    def begin(self, prompt: Tokens) -> None:
        pass

    def draft(self, history: Tokens, n_max: int | None = None) -> Tokens:
        at = len(history) - self.prompt_len
        draft = self.answer[at : at + min(self.size, n_max if n_max is not None else self.size)]
        self.drafts += 1
        if self.drafts % 4 == 0:
            right = min(1, len(draft) - 1)
            draft = [*draft[:right], *((t + 1) % 256 for t in draft[right:])]
        return np.array(draft, np.int32)

    winner = name
    matched = 0

    def trim(self, n: int) -> None:
        raise AssertionError("the pace here is Always")

    def accept(self, n_accepted: int) -> None:
        self.accepted += n_accepted


def ids(engine: bmoe.Engine, prompt: Sequence[int], n: int = N, **settings: object) -> list[int]:
    generation = engine.generate(prompt, max_tokens=n, stop_at_end=False, **settings)  # type: ignore[arg-type]
    return [t.id for t in generation]


@pytest.mark.parametrize("arch", ["qwen3moe", "glm4moe", "gemma4", "gpt-oss", "deepseek2", "qwen35moe", "llama"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_speculated_equals_plain(arch: str, size: int, tiny: Tiny, open_engine: OpenEngine) -> None:
    """Accepted and rejected drafts leave the model where plain decoding would: tokens, and logits afterwards."""
    path, prompt = tiny(arch, "F32"), prompt_ids(24, 3)
    plain = open_engine(path, "few", ubatch=32)
    expected = ids(plain, prompt)
    logits = plain.sequence.context.logits().copy()
    engine = open_engine(path, "few", ubatch=32, draft=WIDE)
    engine.drafting.drafter = drafter = Scripted(len(prompt), expected, size)  # type: ignore[assignment]
    generation = engine.generate(prompt, max_tokens=N, stop_at_end=False)
    assert [t.id for t in generation] == expected
    r = generation.result
    assert r.spec.drafted > r.spec.accepted > 0, "some drafts must be right and some wrong"
    assert r.spec.accepted == drafter.accepted
    assert r.spec.recoveries == 0
    assert r.spec.decodes < N - 1
    assert r.spec.confirmed == N - 1
    # The state is the plain run's: the same next token's logits, up to the rounding of wider batches (gemma4's
    # activation goes through a half-precision table). A wrong state moves them by more than 1.
    np.testing.assert_allclose(engine.sequence.context.logits(), logits, atol=0.03, rtol=0)
    if engine.layers:
        assert r.flash_split.total == r.prefill.bytes + r.decode.bytes
        assert sum(r.flash_split.bytes[c] for c in ("base", "accepted", "rejected")) == r.decode.bytes
        assert sum(r.flash_split.rereads.values()) <= r.flash_split.total


def test_a_recurrent_model_drafts_no_further_than_it_can_go_back(tiny: Tiny, open_engine: OpenEngine) -> None:
    path, prompt = tiny("qwen35moe", "F32"), prompt_ids(24, 3)
    expected = ids(open_engine(path), prompt)
    for snapshots in (0, 2, 5):
        engine = open_engine(path, draft=WIDE, rs_snapshots=snapshots)
        assert engine.sequence.context.recurrent
        assert engine.drafting.longest == snapshots
        engine.drafting.drafter = Scripted(len(prompt), expected, 12)  # type: ignore[assignment]
        generation = engine.generate(prompt, max_tokens=N, stop_at_end=False)
        assert [t.id for t in generation] == expected
        assert generation.result.spec.drafted <= snapshots * generation.result.spec.drafted_steps
        assert (generation.result.spec.drafted > 0) == (snapshots > 0)


def test_a_memory_that_refuses_is_decoded_again(
    tiny: Tiny, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rejected tail cannot be taken back the output is the same, and the cost is counted and named."""
    path, prompt = tiny("qwen3moe", "F32"), prompt_ids(24, 3)
    expected = ids(open_engine(path), prompt)
    engine = open_engine(path, "few", draft=WIDE)
    engine.drafting.drafter = Scripted(len(prompt), expected, 6)  # type: ignore[assignment]
    monkeypatch.setattr(engine.sequence.context, "truncate", lambda n: False)
    generation = engine.generate(prompt, max_tokens=N, stop_at_end=False)
    assert [t.id for t in generation] == expected
    spec = generation.result.spec
    assert spec.recoveries > 0
    assert spec.recovery_s > 0
    assert generation.result.flash_split.bytes["recovery"] == spec.recovery_bytes
    assert generation.result.flash_split.total == generation.result.prefill.bytes + generation.result.decode.bytes
    assert sum("decoded again" in note for note in engine.notes) == 1


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 11])
def test_the_limit_is_reached_inside_a_group(n: int, tiny: Tiny, open_engine: OpenEngine) -> None:
    path, prompt = tiny("qwen3moe", "F32"), prompt_ids(24, 3)
    expected = ids(open_engine(path), prompt)
    engine = open_engine(path, draft=WIDE)
    engine.drafting.drafter = Scripted(len(prompt), expected, 5)  # type: ignore[assignment]
    generation = engine.generate(prompt, max_tokens=n, stop_at_end=False)
    assert [t.id for t in generation] == expected[:n]
    assert generation.result.stop == "length"
    assert len(engine.sequence.ids) == len(prompt) + n - 1, "nothing beyond what plain decoding computes"


def test_the_context_fills_inside_a_group(tiny: Tiny, open_engine: OpenEngine) -> None:
    path, prompt = tiny("qwen3moe", "F32"), prompt_ids(230, 3)
    plain = open_engine(path)
    expected = ids(plain, prompt, 100)
    assert len(expected) == plain.sequence.context.n_ctx - len(prompt) + 1
    engine = open_engine(path, draft=WIDE)
    engine.drafting.drafter = Scripted(len(prompt), expected, 7)  # type: ignore[assignment]
    assert ids(engine, prompt, 100) == expected


def test_an_end_token_inside_a_group_ends_it(
    tiny: Tiny, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script whose eighth token ends a generation, drafted in groups that reach past it."""
    path, prompt = tiny("qwen3moe", "F32"), prompt_ids(24, 3)
    engine = open_engine(path, draft=WIDE)
    end = next(t for t in range(engine.sequence.context.n_vocab) if bmoe.llama.is_end(engine.model, t))
    script = [*range(60, 67), end, *range(70, 100)]
    engine.drafting.drafter = Scripted(len(prompt), script, 6)  # type: ignore[assignment]
    generation = engine.generate(prompt, max_tokens=len(script), script=script)
    assert [t.id for t in generation] == script[:8]
    assert generation.result.stop == "end"
    # The next generation is not led astray by what was decoded past the end.
    engine.drafting.drafter = make_drafter(DraftSpec())
    assert ids(engine, prompt, 10) == ids(open_engine(path), prompt, 10)


def test_real_drafters_on_text_that_repeats(tiny: Tiny, open_engine: OpenEngine) -> None:
    path = tiny("qwen3moe", "F32")
    phrase = prompt_ids(30, 5)
    prompt, script = phrase * 2, phrase * 3
    for spec in (
        DraftSpec(types=("ngram",), policy="always"),
        DraftSpec(types=("ngram-simple",), policy="always", ngram_simple=MapConfig(size_n=4, size_m=16)),
        WIDE,
    ):
        engine = open_engine(path, "few", draft=spec)
        generation = engine.generate(prompt, max_tokens=len(script), script=script, stop_at_end=False)
        assert [t.id for t in generation] == script
        result = generation.result
        assert result.spec.acceptance is not None
        assert result.spec.acceptance > 0.8
        assert result.spec.tokens_per_decode is not None
        assert result.spec.tokens_per_decode > 2


def test_sampling_and_speculation_exclude_each_other(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "F32"), draft=WIDE)
    with pytest.raises(bmoe.UsageError, match="greedy"):
        engine.generate([1, 2, 3], sampling=bmoe.Sampling(temp=0.5))
