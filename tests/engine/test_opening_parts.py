"""The parts that an engine is opened from, each by itself; `inspect` uses the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny
from mtp_heads import TinyMtp

import bmoe
from bmoe.engine.cache_opening import Grant, OpenCache, open_cache, start_dropping
from bmoe.engine.config import EngineConfig
from bmoe.engine.opening import (
    Parts,
    Source,
    open_contexts,
    part_tensors,
    read_source,
    refused_direct,
    stream_layout,
)
from bmoe.engine.planning import cache_sizes, context_plan
from bmoe.engine.request import Request
from bmoe.experts import CacheDecision, ModelSizes, SlotPool, plan_slots
from bmoe.llama import BufferSizes
from bmoe.speculation import DraftSpec
from bmoe.streamer import Lanes, Streamer

PLAIN = EngineConfig(threads=1, ctx=256, ubatch=32)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def loaded(path: Path, config: EngineConfig = PLAIN) -> tuple[Source, Parts]:
    source = read_source(path, config)
    model = source.load()
    names = set(model.tensors)
    model.close()
    return source, part_tensors(source, names)


# ---- the file -------------------------------------------------------------------------------------


def test_a_source_has_what_the_settings_make_of_the_file(tiny: Tiny) -> None:
    path = tiny("qwen3moe", "Q8_0")
    plain, routed = read_source(path, PLAIN), read_source(path, replace(PLAIN, n_expert_used=1))
    assert (plain.overrides, plain.n_heads) == ({}, 0)
    assert routed.overrides == {"qwen3moe.expert_used_count": 1}
    assert (routed.n_used, plain.n_used) == (1, plain.file.number("expert_used_count"))
    with pytest.raises(bmoe.UsageError, match="no multi-token-prediction head"):
        read_source(path, replace(PLAIN, draft=DraftSpec(types=("mtp",))))


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe", "llama"])
def test_every_tensor_is_in_one_part(arch: str, tiny: Tiny) -> None:
    source, parts = loaded(tiny(arch, "Q8_0"))
    dense, experts = ({t.name for t in part} for part in (parts.dense, parts.experts))
    assert dense | experts == {t.name for t in source.file.tensors}
    assert dense & experts == set()
    assert experts == {t.name for layer in parts.layers for t in layer.tensors}
    assert bool(experts) == (arch != "llama")
    assert parts.dense_bytes >= sum(t.nbytes for t in parts.dense)


def test_a_tensor_that_the_file_does_not_have_is_refused(tiny: Tiny) -> None:
    source = read_source(tiny("qwen3moe", "Q8_0"), PLAIN)
    names = [t.name for t in source.file.tensors]
    with pytest.raises(bmoe.ModelError, match=rf"{len(names) + 1} tensors, {len(names)} are in the file \(invented\)"):
        part_tensors(source, [*names, "invented"])


def test_files_that_refuse_direct_reads_are_named(tiny: Tiny) -> None:
    path = tiny("qwen3moe", "Q8_0")
    source, parts = loaded(path)
    for direct, refused in ((True, []), (False, [path])):
        lanes = Lanes([str(path)], 1, direct)
        try:
            assert refused_direct(source, parts.layers, lanes) == (refused if lanes.direct == direct else [path])
            assert refused_direct(source, (), lanes) == []
        finally:
            lanes.close()


# ---- the contexts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])
@pytest.mark.parametrize("draft", [DraftSpec(), DraftSpec(types=("ngram-mod",))], ids=["plain", "drafts"])
def test_a_dry_model_says_what_a_real_one_takes(arch: str, draft: DraftSpec, tiny: Tiny, stack: ExitStack) -> None:
    """And the longest draft is bounded by the snapshots that a recurrent state goes back to."""
    config = replace(PLAIN, draft=draft, rs_snapshots=5)
    source = read_source(tiny(arch, "F32"), config)
    found = []
    for dry in (False, True):
        model = source.load(dry=dry)
        stack.callback(model.close)
        if not dry:  # its tensors would have to be placed before a graph runs, and none does
            assert model.tensors
        shape = context_plan(config, source.file, model.n_vocab)
        found.append(open_contexts(stack, model, shape, 0, {"n_threads": 1}, guarded=not dry))
    real, dry_one = found
    assert dry_one.buffers == real.buffers
    assert real.longest == dry_one.longest
    most = min(draft.longest(), config.ubatch - 1)
    assert real.longest == (min(most, 5) if real.target.recurrent else most)
    assert (real.head, real.rows) == (None, None)


def test_a_head_is_opened_beside_its_target(tiny_mtp: TinyMtp, stack: ExitStack) -> None:
    config = replace(PLAIN, draft=DraftSpec(types=("mtp",), draft=2))
    source = read_source(tiny_mtp("glm4moe"), config)
    assert source.n_heads == 1
    model = source.load(dry=True)
    stack.callback(model.close)
    shape = context_plan(config, source.file, model.n_vocab)
    with_head = open_contexts(stack, model, shape, 1, {"n_threads": 1}, guarded=False)
    without = open_contexts(stack, model, shape, 0, {"n_threads": 1}, guarded=False)
    assert with_head.head is not None
    assert with_head.rows is not None
    extra = BufferSizes(0, 0, with_head.rows.nbytes) + with_head.head.buffers
    assert with_head.buffers == without.buffers + extra


# ---- the cache ------------------------------------------------------------------------------------


def test_slots_spares_and_ring_share_the_pool_without_overlap(tiny: Tiny) -> None:
    _, parts = loaded(tiny("qwen3moe", "Q8_0"))
    plan = plan_slots(parts.layers, 4 << 20, 0, 3)
    pool = SlotPool(plan)
    try:
        at = [c[0] for c in pool.classes()]
        for address, slots, spares, stride in pool.classes():
            assert (slots, spares, stride) == (plan.class_slots[0], plan.class_spares[0], plan.class_stride[0])
            assert pool.ring_address == address + (slots + spares) * stride
        assert at == sorted(at)
        assert pool.ring_address + plan.n_ring * plan.ring_stride - at[0] <= plan.total_bytes
    finally:
        pool.close()


def opened(path: Path, stack: ExitStack, grant: Grant, **settings: Any) -> tuple[OpenCache, Streamer, list[str]]:
    """A cache in service without an engine or a context around it."""
    config = replace(PLAIN, **settings)
    source = read_source(path, config)
    model = source.load()
    stack.callback(model.close)
    parts = part_tensors(source, model.tensors)
    lanes = Lanes([str(path)], 2)
    stack.callback(lanes.close)
    streamer = Streamer(lanes, stream_layout(parts.layers, model), 1, config.overlap)
    stack.callback(streamer.close)
    sizes = cache_sizes(parts.layers, source.n_used, parts.dense_bytes, BufferSizes(0, 0, 0), 0)
    notes: list[str] = []
    cache = open_cache(stack, config, parts.layers, source.n_used, sizes, resident=77, overhead=0, streamer=streamer,
                       lanes=lanes, grant=grant, note=notes.append)  # fmt: skip
    return cache, streamer, notes


def granting(budget: int, seen: list[int]) -> Grant:
    def grant(request: object, sizes: ModelSizes, facts: object, resident: int) -> CacheDecision:
        seen.append(resident)
        return CacheDecision("fixed", budget, sizes)

    return grant


def test_a_cache_is_cut_from_what_is_granted(tiny: Tiny, stack: ExitStack) -> None:
    seen: list[int] = []
    cache, streamer, _ = opened(tiny("qwen3moe", "Q8_0"), stack, granting(6 << 20, seen))
    assert seen == [77]
    assert cache.decision.budget == 6 << 20
    assert cache.index.n_slots == sum(cache.plan.class_slots) > 0
    assert streamer.counters()["plans"] == 0


def test_what_needs_slots_is_refused_without(tiny: Tiny, stack: ExitStack) -> None:
    path = tiny("qwen3moe", "Q8_0")
    with pytest.raises(bmoe.UsageError, match="--prefetch needs a cache, and 0 MiB hold no expert"):
        opened(path, stack, granting(0, []), prefetch="next-layer", overlap=True)
    cache, streamer, notes = opened(path, stack, granting(0, []))
    with pytest.raises(bmoe.UsageError, match="--drop-cold-experts needs a cache, and 0 MiB"):
        start_dropping(0.5, cache, 2, streamer, path, notes.append)
    with pytest.raises(bmoe.UsageError, match="has no routed experts"):
        start_dropping(0.5, None, 2, streamer, path, notes.append)


# ---- what is asked --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"ids": []}, "the prompt is empty"),
        ({"ids": [1], "max_tokens": -1}, "--n-predict: -1"),
        ({"ids": [1], "max_tokens": 3, "script": [1, 2]}, "the script has 2 tokens, 3 are asked for"),
        ({"ids": [1] * 9}, "the prompt has 9 tokens, the context holds 8: use -c 265 or more"),
        ({"ids": [1, 50]}, "token id 50 is not in the vocabulary of 50"),
        ({"ids": [1, -1]}, "token id -1 is not in"),
        ({"ids": [1], "sampling": bmoe.Sampling(0.5)}, "--temp 0.5: speculation needs greedy decoding"),
    ],
)
def test_a_request_is_checked_without_a_model(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(bmoe.UsageError, match=says):
        Request(**asked).check(8, 50, drafts=True)


def test_a_request_that_fits_passes() -> None:
    Request([1, 49], sampling=bmoe.Sampling(0.5)).check(8, 50, drafts=False)
    Request([1] * 8, 0, script=[]).check(8, 50, drafts=True)
