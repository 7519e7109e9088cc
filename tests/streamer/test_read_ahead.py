"""Reading ahead: output that does not depend on it, guesses that are the router's, bytes that add up."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import OpenEngine, Resident, Tiny
from gguf_edit import Gguf

import bmoe
from bench.models.tiny import ARCHES, prompt_ids
from bench.reference import Resident as ResidentModel
from bench.reference import differences, drive
from bmoe.experts import slots
from bmoe.gguf.file import expert_layers, open_model_file
from bmoe.speculation import DraftSpec, ModConfig

MOE = tuple(arch for arch in ARCHES if arch != "llama")
LONG, OTHER = prompt_ids(150, seed=1), prompt_ids(20, seed=2)
STEPS = 24
SHAPE = {"n_layer": 4, "n_expert": 16}


def read_ahead(counters: Any) -> None:
    """What holds whatever was guessed."""
    assert counters.misses >= counters.guess_hits


@pytest.mark.parametrize("arch", MOE)
@pytest.mark.parametrize(("lanes", "threads", "cache"), [(1, 1, "few"), (4, 2, "few"), (4, 1, 14)])
def test_output_does_not_depend_on_it(
    arch: str, lanes: int, threads: int, cache: Any, tiny: Tiny, resident: Resident, open_engine: OpenEngine
) -> None:
    path = tiny(arch, "Q8_0", **SHAPE)
    settings = {"threads": threads, "ubatch": 16}
    expected = resident(path, [LONG, OTHER], STEPS, **settings)
    engine = open_engine(path, cache, overlap=True, io_threads=lanes, prefetch="next-layer", **settings)
    for prompt, run in zip([LONG, OTHER], expected, strict=True):
        got, result = drive(engine, prompt, STEPS)
        assert not differences(got, run)
        assert result.flash_split.total == result.prefill.bytes + result.decode.bytes
        assert sum(result.flash_split.rereads.values()) <= result.flash_split.total
        read_ahead(result.decode)


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "qwen35moe"])
@pytest.mark.parametrize("shift", [1, 5])
def test_a_guess_that_lies_changes_bytes_and_nothing_else(
    arch: str, shift: int, tiny: Tiny, resident: Resident, open_engine: OpenEngine
) -> None:
    path = tiny(arch, "Q8_0", **SHAPE)
    expected = resident(path, [OTHER], STEPS, threads=1, ubatch=16)
    engine = open_engine(path, "few", overlap=True, prefetch="next-layer", ubatch=16)
    engine.streamer.lie(shift)
    got, result = drive(engine, OTHER, STEPS)
    assert not differences(got, expected[0])
    assert result.flash_split.total == result.prefill.bytes + result.decode.bytes
    assert result.flash_split.bytes["prefetch_wasted"] > 0
    plain = open_engine(path, "few", overlap=True, ubatch=16)
    _, without = drive(plain, OTHER, STEPS)
    assert result.prefill.bytes + result.decode.bytes > without.prefill.bytes + without.decode.bytes


@pytest.mark.parametrize("arch", MOE)
def test_the_router_run_again_is_the_router(arch: str, tiny: Tiny, open_engine: OpenEngine) -> None:
    """The control: on its own input, each router chooses what the graph chose. It must read 100 %."""
    engine = open_engine(tiny(arch, "Q8_0", **SHAPE), "few", overlap=True, prefetch="next-layer", predict_log=True)
    drive(engine, OTHER, STEPS)
    unpredictable = engine.streamer.unpredictable()
    for i, score in enumerate(engine.streamer.scores()):
        right, every = score["control"]
        if i not in unpredictable:
            assert every >= (STEPS - 1) * engine.n_used
            assert right == every
        if i and i not in unpredictable and i - 1 not in unpredictable:
            assert score["next-layer"][1] > 0
    if arch in ("qwen3moe", "qwen2moe", "glm4moe", "deepseek2", "gpt-oss"):
        assert not unpredictable


def test_groups_of_experts(tmp_path: Path, tiny: Tiny, open_engine: OpenEngine, resident: Resident) -> None:
    """Only experts of the best groups can be chosen."""
    gguf = Gguf(tiny("deepseek2", "Q8_0", **SHAPE))
    gguf.set("deepseek2.expert_group_count", 4).set("deepseek2.expert_group_used_count", 2)
    path = gguf.write(tmp_path / "groups.gguf")
    engine = open_engine(path, "few", overlap=True, prefetch="next-layer", predict_log=True, ubatch=16)
    got, _ = drive(engine, OTHER, STEPS)
    assert not differences(got, resident(path, [OTHER], STEPS, threads=1, ubatch=16)[0])
    assert not engine.streamer.unpredictable()
    scores = engine.streamer.scores()
    assert len(scores) == len(engine.layers) > 0
    for score in scores:
        right, every = score["control"]
        assert right == every > 0


def test_guesses_that_are_right_are_charged_as_used(tiny: Tiny, open_engine: OpenEngine) -> None:
    path = tiny("qwen3moe", "Q8_0", **SHAPE)
    engine = open_engine(path, "few", overlap=True, prefetch="next-layer", predict_log=True)
    _, result = drive(engine, OTHER, 60)
    split, decode = result.flash_split, result.decode
    assert decode.guess_hits > 0
    assert split.bytes["prefetch_used"] > 0
    size = engine.layers[0].expert_bytes
    assert split.bytes["prefetch_used"] % size == 0
    # A spare that is hit after its layer has judged it was charged as wasted, once.
    assert split.bytes["prefetch_used"] <= decode.guess_hits * size
    # What was routed and not in the cache was read ahead, or read on demand.
    demand = split.bytes["base"]
    assert demand == (decode.misses - decode.guess_hits) * size


def test_hits_and_misses_are_those_of_the_cache_alone(tiny: Tiny, open_engine: OpenEngine) -> None:
    """With as many slots, the cache decides the same with and without reading ahead."""
    path = tiny("qwen3moe", "Q8_0", **SHAPE)
    file = open_model_file(path)
    layers = expert_layers(file.tensors, [t.name for t in file.tensors])
    spares = 2 * 2 * layers[0].slot_bytes
    n = 20
    plain = open_engine(path, n, overlap=True)
    ahead = open_engine(path, n + spares // layers[0].slot_bytes, overlap=True, prefetch="next-layer")
    assert plain.plan.class_slots == ahead.plan.class_slots
    assert ahead.plan.class_spares == (4,)
    results = [drive(engine, OTHER, 60)[1] for engine in (plain, ahead)]
    for name in ("hits", "misses", "evictions", "routed", "plans"):
        assert getattr(results[0].decode, name) == getattr(results[1].decode, name), name
    assert results[1].decode.guess_hits > 0


def test_verify_batches_are_guessed_at_too(tiny: Tiny, open_engine: OpenEngine) -> None:
    path = tiny("qwen3moe", "F32", **SHAPE)
    spec = DraftSpec(("ngram-mod",), policy="always", n_max=3, ngram_mod=ModConfig(2, 1, 16))
    plain = open_engine(path, "few", overlap=True, draft=spec)
    engine = open_engine(path, "few", overlap=True, draft=spec, prefetch="next-layer")
    runs = []
    phrase = LONG[:30]
    for e in (plain, engine):
        generation = e.generate(phrase * 2, max_tokens=60, script=phrase * 2, stop_at_end=False)
        assert [t.id for t in generation] == phrase * 2
        runs.append(e.sequence.context.logits().copy())
        assert generation.result.spec.accepted > 0
        split = generation.result.flash_split
        assert split.total == generation.result.prefill.bytes + generation.result.decode.bytes
    assert np.array_equal(*runs)
    assert engine.counters().guess_hits > 0


def test_with_dropping_what_would_be_dropped_is_not_read(tiny: Tiny, open_engine: OpenEngine) -> None:
    path = tiny("qwen3moe", "Q8_0", n_used=4, **SHAPE)
    guessed = []
    for threshold in (None, 1.0):
        engine = open_engine(path, "few", overlap=True, prefetch="next-layer", drop_cold_experts=threshold)
        _, result = drive(engine, OTHER, 40)
        assert result.flash_split.total == result.prefill.bytes + result.decode.bytes
        guessed.append(result.decode.guessed)
    assert 0 < guessed[1] < guessed[0]


def test_cancel_in_mid_graph_forgets_what_was_on_its_way(
    tiny: Tiny, resident: Resident, open_engine: OpenEngine
) -> None:
    path = tiny("qwen3moe", "Q8_0", n_expert=48, n_ff=512, n_layer=4)
    expected = resident(path, [OTHER], 8, threads=1, ubatch=64)
    engine = open_engine(path, "few", overlap=True, io_threads=2, ubatch=64, prefetch="next-layer")
    for i in range(25):
        generation = engine.generate(prompt_ids(8, seed=i), max_tokens=40, stop_at_end=False)
        timer = threading.Timer(0.001 * i, engine.cancel)
        timer.start()
        for _ in generation:
            pass
        timer.join()
        result = generation.result
        assert result.flash_split.total == result.prefill.bytes + result.decode.bytes
        assert not differences(drive(engine, OTHER, 8)[0], expected[0])


def test_a_read_ahead_that_fails_stops_the_generation(tiny: Tiny, tmp_path: Path, open_engine: OpenEngine) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny("qwen3moe", "Q8_0", **SHAPE).read_bytes())
    engine = open_engine(path, 12, overlap=True, prefetch="next-layer")
    drive(engine, OTHER, 4)
    os.truncate(path, min(t.offset for layer in engine.layers for t in layer.tensors))
    with pytest.raises(bmoe.ReadError):
        drive(engine, LONG, 40)


def test_corrupted_spares_are_seen(tiny: Tiny, open_engine: OpenEngine) -> None:
    """The gates above can fail: bytes that are wrong in what was read ahead change the output."""
    path = tiny("qwen3moe", "Q8_0", **SHAPE)
    with ResidentModel(path) as model:
        expected = model.generate(OTHER, STEPS)
    engine = open_engine(path, 12, overlap=True, prefetch="next-layer")
    engine.lanes.sabotage(2)
    assert differences(drive(engine, OTHER, STEPS)[0], expected)


def test_flags(tiny: Tiny, open_engine: OpenEngine) -> None:
    path = tiny("qwen3moe", "Q8_0", **SHAPE)
    with pytest.raises(bmoe.UsageError, match="--prefetch needs --overlap"):
        bmoe.EngineConfig(prefetch="next-layer")
    with pytest.raises(bmoe.UsageError, match="--prefetch: 'x' is none of"):
        bmoe.EngineConfig(prefetch="x", overlap=True)  # type: ignore[arg-type]
    with pytest.raises(bmoe.UsageError, match="--prefetch needs a cache"):
        open_engine(path, "off", overlap=True, prefetch="next-layer")
    engine = open_engine(path, "all", overlap=True, prefetch="next-layer")
    assert any("every expert has a slot" in note for note in engine.notes)
    assert engine.plan.class_spares == (0,)


def test_spares_come_out_of_the_budget(tiny: Tiny) -> None:
    file = open_model_file(tiny("qwen3moe", "Q8_0", **SHAPE))
    layers = expert_layers(file.tensors, [t.name for t in file.tensors])
    budget = slots.RING_AREAS * slots.ring_stride(layers) + 30 * layers[0].slot_bytes
    for spares in (0, 4, 8):
        plan = slots.plan_slots(layers, budget, read_ahead=spares)
        assert plan.total_bytes <= budget
        assert plan.class_spares == (spares,)
        assert plan.class_slots == (30 - spares,)
    # Not where they would take half of what there is.
    assert slots.plan_slots(layers, budget, read_ahead=16).class_spares == (0,)
