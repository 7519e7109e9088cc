"""Draws: another text each time, and the same again with the seed that was said."""

from __future__ import annotations

import pytest
from conftest import OpenEngine, Tiny

import bmoe
from bench.models.tiny import prompt_ids
from bmoe.engine.config import MAX_SEED

PROMPT = prompt_ids(12, 5)


def drawn(engine: bmoe.Engine, seed: int | None = None) -> bmoe.GenerationResult:
    generation = engine.generate(PROMPT, max_tokens=24, sampling=bmoe.Sampling(1.5, seed=seed), stop_at_end=False)
    list(generation)
    return generation.result


def test_without_a_seed_one_is_drawn_and_said(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"))
    results = [drawn(engine) for _ in range(4)]
    seeds = [r.seed for r in results]
    assert len(set(seeds)) == 4
    assert all(seed is not None and 0 <= seed <= MAX_SEED for seed in seeds)
    assert len({tuple(r.token_ids) for r in results}) == 4
    for result in results:
        assert drawn(engine, result.seed).token_ids == result.token_ids


def test_a_given_seed_is_kept(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"))
    first, again, other = drawn(engine, 5), drawn(engine, 5), drawn(engine, 6)
    assert first.seed == again.seed == 5
    assert first.token_ids == again.token_ids != other.token_ids


def test_greedy_draws_nothing(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"))
    generation = engine.generate(PROMPT, max_tokens=4, stop_at_end=False)
    list(generation)
    assert generation.result.seed is None
    assert generation.request.sampling.seed is None


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1, 1 << 32])
def test_a_seed_that_llama_cpp_would_not_keep_is_refused(seed: int) -> None:
    """2^32 - 1 is its word for any: a run could not be repeated."""
    with pytest.raises(bmoe.UsageError, match="--seed"):
        bmoe.Sampling(1.0, seed=seed)
