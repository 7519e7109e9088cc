"""Streamed output is resident output: the same tokens, the same bits of every logit, whatever the settings."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from conftest import OpenEngine, Resident, Tiny, direct_works

import bmoe
from bench.models.tiny import ARCHES, prompt_ids, write_tiny
from bench.models.tiny.model import TinyModel
from bench.reference import Resident as ResidentModel
from bench.reference import differences, distinct, drive

MOE = tuple(arch for arch in ARCHES if arch != "llama")
QUANTS = ("F32", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "mixed")
CACHES = ("off", "few", "all")
STEPS = 8
# Long: several batches, the last one short. Other: shares no token at the start, so nothing of it is reused.
LONG, OTHER = prompt_ids(150, seed=1), prompt_ids(20, seed=2)


@dataclass(frozen=True)
class Case:
    """One engine of the matrix."""

    arch: str
    quant: str | None
    cache: str
    overlap: bool
    lanes: int
    odirect: bool
    threads: int
    ubatch: int

    def __str__(self) -> str:
        parts = [self.arch, self.quant or "MXFP4", self.cache, "overlap" if self.overlap else "serial"]
        parts += [f"{self.lanes}lane", "direct" if self.odirect else "buffered"]
        return "-".join([*parts, f"{self.threads}thread", f"batch{self.ubatch}"])

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "overlap": self.overlap,
            "io_threads": self.lanes,
            "odirect": self.odirect,
            "threads": self.threads,
            "ubatch": self.ubatch,
        }


def _cases() -> list[Case]:
    """Every architecture with every cache, overlapped and not; the rest such that every pair of values meets."""
    rest = list(product((1, 4), (True, False), (1, 2), (16, 64)))
    modes = list(product(CACHES, (False, True)))
    cases = []
    for a, arch in enumerate(MOE):
        for i, (cache, overlap) in enumerate(modes):
            quants: list[str | None] = [QUANTS[(a + i) % 6], QUANTS[(a + i + 3) % 6]]
            if arch == "gpt-oss":
                quants.append(None)
            for quant in quants:
                cases.append(Case(arch, quant, cache, overlap, *rest[7 * len(cases) % len(rest)]))
    return cases


CASES = _cases()


def test_the_matrix_holds_every_pair() -> None:
    assert {(c.arch, c.cache, c.overlap) for c in CASES} == set(product(MOE, CACHES, (False, True)))
    fields = {
        "arch": MOE,
        "quant": QUANTS,
        "cache": CACHES,
        "overlap": (False, True),
        "lanes": (1, 4),
        "odirect": (True, False),
        "threads": (1, 2),
        "ubatch": (16, 64),
    }
    for a, b in combinations(fields, 2):
        assert {(getattr(c, a), getattr(c, b)) for c in CASES} >= set(product(fields[a], fields[b])), (a, b)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_streamed_equals_resident(case: Case, tiny: Tiny, resident: Resident, open_engine: OpenEngine) -> None:
    path = tiny(case.arch, case.quant)
    expected = resident(path, [LONG, OTHER], STEPS, threads=case.threads, ubatch=case.ubatch)
    engine = open_engine(path, case.cache, **case.settings)
    assert engine.lanes.direct == (case.odirect and direct_works(path))
    assert engine.lanes.n_lanes == case.lanes
    run, result = drive(engine, LONG, STEPS)
    assert not differences(run, expected[0])
    assert result.reused_tokens == 0
    again, _ = drive(engine, OTHER, STEPS)
    assert not differences(again, expected[1])
    _check_counters(engine, case.cache)


def _check_counters(engine: bmoe.Engine, cache: str) -> None:
    """What holds for any routing."""
    c, layers = engine.counters(), engine.layers
    assert engine.cache is not None
    assert c.misses > 0
    assert c.reads == sum(len(layer.tensors) for layer in layers) // len(layers) * c.misses
    sizes = {layer.expert_bytes for layer in layers}
    assert min(sizes) * c.misses <= c.bytes <= max(sizes) * c.misses
    held = [len(engine.cache.resident(i)) for i in range(len(layers))]
    if cache == "off":
        assert (c.hits, c.evictions, c.streamed) == (0, 0, c.misses)
        assert sum(held) == 0
    elif cache == "few":
        assert min(c.hits, c.evictions, c.rereads) > 0
        assert 0 < sum(held) <= engine.cache.n_slots < sum(layer.n_expert for layer in layers)
        assert c.misses - c.streamed - c.evictions == sum(held)
    else:
        assert (c.evictions, c.rereads, c.streamed) == (0, 0, 0)
        assert c.misses == sum(held)
        assert c.bytes == sum(n * layer.expert_bytes for n, layer in zip(held, layers, strict=True))


# ---- what the matrix does not reach ---------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("arch", ["qwen3moe", "glm4moe"])
def test_shards(arch: str, overlap: bool, tiny: Tiny, resident: Resident, open_engine: OpenEngine) -> None:
    path = tiny(arch, "mixed", shards=3)
    expected = resident(path, [LONG, OTHER], STEPS, threads=2, ubatch=64)
    for cache in CACHES:
        engine = open_engine(path, cache, overlap=overlap, threads=2, ubatch=64)
        assert len(engine.file.paths) == 3
        assert len({t.file for layer in engine.layers for t in layer.tensors}) > 1
        for prompt, run in zip((LONG, OTHER), expected, strict=True):
            assert not differences(drive(engine, prompt, STEPS)[0], run)


@pytest.mark.parametrize("quant", ["Q4_K", "Q6_K", "mixed"])
@pytest.mark.parametrize("threads", [1, 2])
def test_wide_batches_run_the_tiled_kernel(
    quant: str, threads: int, tiny: Tiny, resident: Resident, open_engine: OpenEngine
) -> None:
    """From 8 rows of an expert ggml computes K-quants by tiles: fewer than 16, more, and rows of several chunks."""
    path = tiny("qwen3moe", quant, n_expert=6, n_ff=768, n_embd=512, n_layer=2)
    prompt = prompt_ids(136, seed=3)
    for ubatch in (32, 120):
        (expected,) = resident(path, [prompt], 3, threads=threads, ubatch=ubatch)
        for cache, overlap in (("off", True), ("few", False), ("few", True), ("all", True)):
            engine = open_engine(path, cache, overlap=overlap, threads=threads, ubatch=ubatch)
            assert not differences(drive(engine, prompt, 3)[0], expected), (ubatch, cache, overlap)
            engine.close()


def test_one_token_at_a_time_is_not_the_same_as_a_wide_batch(tiny: Tiny, resident: Resident) -> None:
    """The tiled kernel rounds otherwise: were it not used on either side, the test above would show nothing."""
    path = tiny("qwen3moe", "Q4_K", n_expert=6, n_ff=768, n_embd=512, n_layer=2)
    prompt = prompt_ids(136, seed=3)
    wide, narrow = (resident(path, [prompt], 3, threads=1, ubatch=n)[0] for n in (120, 1))
    assert differences(wide, narrow)


@pytest.mark.parametrize("up", ["Q8_0", "F32", "Q6_K"])
def test_gate_and_up_of_different_types(
    up: str, resident: Resident, open_engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both multiply the same activations, which each type wants quantized in its own way."""
    mat = TinyModel.mat

    def mixed(model: TinyModel, name: str, *shape: int, gain: float = 1.0, qname: str | None = None) -> None:
        mat(model, name, *shape, gain=gain, qname=up if name.endswith("ffn_up_exps") else qname)

    monkeypatch.setattr(TinyModel, "mat", mixed)
    path = write_tiny(tmp_path / "m.gguf", "qwen3moe", "Q4_K")
    (expected,) = resident(path, [LONG], STEPS, threads=2, ubatch=64)
    for cache in CACHES:
        engine = open_engine(path, cache, overlap=True, threads=2, ubatch=64)
        assert len({t.nbytes for t in engine.layers[0].tensors}) == 2
        assert not differences(drive(engine, LONG, STEPS)[0], expected)


@pytest.mark.parametrize("n_slots", [4, 5, 6, 7])
def test_budgets_around_one_tokens_experts(
    n_slots: int, tiny: Tiny, resident: Resident, open_engine: OpenEngine
) -> None:
    """One token routes 6: below that, slots are given up within one token, and some experts never get one."""
    path = tiny("qwen3moe", "Q8_0")
    (expected,) = resident(path, [LONG], STEPS, threads=1, ubatch=16)
    for overlap in (False, True):
        engine = open_engine(path, n_slots, overlap=overlap, ubatch=16)
        assert engine.cache is not None
        assert engine.cache.n_slots == n_slots
        assert not differences(drive(engine, LONG, STEPS)[0], expected)


def test_more_experts_for_each_token_than_slots(tiny: Tiny, resident: Resident, open_engine: OpenEngine) -> None:
    path = tiny("qwen3moe", "Q8_0", n_expert=16, n_used=12)
    (expected,) = resident(path, [OTHER], STEPS, threads=2, ubatch=16)
    for cache in ("off", 4, 8):
        engine = open_engine(path, cache, overlap=True, threads=2, ubatch=16)
        assert not differences(drive(engine, OTHER, STEPS)[0], expected)
        assert engine.counters().streamed > 0


@pytest.mark.parametrize("mode", ["mmap", "warm", "lock", "anon"])
def test_dense_weights(mode: str, tiny: Tiny, resident: Resident, open_engine: OpenEngine) -> None:
    for arch in ("gemma4", "deepseek2"):
        path = tiny(arch, "Q8_0")
        (expected,) = resident(path, [OTHER], STEPS, threads=1, ubatch=16)
        engine = open_engine(path, "few", dense_weights=mode, ubatch=16)
        assert not differences(drive(engine, OTHER, STEPS)[0], expected)


def test_fewer_experts_than_the_model_routes(tiny: Tiny, resident: Resident, open_engine: OpenEngine) -> None:
    """The number of experts routed changes no weight, so that a model written with it is the reference."""
    (expected,) = resident(tiny("qwen3moe", "Q8_0", n_used=1), [OTHER], STEPS, threads=1, ubatch=16)
    engine = open_engine(tiny("qwen3moe", "Q8_0"), "few", n_expert_used=1, ubatch=16)
    assert not differences(drive(engine, OTHER, STEPS)[0], expected)


def test_reads_where_the_file_system_may_refuse_direct_ones(
    tiny: Tiny, resident: Resident, open_engine: OpenEngine, tmp_path: Path
) -> None:
    shm = Path("/dev/shm")
    base = shm if shm.is_dir() and os.access(shm, os.W_OK) else tmp_path
    source = tiny("qwen3moe", "Q8_0")
    (expected,) = resident(source, [OTHER], STEPS, threads=1, ubatch=16)
    with tempfile.TemporaryDirectory(dir=base) as folder:
        path = Path(shutil.copy(source, folder))
        engine = open_engine(path, "few", ubatch=16)
        assert not differences(drive(engine, OTHER, STEPS)[0], expected)
        assert engine.lanes.direct == direct_works(path)
        assert any("direct I/O" in note for note in engine.notes) == (not engine.lanes.direct)
        engine.close()


@pytest.mark.parametrize("quant", ["F32", "Q4_K"])
def test_a_dense_model_runs_with_nothing_streamed(
    quant: str, tiny: Tiny, resident: Resident, open_engine: OpenEngine
) -> None:
    path = tiny("llama", quant)
    expected = resident(path, [LONG, OTHER], STEPS, threads=2, ubatch=16)
    engine = open_engine(path, overlap=True, threads=2, ubatch=16)
    assert engine.layers == ()
    assert (engine.cache, engine.decision, engine.budget_bytes, engine.resident_bytes) == (None, None, 0, 0)
    (note,) = engine.notes
    assert "nothing is streamed" in note
    assert "\n" not in note
    for prompt, run in zip((LONG, OTHER), expected, strict=True):
        assert not differences(drive(engine, prompt, STEPS)[0], run)
    c = engine.counters()
    assert (c.plans, c.routed, c.hits, c.misses, c.reads, c.bytes, c.hit_rate) == (0, 0, 0, 0, 0, 0, None)


# ---- counters that can be computed ----------------------------------------------------------------


def test_without_a_cache_each_routed_expert_is_read(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"), "off", ubatch=16)
    _, result = drive(engine, LONG, STEPS)
    routed = result.decode_steps * sum(engine.n_used for _ in engine.layers)
    assert result.decode_steps == STEPS - 1
    c = result.decode
    assert (c.routed, c.hits, c.misses, c.streamed) == (routed, 0, routed, routed)
    assert c.bytes == routed * engine.layers[0].expert_bytes
    assert c.plans == result.decode_steps * len(engine.layers)


def test_with_every_expert_cached_each_is_read_once(tiny: Tiny, open_engine: OpenEngine) -> None:
    path = tiny("qwen35moe", "mixed", n_expert=32)
    with ResidentModel(path, ubatch=16, record=True) as model:
        expected = model.generate(OTHER, STEPS)
    engine = open_engine(path, "all", overlap=True, ubatch=16)
    first, result = drive(engine, OTHER, STEPS)
    assert not differences(first, expected)
    assert result.prefill.misses + result.decode.misses == distinct(expected.routes)
    assert result.prefill.routed + result.decode.routed == sum(len(t) for _, rows in expected.routes for t in rows)
    assert 0 < distinct(expected.routes) < sum(layer.n_expert for layer in engine.layers)
    # The same again, once something else has taken the sequence: all of it is computed, none of it read.
    drive(engine, LONG, STEPS)
    before = engine.counters()
    again, result = drive(engine, OTHER, STEPS)
    c = engine.counters() - before
    assert result.reused_tokens == 0
    assert not differences(again, first)
    assert (c.misses, c.reads, c.bytes, c.disk_bytes) == (0, 0, 0, 0)
    assert c.hits > 0
    assert result.decode.hit_rate == 1.0


# ---- the gates can fail ---------------------------------------------------------------------------


def test_a_corrupted_slot_shows(tiny: Tiny, resident: Resident, open_engine: OpenEngine) -> None:
    path = tiny("qwen3moe", "Q8_0")
    expected, other = resident(path, [LONG, OTHER], STEPS, threads=1, ubatch=16)
    engine = open_engine(path, "all", ubatch=16)
    assert not differences(drive(engine, LONG, STEPS)[0], expected)
    assert engine.streamer is not None
    engine.streamer.corrupt()
    assert differences(drive(engine, OTHER, STEPS)[0], other)
    # Once what is cached is forgotten, everything is read anew.
    engine.streamer.reset(True)
    assert engine.resident_bytes == 0
    assert not differences(drive(engine, LONG, STEPS)[0], expected)


@pytest.mark.parametrize("cache", ["off", "few"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_flipped_byte_of_a_read_shows(
    cache: str, overlap: bool, tiny: Tiny, resident: Resident, open_engine: OpenEngine
) -> None:
    path = tiny("qwen3moe", "Q8_0")
    (expected,) = resident(path, [LONG], STEPS, threads=1, ubatch=16)
    engine = open_engine(path, cache, overlap=overlap, ubatch=16)
    engine.lanes.sabotage(2)
    assert differences(drive(engine, LONG, STEPS)[0], expected)


@pytest.mark.parametrize("overlap", [False, True])
def test_computing_before_a_read_is_done_shows(
    overlap: bool, tiny: Tiny, resident: Resident, open_engine: OpenEngine
) -> None:
    """Reads of a megabyte take longer than it takes to begin to compute with what was there before."""
    path = tiny("qwen3moe", "F32", n_embd=256, n_ff=1024, n_expert=16)
    # One by one, until it shows: a read may always be faster than the thread that does not wait for it.
    prompts = [prompt_ids(20, seed) for seed in range(4, 44)]
    expected = resident(path, prompts, 2, threads=1, ubatch=16)
    engine = open_engine(path, "off", overlap=overlap, io_threads=1, ubatch=16)
    assert not differences(drive(engine, prompts[0], 2)[0], expected[0])
    engine.lanes.sabotage(1)
    try:
        again = list(zip(prompts, expected, strict=True))[1:]
        assert any(differences(drive(engine, prompt, 2)[0], run) for prompt, run in again)
    finally:
        # Nothing may still be read into memory that closing gives back.
        engine.lanes.close()
