"""The cache's index against plain Python, alone and inside the engine."""

from __future__ import annotations

from itertools import count
from unittest.mock import patch

import pytest
from conftest import OpenEngine, Tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_cache import PlainCache
from reference_admission import PlainVotes

from bench.models.tiny import prompt_ids
from bench.reference import Resident, Run, drive
from bmoe.speculation import DraftSpec
from bmoe.streamer import ExpertCache

N_EXPERT = 6

Step = tuple[int, list[int]] | None
"""A layer and the experts it routes; None forgets everything."""


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[int], list[Step]]:
    """Classes of the layers, slots of the classes, and what is asked for."""
    class_slots = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    layer_class = draw(st.lists(st.integers(0, len(class_slots) - 1), min_size=1, max_size=4))
    routed = st.tuples(
        st.integers(0, len(layer_class) - 1), st.lists(st.integers(0, N_EXPERT - 1), min_size=1, max_size=N_EXPERT)
    )
    steps: list[Step] = draw(st.lists(st.one_of(routed, routed, routed, routed, st.none()), max_size=60))
    return layer_class, class_slots, steps


@given(histories())
@settings(max_examples=300, deadline=None)
def test_the_index_is_a_plain_lru(history: tuple[list[int], list[int], list[Step]]) -> None:
    layer_class, class_slots, steps = history
    cache = ExpertCache([N_EXPERT] * len(layer_class), layer_class, class_slots, "lru")
    plain = PlainCache(layer_class, class_slots)
    for epoch, step in enumerate(steps):
        if step is None:
            cache.clear()
            plain.clear()
        else:
            layer, experts = step
            assert cache.access(layer, experts, epoch) == plain.batch(layer, [experts])
        cache.check()
        assert cache.counters() == (plain.hits, plain.misses, plain.evictions, plain.rereads)
        for layer in range(len(layer_class)):
            assert cache.resident(layer) == plain.resident(layer)
        assert cache.n_resident == sum(len(slots) for slots in plain.slots)
    assert cache.n_slots == sum(class_slots)


def test_least_recently_used_goes_first() -> None:
    cache = ExpertCache([4], [0], [2], "lru")
    epoch = count()
    for expert in (0, 1, 0, 2):
        cache.access(0, [expert], next(epoch))
    assert cache.resident(0) == [0, 2]
    assert cache.access(0, [0, 1], next(epoch)) == ([0], [1])
    assert cache.resident(0) == [0, 1]
    assert cache.counters() == (2, 4, 2, 1)


@pytest.mark.parametrize("policy", ["lru", "votes"])
def test_no_expert_of_a_token_evicts_another_of_it(policy: str) -> None:
    cache = ExpertCache([8], [0], [3], policy)
    cache.access(0, [5], 0)
    assert cache.access(0, [0, 1, 2, 3, 4, 5], 1) == ([5], [0, 1, 2, 3, 4])
    assert cache.resident(0) == [0, 1, 5]
    assert cache.counters() == (1, 6, 0, 0)


def test_a_token_is_as_recent_as_its_use_not_as_its_reads() -> None:
    """Where one of a token's experts has to go later, it is the last of its list, whether it was read or not."""
    for resident in ([], [0], [1], [0, 1]):
        cache = ExpertCache([8], [0], [2], "lru")
        if resident:
            cache.access(0, resident, 0)
        cache.access(0, [0, 1], 1)
        cache.access(0, [7], 2)
        assert cache.resident(0) == [0, 7], resident


def test_classes_do_not_share_slots() -> None:
    cache = ExpertCache([4, 4], [1, 0], [1, 2])
    cache.access(0, [0, 1], 0)
    cache.access(1, [0, 1], 1)
    assert (cache.resident(0), cache.resident(1)) == ([0, 1], [0])
    assert cache.n_resident == 3


def test_repeated_experts_count_once() -> None:
    cache = ExpertCache([4], [0], [4])
    assert cache.access(0, [2, 2, 1, 2], 0) == ([], [2, 1])
    assert cache.counters() == (0, 2, 0, 0)


@pytest.mark.parametrize(
    ("n_expert", "layer_class", "class_slots"),
    [([4, 4], [0], [1]), ([4], [1], [1]), ([4], [-1], [1]), ([4], [0], [-1]), ([4], [0], [])],
)
def test_what_does_not_fit_together_is_refused(
    n_expert: list[int], layer_class: list[int], class_slots: list[int]
) -> None:
    with pytest.raises(ValueError, match="class"):
        ExpertCache(n_expert, layer_class, class_slots)


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (1, 0), (0, -1), (0, 4)])
def test_out_of_range_is_refused(layer: int, expert: int) -> None:
    cache = ExpertCache([4], [0], [2])
    with pytest.raises(ValueError, match="no "):
        cache.access(layer, [expert], 0)
    cache.check()
    assert cache.n_resident == 0


# ---- the engine keeps to the same policy ----------------------------------------------------------


def _routed(path: object, ubatch: int) -> tuple[list[int], Run]:
    prompt = prompt_ids(100, seed=1)
    with Resident(path, ubatch=ubatch, record=True) as model:  # type: ignore[arg-type]
        return prompt, model.generate(prompt, 24)


@pytest.mark.parametrize("policy", ["lru", "votes"])
@pytest.mark.parametrize("ubatch", [1, 16])
@pytest.mark.parametrize(("arch", "quant"), [("qwen3moe", "mixed"), ("glm4moe", "Q8_0"), ("gpt-oss", None)])
def test_counters_follow_from_the_routes(
    arch: str, quant: str | None, ubatch: int, policy: str, tiny: Tiny, open_engine: OpenEngine
) -> None:
    """Hits, misses, evictions, bytes: all of it follows from what llama.cpp routes and the plan of the slots.

    Batch by batch and layer by layer: a wide batch reads each expert once and admits its last tokens' experts.
    """
    path = tiny(arch, quant)
    prompt, expected = _routed(path, ubatch)
    for cache in ("off", 5, 9, 12, "all"):
        engine = open_engine(path, cache, overlap=cache in (5, "all"), ubatch=ubatch, cache_policy=policy)
        run, _ = drive(engine, prompt, 24)
        assert run.tokens == expected.tokens
        index = {layer.block: i for i, layer in enumerate(engine.layers)}
        plan = engine.plan
        plain: PlainCache | PlainVotes = PlainCache(plan.layer_class, plan.class_slots, plan.quotas)
        if policy == "votes":
            n_expert = engine.layers[0].n_expert
            plain = PlainVotes(plan.layer_class, plan.class_slots, n_expert, engine.n_used, plan.quotas)
        n_bytes = n_reads = n_tokens = 0
        for block, rows in expected.routes:
            layer = index[f"blk.{block}"]
            if layer == 0 and isinstance(plain, PlainVotes):
                n_tokens += len(rows)
                plain.prompt(len(prompt) - n_tokens if n_tokens <= len(prompt) else -1)
            _, misses = plain.batch(layer, rows)
            n_bytes += len(misses) * engine.layers[layer].expert_bytes
            n_reads += len(misses) * len(engine.layers[layer].tensors)
        c = engine.counters()
        assert c.plans == len(expected.routes)
        assert c.routed == sum(len(row) for _, rows in expected.routes for row in rows)
        assert (c.hits, c.misses) == (plain.hits, plain.misses), cache
        assert (c.evictions, c.rereads, c.streamed) == (plain.evictions, plain.rereads, plain.streamed)
        assert (c.bytes, c.reads) == (n_bytes, n_reads)
        assert engine.cache is not None
        for i in range(len(engine.layers)):
            assert engine.cache.resident(i) == plain.resident(i)


@pytest.mark.parametrize("policy", ["lru", "votes"])
def test_a_replay_of_recorded_routes_is_what_the_engine_did(policy: str, tiny: Tiny, open_engine: OpenEngine) -> None:
    """`access` follows the same sequence as the engine does for a token: a replay predicts a run."""
    path = tiny("qwen3moe", "Q8_0")
    prompt, expected = _routed(path, 1)
    engine = open_engine(path, 8, ubatch=1, cache_policy=policy)
    drive(engine, prompt, 24)
    plan = engine.plan
    replay = ExpertCache(
        [layer.n_expert for layer in engine.layers],
        list(plan.layer_class),
        list(plan.class_slots),
        policy,
        engine.n_used,
    )
    n_tokens = 0
    for epoch, (layer, rows) in enumerate(expected.routes):
        (row,) = rows
        n_tokens += layer == 0
        replay.prompt(max(-1, len(prompt) - n_tokens))
        replay.access(layer, row, epoch)
    assert engine.cache is not None
    assert replay.counters() == engine.cache.counters()
    assert [replay.resident(i) for i in range(3)] == [engine.cache.resident(i) for i in range(3)]


def test_after_a_prefill_the_last_tokens_experts_are_the_warm_ones(tiny: Tiny, open_engine: OpenEngine) -> None:
    """They are there, and they are the last to go: reading other experts first gives up older ones."""
    path = tiny("qwen3moe", "Q8_0", n_expert=16)
    prompt = prompt_ids(64, seed=5)
    with Resident(path, ubatch=32, record=True) as model:
        routes = model.generate(prompt, 1).routes
    engine = open_engine(path, 18, ubatch=32, cache_policy="lru")
    drive(engine, prompt, 1)
    assert engine.cache is not None
    last = {layer: rows[-1] for layer, rows in routes}
    for layer, experts in last.items():
        assert set(experts) <= set(engine.cache.resident(layer))
    assert engine.plan.quotas == (6, 6, 6)
    # Layer 0 is least recent as a whole; of its six, the experts of its last token go last.
    others = [e for e in range(16) if e not in engine.cache.resident(0)]
    engine.cache.access(0, others[:4], 1 << 20)
    assert set(last[0]) <= set(engine.cache.resident(0))


@pytest.mark.parametrize(("slots", "overlap"), [(1, True), (2, False), (4, True)])
def test_fewer_slots_than_a_token_routes(slots: int, overlap: bool, tiny: Tiny, open_engine: OpenEngine) -> None:
    """It runs, with a line of advice, and what it gives is what the whole model gives."""
    path = tiny("qwen3moe", "Q8_0")
    prompt, expected = _routed(path, 16)
    engine = open_engine(path, slots, overlap=overlap, ubatch=16)
    run, result = drive(engine, prompt, 24)
    assert run.tokens == expected.tokens
    assert engine.cache is not None
    assert engine.cache.n_slots == engine.cache.n_resident == slots
    assert any("one token routes: expect" in note for note in engine.notes), engine.notes
    assert result.decode.hits > 0
    assert engine.config.cache_policy == "votes"


def test_rejected_drafts_are_taken_out_of_the_cache(tiny: Tiny, open_engine: OpenEngine) -> None:
    """The cache of a run with drafts that are rejected is told of each: as many tokens vote as are in the text."""
    path = tiny("qwen3moe", "Q8_0")
    engine = open_engine(path, 8, draft=DraftSpec(types=("ngram",), policy="always"))
    assert engine.cache is not None
    with patch.object(engine.sequence.graphs, "cache", wraps=engine.cache) as spy:
        _, result = drive(engine, prompt_ids(20, seed=3) * 3, 40)
    rejected = [call.args[0] for call in spy.reject.call_args_list]
    assert rejected
    assert sum(rejected) == result.spec.drafted - result.spec.accepted
    assert spy.prompt.call_args_list[0].args == (0,)
    assert spy.prompt.call_args_list[-1].args == (-1,)
