"""Scoring a text: its arithmetic, and the numbers of stock llama.cpp with the model resident."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_process import ROOT, run
from conftest import OpenEngine, Tiny
from llama_cpp import llama_cpp as C

import bmoe
import bmoe.engine.planning
from bench.models.tiny import prompt_ids
from bench.reference import Logits, Resident
from bmoe.engine import demo
from bmoe.engine.scoring import Tally, Window, surprise, windows
from bmoe.errors import UsageError

TEXT = prompt_ids(100, seed=7)


# ---- arithmetic -----------------------------------------------------------------------------------


def test_windows_follow_each_other_and_score_their_second_half() -> None:
    assert windows(1000, 512) == [Window(0, 257, 512)]
    assert windows(1024, 512) == [Window(0, 257, 512), Window(512, 769, 1024)]
    assert windows(511, 512) == []
    assert windows(9, 4) == [Window(0, 3, 4), Window(4, 7, 8)]
    assert windows(11, 5) == [Window(0, 3, 5), Window(5, 8, 10)]


def test_windows_with_a_stride_score_each_token_once() -> None:
    cut = windows(100, 20, 7)
    assert cut[0] == Window(0, 13, 20)
    assert [w.begin for w in cut] == list(range(0, 81, 7))
    scored = [t for w in cut for t in range(w.first, w.end)]
    assert scored == list(range(13, 13 + len(scored)))


def test_surprise_is_minus_log_softmax() -> None:
    rng = np.random.default_rng(2)
    for scale in (0.1, 1.0, 30.0):
        row = (rng.standard_normal(500) * scale).astype(np.float32)
        p = np.exp(row.astype(np.float64))
        for token in (0, 7, 499):
            assert surprise(row, token) == pytest.approx(-math.log(p[token] / p.sum()), rel=1e-12)
    assert surprise(np.array([3e38, -3e38], np.float32), 1) == pytest.approx(6e38)
    assert surprise(np.zeros(8, np.float32), 3) == pytest.approx(math.log(8))


def test_a_tally_is_the_mean_and_its_error() -> None:
    nll, tally = np.random.default_rng(3).exponential(2.0, 1000), Tally()
    for at in range(0, 1000, 30):
        tally.add(nll[at : at + 30].tolist(), 90)
    assert tally.n == 1000
    assert tally.perplexity == pytest.approx(math.exp(nll.mean()))
    assert tally.error == pytest.approx(math.exp(nll.mean()) * nll.std(ddof=1) / math.sqrt(1000))
    assert tally.bits_per_byte == pytest.approx(nll.sum() / math.log(2) / (34 * 90))
    for tally in (Tally(), Tally(3, math.nan, math.nan, 5)):
        assert math.isnan(tally.perplexity)
        assert math.isnan(tally.error)
    assert Tally(1, 1e4, 1e8, 5).perplexity == math.inf
    assert Tally(9, math.inf, math.inf, 5).perplexity == math.inf
    assert Tally().bits_per_byte is None


# ---- against the resident model -------------------------------------------------------------------


def _rows(model: Resident, tokens: Sequence[int], position: int, kept: int) -> list[Logits]:
    """Logits of the tokens from place `kept` of the batch on, computed as one batch."""
    batch = C.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = i >= kept
    assert C.llama_decode(model.context, batch) == 0
    C.llama_batch_free(batch)
    rows = range(kept, len(tokens))
    return [np.ctypeslib.as_array(C.llama_get_logits_ith(model.context, i), (model.n_vocab,)).copy() for i in rows]


def resident_nll(model: Resident, ids: Sequence[int], first: int, one_by_one: bool = False) -> list[float]:
    """-log p of `ids[first:]`: the second half of a window, by stock llama.cpp."""
    C.llama_memory_clear(model.memory, True)
    rows: list[Logits] = []
    at, last = 0, len(ids) - 1
    while at < last:
        end = min(at + model.ubatch, last)
        if one_by_one:
            end = at + 1 if at >= first - 1 else min(end, first - 1)
        rows += _rows(model, ids[at:end], at, min(max(0, first - 1 - at), end - at))
        at = end
    nll = []
    for row, token in zip(rows, ids[first:], strict=True):
        x = row.astype(np.float64)
        nll.append(float(np.log(np.exp(x - x.max()).sum()) - (x[token] - x.max())))
    return nll


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "gemma4", "qwen35moe", "llama"])
def test_scores_are_those_of_the_resident_model(
    arch: str, one_by_one: bool, tiny: Tiny, open_engine: OpenEngine
) -> None:
    path = tiny(arch, "Q8_0" if arch != "gpt-oss" else None)
    engine = open_engine(path, "few", threads=2, ubatch=32, score_rows=32)
    with Resident(path, threads=2, ubatch=32) as model:
        for first in (1, 51, 99):
            scoring = engine.score(TEXT, first, one_by_one=one_by_one)
            tokens = [t.id for t in scoring]
            assert tokens == TEXT[first:] == scoring.result.token_ids
            assert scoring.nll == resident_nll(model, TEXT, first, one_by_one)
            assert scoring.result.stop == "length"
            assert scoring.result.decode_steps == (len(tokens) if one_by_one else 0)


def test_the_demo_models_perplexity(tmp_path: Path) -> None:
    """The command, streamed, against the whole model resident: the same bits of every logit, hence one number."""
    text, metrics = ROOT / "docs" / "drafting.md", tmp_path / "m.json"
    flags = ("-c", "128", "--ubatch", "64", "-t", "2", "--chunks", "4", "--cache-mb", "30", "--metrics-json", metrics)
    done = run("perplexity", text, *flags, timeout=120)
    assert done.code == 0, done
    found = json.loads(metrics.read_text())
    with bmoe.Engine.open(threads=1, ctx=128) as engine:
        ids = engine.tokenize(text.read_text(encoding="utf-8"))
        assert engine.adds_bos
    nll: list[float] = []
    with Resident(demo.model_path(), threads=2, ubatch=64, ctx=128) as model:
        for at in range(0, 512, 128):
            nll += resident_nll(model, [ids[0], *ids[at + 1 : at + 128]], 65)
    assert found["tokens"] == len(nll) == 4 * 63
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-12)
    assert f"perplexity {found['perplexity']:.4f} +/- {found['perplexity_error']:.4f}, " in done.out
    assert done.out.count("\n") == 1
    assert 0 < found["hit_rate"] < 1


def test_few_rows_are_scored_at_once_where_logits_are_large(
    tiny: Tiny, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("qwen3moe", "F32")
    wide = open_engine(path, ubatch=64, score_rows=64)
    assert wide.score_rows == 64
    scoring = wide.score(TEXT, 40)
    list(scoring)
    for rows in (1, 7):
        monkeypatch.setattr(bmoe.engine.planning, "LOGITS_BYTES", 4 * wide.sequence.context.n_vocab * rows + 3)
        narrow = open_engine(path, ubatch=64, score_rows=64)
        assert narrow.score_rows == rows
        again = narrow.score(TEXT, 40)
        assert len(list(again)) == 60
        np.testing.assert_allclose(again.nll, scoring.nll, rtol=1e-2)
    # Without the setting, one at a time.
    monkeypatch.undo()
    plain = open_engine(path, ubatch=64)
    assert plain.score_rows == 1
    again = plain.score(TEXT, 40)
    list(again)
    np.testing.assert_allclose(again.nll, scoring.nll, rtol=1e-2)


def test_dropping_costs_perplexity_only_where_asked(tiny: Tiny, open_engine: OpenEngine) -> None:
    path = tiny("qwen3moe", "Q8_0", n_expert=16, n_used=6)

    def nll(one_by_one: bool, **settings: Any) -> tuple[list[float], bmoe.engine.StreamCounters]:
        engine = open_engine(path, 14, ubatch=32, score_rows=32, **settings)
        scoring = engine.score(TEXT, 51, one_by_one=one_by_one)
        list(scoring)
        return scoring.nll, engine.counters()

    for one_by_one in (False, True):
        off, plain = nll(one_by_one)
        on, counters = nll(one_by_one, drop_cold_experts=1.0)
        assert (counters.dropped > 0) == one_by_one
        assert (on == off) != one_by_one
        everywhere, both = nll(one_by_one, drop_cold_experts=1.0, drop_in_prefill=True)
        assert both.dropped > counters.dropped
        assert everywhere != off
        assert both.bytes < plain.bytes
        assert np.isfinite(everywhere).all()


# ---- as a generation ------------------------------------------------------------------------------


def test_a_scoring_can_be_left_cancelled_and_followed(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"), "few", ubatch=32, score_rows=32)
    whole = engine.score(TEXT, 20)
    list(whole)
    left = engine.score(TEXT, 20, one_by_one=True)
    next(left)
    assert len(left.nll) == 1
    generation = engine.generate(TEXT[:8], max_tokens=4, stop_at_end=False)
    assert left.result.stop == "cancelled"
    assert len(list(generation)) == 4
    stopped = engine.score(TEXT, 20, one_by_one=True)
    for n, _ in enumerate(stopped):
        if n == 4:
            engine.cancel()
    assert stopped.result.stop == "cancelled"
    assert len(stopped.nll) == len(stopped.result.token_ids) == 5
    again = engine.score(TEXT, 20)
    list(again)
    assert again.nll == whole.nll


def test_what_cannot_be_scored(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"), "few", ubatch=32)
    for ids, first in ((TEXT, 0), (TEXT, 100), ([1], 1), ([], 1)):
        with pytest.raises(UsageError, match="nothing to score"):
            engine.score(ids, first)
    with pytest.raises(UsageError, match="the text has 300 tokens, the context holds 256: use -c 300 or more"):
        engine.score(TEXT * 3)
    with pytest.raises(UsageError, match="token id 99999 is not in the vocabulary"):
        engine.score([1, 99999])
    with pytest.raises(UsageError, match="score_rows: -1"):
        bmoe.EngineConfig(score_rows=-1)
