"""Dropping cold experts: the decision against NumPy, whole runs against stock llama.cpp with its weights edited."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import OpenEngine, Resident, Tiny
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray
from plain_cache import PlainCache

import bmoe
from bench.models.tiny import ARCHES, prompt_ids, trunks, write_tiny
from bench.models.tiny.model import TinyModel
from bench.reference import Resident as ResidentModel
from bench.reference import Tensor, differences, drive
from bmoe import drafting
from bmoe.errors import UsageError
from bmoe.streamer import _dropping

MOE = tuple(arch for arch in ARCHES if arch != "llama")
PROMPT, STEPS = prompt_ids(40, seed=3), 24
Weights = NDArray[np.float32]


def plain_drop(
    weights: Weights, ids: NDArray[np.int32], resident: set[int], threshold: float
) -> tuple[NDArray[np.bool_], Weights, float]:
    """The rule as docs/dropping.md has it, token by token."""
    read = set(resident)
    dropped, out, mass = np.zeros(weights.shape, bool), weights.copy(), 0.0
    n_used = weights.shape[1]
    for t, row in enumerate(weights.astype(np.float64)):
        total = np.cumsum(row)[-1]
        if np.isfinite(total) and total > 0:
            dropped[t] = row < threshold * total / n_used
            dropped[t, np.argmax(row)] = False
            dropped[t] &= [e not in read for e in ids[t]]
        if dropped[t].any():
            kept = np.cumsum(np.where(dropped[t], 0.0, row))[-1]
            out[t] = np.where(dropped[t], 0.0, row * (total / kept)).astype(np.float32)
            mass += (total - kept) / total
        read |= {int(e) for e in ids[t][~dropped[t]]}
    return dropped, out, mass


# ---- the decision alone ---------------------------------------------------------------------------


def _random_batch(rng: np.random.Generator) -> tuple[Weights, NDArray[np.int32], NDArray[np.int32]]:
    n_tok, n_expert = int(rng.integers(1, 9)), int(rng.integers(2, 40))
    n_used = int(rng.integers(1, min(n_expert, 12) + 1))
    # Peaked and flat, normalised or not.
    weights = rng.random((n_tok, n_used)) ** rng.integers(1, 8) * 10.0 ** rng.integers(-3, 3)
    if rng.random() < 0.3:
        weights = np.round(weights, 1)  # ties, and rows of zeros
    ids = np.array([rng.permutation(n_expert)[:n_used] for _ in range(n_tok)], np.int32)
    slots = np.where(rng.random(n_expert) < rng.random(), np.arange(n_expert), -1).astype(np.int32)
    return weights.astype(np.float32), ids, slots


def test_the_set_dropped_is_numpys() -> None:
    rng, fallen, all_kept = np.random.default_rng(1), 0, 0
    for _ in range(2000):
        weights, ids, slots = _random_batch(rng)
        threshold = float(rng.choice([1e-9, 0.1, 0.5, 0.75, 1.0, 2.0, rng.random()]))
        before = weights.copy()
        dropped, out, mass = _dropping.select(weights, ids, slots, threshold)
        expected = plain_drop(weights, ids, set(np.flatnonzero(slots >= 0)), threshold)
        assert np.array_equal(dropped, expected[0])
        assert np.array_equal(out, expected[1])
        assert mass == pytest.approx(expected[2], abs=1e-12)
        assert np.array_equal(weights, before)
        rows = np.arange(len(weights))
        assert not dropped[rows, weights.argmax(axis=1)].any()
        assert np.isfinite(out).all()
        assert np.allclose(out.sum(axis=1), weights.sum(axis=1), rtol=1e-5)
        assert np.array_equal(out[dropped.sum(axis=1) == 0], weights[dropped.sum(axis=1) == 0])
        fallen += int(dropped.sum())
        all_kept += not dropped.any()
    assert fallen > 1000
    assert all_kept > 100


def test_an_expert_read_for_an_earlier_position_is_there() -> None:
    ids = np.array([[0, 1], [1, 0], [2, 0]], np.int32)
    cold = np.full(3, -1, np.int32)
    weights = np.array([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]], np.float32)
    dropped, out, _ = _dropping.select(weights, ids, cold, 1.0)
    # 1 falls at the first position; the second has it read, and 0 is there from the first.
    assert dropped.tolist() == [[0, 1], [0, 0], [1, 0]]
    assert np.allclose(out, [[1.0, 0.0], [0.6, 0.4], [0.0, 1.0]])
    # What stands behind a position changes nothing of it.
    assert _dropping.select(weights[:1], ids[:1], cold, 1.0)[0].tolist() == [[0, 1]]


def test_weights_that_are_no_weights_are_left_alone() -> None:
    ids, cold = np.array([[0, 1, 2]], np.int32), np.full(3, -1, np.int32)
    for row in ([0.0, 0.0, 0.0], [math.nan, 1.0, 0.1], [math.inf, 1.0, 0.1], [-1.0, -2.0, -3.0]):
        weights = np.array([row], np.float32)
        dropped, out, mass = _dropping.select(weights, ids, cold, 1.0)
        assert not dropped.any()
        assert np.array_equal(out, weights, equal_nan=True)
        assert mass == 0.0
    with pytest.raises(ValueError, match="one shape"):
        _dropping.select(np.ones((1, 2), np.float32), ids, cold, 1.0)
    with pytest.raises(ValueError, match="slot_of does not have"):
        _dropping.select(np.ones((1, 3), np.float32), ids, cold[:2], 1.0)


# ---- whole runs -----------------------------------------------------------------------------------


class EditedResident(ResidentModel):
    """Stock llama.cpp, whole model in memory, with the routing weights of each layer edited by the plain rule.

    What is resident is what a PlainCache fed with the surviving experts would hold.
    """

    def __init__(self, path: Path, engine: bmoe.Engine, threshold: float, **settings: Any) -> None:
        assert engine.cache is not None
        self.cache = PlainCache(engine.plan.layer_class, engine.plan.class_slots, engine.plan.quotas)
        self.layer_of = {int(layer.block.split(".")[1]): i for i, layer in enumerate(engine.layers)}
        self.threshold, self.dropping = threshold, False
        self.dropped = self.routed = self.positions = 0
        self.mass = 0.0
        self._ids: NDArray[np.int32] = np.empty((0, 0), np.int32)
        self._weights: Weights = np.empty((0, 0), np.float32)
        super().__init__(path, record=True, **settings)

    def _on_node(self, address: Any, ask: bool, _: Any) -> bool:
        node = Tensor.from_address(ctypes.cast(address, ctypes.c_void_p).value or 0)
        name, _, block = node.name.partition(b"-")
        routes = name == b"ffn_moe_topk"
        weighs = name.startswith(b"ffn_moe_weights") and b"_sum" not in name
        if not (routes or weighs or name in (b"ffn_moe_down", b"ffn_moe_down_scaled")):
            return not ask
        if ask:
            return True
        if routes:
            rows = [
                (ctypes.c_int32 * node.ne[0]).from_address(node.data + i * node.nb[1])[:] for i in range(node.ne[1])
            ]
            self._ids = np.array(rows, np.int32)
        elif weighs:  # the last of them holds
            flat = (ctypes.c_float * self._ids.size).from_address(node.data)
            self._weights = np.ctypeslib.as_array(flat).reshape(self._ids.shape)
        else:
            self._decide(self.layer_of[int(block)])
        return True

    def _decide(self, layer: int) -> None:
        ids, rows = self._ids, [list(row) for row in self._ids]
        if self.dropping:
            resident = set(self.cache.resident(layer))
            dropped, weights, mass = plain_drop(self._weights.copy(), ids, resident, self.threshold)
            self._weights[:] = weights
            rows = [[int(e) for e in row[~gone]] for row, gone in zip(ids, dropped, strict=True)]
            self.dropped += int(dropped.sum())
            self.mass += mass
            self.routed += ids.size
            self.positions += len(ids)
        self.cache.batch(layer, rows)

    def eval_each(self, tokens: Sequence[int], position: int) -> None:
        """Appends tokens with the logits of each kept: the last layer then computes all of them."""
        batch = C.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position + i, 1, 1
            batch.seq_id[i][0] = 0
        assert C.llama_decode(self.context, batch) == 0
        C.llama_batch_free(batch)

    def run(self, prompt: Sequence[int], n: int, in_prefill: bool) -> Any:
        """As `generate`: `n` greedy tokens, dropping in decode, and in prefill where asked."""
        self.dropping = in_prefill
        first = self.go_on(prompt, 1)
        self.dropping = True
        rest = self.go_on(first.tokens, n - 1)
        first.tokens += rest.tokens
        first.logits += rest.logits
        return first


@pytest.mark.parametrize("in_prefill", [False, True])
@pytest.mark.parametrize("arch", MOE)
def test_a_run_is_llama_cpps_with_these_weights(
    arch: str, in_prefill: bool, tiny: Tiny, open_engine: OpenEngine
) -> None:
    """Every gating: the same experts fall, and every logit has the same bits."""
    path = tiny(arch, "Q8_0" if arch != "gpt-oss" else None, n_expert=16, n_used=6)
    settings = {"threads": 2, "ubatch": 16}
    engine = open_engine(
        path, 14, cache_policy="lru", drop_cold_experts=1.0, drop_in_prefill=in_prefill, overlap=in_prefill, **settings
    )
    run, result = drive(engine, PROMPT, STEPS)
    with EditedResident(path, engine, 1.0, **settings) as model:
        expected = model.run(PROMPT, STEPS, in_prefill)
    assert not differences(run, expected)
    c = engine.counters()
    assert (c.dropped, c.drop_routed, c.drop_positions) == (model.dropped, model.routed, model.positions)
    assert c.drop_mass == pytest.approx(model.mass)
    assert (c.hits, c.misses, c.evictions) == (model.cache.hits, model.cache.misses, model.cache.evictions)
    assert c.dropped > 20
    assert 0 < c.dropped_weight < 1
    assert result.decode.dropped > 0
    assert (result.prefill.dropped > 0) == in_prefill
    assert np.isfinite(run.logits).all()
    assert c.bytes == c.misses * engine.layers[0].expert_bytes


@pytest.mark.parametrize("arch", MOE)
def test_where_nothing_falls_it_is_off(arch: str, tiny: Tiny, resident: Resident, open_engine: OpenEngine) -> None:
    path = tiny(arch, "Q8_0" if arch != "gpt-oss" else None, n_expert=16, n_used=6)
    (expected,) = resident(path, [PROMPT], STEPS, threads=1, ubatch=16)
    off = open_engine(path, 14, ubatch=16)
    assert not differences(drive(off, PROMPT, STEPS)[0], expected)
    on = open_engine(path, 14, ubatch=16, drop_cold_experts=1e-6, drop_in_prefill=True)
    assert not differences(drive(on, PROMPT, STEPS)[0], expected)
    a, b = on.counters(), off.counters()
    assert (a.hits, a.misses, a.evictions, a.bytes) == (b.hits, b.misses, b.evictions, b.bytes)
    assert (a.dropped, a.drop_mass, a.drop_routed) == (0, 0.0, a.routed)
    assert (b.dropped, b.drop_mass, b.drop_routed) == (0, 0.0, 0)
    assert a.misses > 0


def test_one_expert_per_token_never_falls(tiny: Tiny, resident: Resident, open_engine: OpenEngine) -> None:
    path = tiny("qwen3moe", "Q8_0", n_expert=16, n_used=1)
    (expected,) = resident(path, [PROMPT], STEPS, threads=1, ubatch=16)
    engine = open_engine(path, 4, ubatch=16, drop_cold_experts=1.0, drop_in_prefill=True)
    assert not differences(drive(engine, PROMPT, STEPS)[0], expected)
    c = engine.counters()
    assert c.dropped == 0
    assert c.evictions > 0


def test_with_everything_resident_nothing_falls(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0", n_expert=16, n_used=6), "all", ubatch=16, drop_cold_experts=1.0)
    prompt = prompt_ids(200, seed=5)  # brings every expert in
    _, result = drive(engine, prompt, STEPS)
    assert engine.counters().misses == 16 * len(engine.layers)
    assert result.decode.drop_routed > 0
    assert result.decode.dropped == 0


class Logged:
    """Notes every batch that a context decodes, and every return to an earlier place."""

    def __init__(self, engine: bmoe.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any]] = []
        context = engine.sequence.context
        decode, decode_each, truncate = context.decode, context.decode_each, context.truncate

        def log(kind: str, what: Any) -> None:
            self.calls.append((kind, what))

        monkeypatch.setattr(context, "decode", lambda ids: (log("last", ids.tolist()), decode(ids))[1])
        monkeypatch.setattr(
            context, "decode_each", lambda ids, at, skip=0: (log("each", ids.tolist()), decode_each(ids, at, skip))[1]
        )
        monkeypatch.setattr(context, "truncate", lambda n: (log("truncate", n), truncate(n))[1])


class Guessing:
    """Drafts three tokens whatever comes: nearly all of them are rejected."""

    name = winner = "guessing"
    matched = 0

    def begin(self, prompt: Any) -> None:
        pass

    def draft(self, history: NDArray[np.int32], n_max: int | None = None) -> NDArray[np.int32]:
        return history[: min(3, n_max or 0)]

    def accept(self, n_accepted: int) -> None:
        pass


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_verify_batches_drop_by_position(
    arch: str, tiny: Tiny, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batches by stock llama.cpp with the same experts taken out: the same bits after each of them."""
    path = tiny(arch, "Q8_0" if arch != "gpt-oss" else None, n_expert=16, n_used=6)
    settings = {"threads": 1, "ubatch": 16}
    draft = drafting.DraftSpec(types=("ngram",), policy="always")
    engine = open_engine(path, 14, cache_policy="lru", drop_cold_experts=0.9, draft=draft, **settings)
    engine.drafting.drafter = Guessing()  # type: ignore[assignment]
    log = Logged(engine, monkeypatch)
    generation = engine.generate(PROMPT, max_tokens=STEPS, stop_at_end=False)
    ends = [engine.sequence.context.logits().copy() for _ in generation]
    spec = generation.result.spec
    assert spec.drafted > 0
    with EditedResident(path, engine, 0.9, **settings) as model:
        n = 0
        for kind, what in log.calls:
            if kind == "truncate":
                model.truncate(what)
                n = what
                continue
            model.dropping = n >= len(PROMPT)
            model.eval(what) if kind == "last" else model.eval_each(what, n)
            n += len(what)
        assert np.array_equal(model.logits(), ends[-1])
    c = engine.counters()
    assert (c.dropped, c.drop_routed, c.drop_positions) == (model.dropped, model.routed, model.positions)
    assert (c.hits, c.misses, c.evictions) == (model.cache.hits, model.cache.misses, model.cache.evictions)
    assert c.dropped > 20
    assert c.drop_positions > generation.result.decode_steps * len(engine.layers)


# ---- what is refused ------------------------------------------------------------------------------


def _llama4(m: TinyModel) -> Any:
    """Routing weights applied to the experts' input, not to their output."""
    m.kv(interleave_moe_layer_step=1, rope__dimension_count=m.head)

    def block(il: int) -> None:
        m.attention(il)
        m.norm(f"blk.{il}.ffn_norm", m.n_embd)
        m.router(il)
        m.experts(il)
        m.mlp(il, m.n_ff, "_shexp")

    return block


def test_weights_that_are_not_in_the_graph_are_refused(
    resident: Resident, open_engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trunks.BUILDERS, "llama4", _llama4)
    path = write_tiny(tmp_path / "m.gguf", "llama4", "Q8_0", n_layer=4)  # the fourth is another kind
    (expected,) = resident(path, [PROMPT], STEPS, threads=1, ubatch=16)
    assert not differences(drive(open_engine(path, "few", ubatch=16), PROMPT, STEPS)[0], expected)
    engine = open_engine(path, "few", ubatch=16, drop_cold_experts=0.5)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"--drop-cold-experts: llama4 does not weight .* blk\.0") as e:
            drive(engine, PROMPT, STEPS)
        assert "\n" not in str(e.value)
    assert engine.counters().dropped == 0


@pytest.mark.parametrize("value", [0.0, -0.1, 1.01, math.nan, math.inf])
def test_a_threshold_out_of_range(value: float) -> None:
    with pytest.raises(UsageError, match=r"--drop-cold-experts: .* give above 0 up to 1"):
        bmoe.EngineConfig(drop_cold_experts=value)


def test_settings_that_make_no_sense(tiny: Tiny, open_engine: OpenEngine) -> None:
    with pytest.raises(UsageError, match="--drop-in-prefill goes with --drop-cold-experts"):
        bmoe.EngineConfig(drop_in_prefill=True)
    with pytest.raises(UsageError, match="--drop-cold-experts needs a cache"):
        bmoe.EngineConfig(drop_cold_experts=0.5, cache_mb=0)
    with pytest.raises(UsageError, match=r"--drop-cold-experts: .* has no routed experts"):
        open_engine(tiny("llama", "F32"), drop_cold_experts=0.5)
    with pytest.raises(UsageError, match="hold no expert: give a larger --cache-mb"):
        open_engine(tiny("qwen3moe", "Q8_0"), "off", drop_cold_experts=0.5)


def test_few_experts_per_token_are_warned_about(tiny: Tiny, open_engine: OpenEngine) -> None:
    for n_used, warned in ((4, True), (5, False)):
        engine = open_engine(tiny("qwen3moe", "Q8_0", n_expert=16, n_used=n_used), "few", drop_cold_experts=0.5)
        assert any("routes 4 experts per token only" in note for note in engine.notes) == warned
