"""Drafting with a model's own head, on real (tiny) models: output, streams, accounts, other sources, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_process import run
from conftest import OpenEngine
from gguf_edit import Gguf
from mtp_heads import (
    DENSE_HEADS,
    PROMPT,
    ForcedHead,
    N,
    ResidentHead,
    TinyMtp,
    close_state,
    force,
    head_of,
    head_state,
    ids,
    models,
    record,
    same_drafts,
    spec,
)

import bmoe
from bench.models.tiny import prompt_ids
from bmoe.speculation import DrafterStack, DraftSpec, ModConfig, mtp

# ---- output -----------------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("draft", [1, 3])
def test_a_head_that_is_right_saves_the_full_width(
    arch: str, heads: int, draft: int, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    path = tiny_mtp(arch, heads)
    expected = ids(open_engine(path, "few", ubatch=32), PROMPT)
    engine = open_engine(path, "few", ubatch=32, draft=spec(draft))
    force(engine, ForcedHead(head_of(engine), len(PROMPT), expected))
    generation = engine.generate(PROMPT, max_tokens=N, stop_at_end=False)
    assert [t.id for t in generation] == expected
    done = generation.result.spec
    assert done.acceptance == 1.0
    width = min(draft, heads) if heads > 1 else draft
    assert done.decodes == -(-(N - 1) // (width + 1))
    assert head_of(engine).stats["accepted_whole"] == head_of(engine).stats["drafted_steps"]


@models
@pytest.mark.parametrize("wrong", [1, 2, 5])
def test_a_head_that_is_wrong_costs_time_alone(
    arch: str, heads: int, wrong: int, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    """The output, and the logits after it, are those of plain decoding; every byte has its cause."""
    path = tiny_mtp(arch, heads)
    plain = open_engine(path, "few", ubatch=32)
    expected = ids(plain, PROMPT)
    logits = plain.sequence.context.logits().copy()
    engine = open_engine(path, "few", ubatch=32, draft=spec())
    force(engine, ForcedHead(head_of(engine), len(PROMPT), expected, wrong))
    generation = engine.generate(PROMPT, max_tokens=N, stop_at_end=False)
    assert [t.id for t in generation] == expected
    r = generation.result
    np.testing.assert_allclose(engine.sequence.context.logits(), logits, atol=0.03, rtol=0)
    assert r.spec.recoveries == 0
    if wrong == 1:
        assert r.spec.accepted == 0
        assert r.spec.decodes == N - 1
    else:
        assert r.spec.drafted > r.spec.accepted > 0
    assert (r.flash_split.bytes["draft_source"] > 0) == (arch not in DENSE_HEADS)
    assert r.flash_split.total == r.prefill.bytes + r.decode.bytes
    parts = ("base", "accepted", "rejected", "draft_source")
    assert sum(r.flash_split.bytes[c] for c in parts) == r.decode.bytes


def test_the_demo_models_head_is_right_most_of_the_time(open_engine: OpenEngine) -> None:
    """It agrees with its target at 77 % of positions; without hidden rows it would at 19 %."""
    path, prompt = bmoe.engine.demo.model_path(), "class Reader:\n    def __init__(self, path):\n"
    plain = open_engine(path, ctx=512)
    script = plain.tokenize((Path(bmoe.__file__).parent / "engine" / "chat.py").read_text())[:200]
    engine = open_engine(path, ctx=512, draft=spec(1))
    generation = engine.generate(prompt, max_tokens=len(script), script=script, stop_at_end=False)
    assert [t.id for t in generation] == script
    assert (generation.result.spec.acceptance or 0) > 0.25  # of a text that the target itself would not write
    generation = engine.generate(prompt, max_tokens=150, stop_at_end=False)
    assert [t.id for t in generation] == ids(plain, plain.tokenize(prompt), 150)
    assert (generation.result.spec.acceptance or 0) > 0.6


def test_unsure_heads_stop(open_engine: OpenEngine) -> None:
    """A higher --mtp-p-min drafts less, and what it drafts is accepted more often."""
    path, prompt = bmoe.engine.demo.model_path(), "class Reader:\n    def __init__(self, path):\n"
    drafted, acceptance = [], []
    for p_min in (0.0, 0.5, 0.95):
        engine = open_engine(path, ctx=512, draft=spec(4, mtp_p_min=p_min))
        generation = engine.generate(prompt, max_tokens=100, stop_at_end=False)
        for _ in generation:
            pass
        drafted.append(generation.result.spec.drafted)
        acceptance.append(generation.result.spec.acceptance or 0)
    assert drafted == sorted(drafted, reverse=True)
    assert acceptance == sorted(acceptance)
    assert drafted[2] < drafted[0]


# ---- the head's stream ------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("cache", ["off", "few"])
def test_a_streamed_head_is_the_resident_one(
    arch: str, heads: int, cache: str, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    """Bit for bit, although the experts of what only feeds it are neither read nor computed."""
    path = tiny_mtp(arch, heads, "Q8_0")
    engine = open_engine(path, cache, ubatch=16, draft=spec(), overlap=True)
    batches = record(engine)
    ids(engine, PROMPT)
    resident = ResidentHead(path, heads)
    n = 0
    for batch in batches:
        got = resident.replay(batch)
        assert got.tobytes() == batch.logits.tobytes()
        n += len(got)
    resident.close()
    assert n > N
    assert any(len(b.tokens) == 16 and not len(b.logits) for b in batches), "the prompt was fed"


def test_feeding_reads_nothing(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny_mtp("glm4moe"), "few", ubatch=16, draft=spec())
    generation = engine.generate(PROMPT, max_tokens=1)
    for _ in generation:
        pass
    assert head_of(engine).stats["fed"] == len(PROMPT)
    assert generation.result.flash_split.bytes["draft_source"] == 0
    assert generation.result.prefill.bytes == generation.result.flash_split.bytes["prefill"] > 0
    assert not engine.streamer.skip


def test_the_heads_experts_have_slots_of_their_own(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    path = tiny_mtp("glm4moe")
    plain, engine = open_engine(path), open_engine(path, draft=spec())
    assert len(engine.layers) == len(plain.layers) + 1
    ids(engine, PROMPT)
    assert engine.cache is not None
    assert engine.cache.resident(len(engine.layers) - 1), "experts of the head are cached"


def test_what_the_head_takes_is_counted(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    """Of the memory that `--cache-mb auto` divides: the head's context and the target's hidden rows."""
    path = tiny_mtp("glm4moe")
    plain, engine = open_engine(path), open_engine(path, draft=spec())
    head, rows = engine.sequence.head.head, engine.sequence.rows  # type: ignore[union-attr]
    assert engine.buffers.kv == plain.buffers.kv + head.buffers.kv > plain.buffers.kv  # type: ignore[attr-defined]
    assert engine.buffers.compute == engine.sequence.context.buffers.compute + head.buffers.compute + rows.nbytes  # type: ignore[attr-defined]
    assert engine.decision is not None
    assert (engine.decision.sizes.kv, engine.decision.sizes.compute) == (engine.buffers.kv, engine.buffers.compute)
    assert head.n_batch == min(mtp.WIDTH, engine.sequence.context.n_batch)
    waiting = mtp.PendingRows(rows.size)
    waiting.put(0, np.zeros((head_of(engine).limit, rows.size), np.float32))
    batch = 4 * rows.size * engine.sequence.context.n_batch  # in the graph, and where llama.cpp copies them to
    assert rows.nbytes >= 2 * batch + waiting.rows.nbytes


# ---- with other sources -----------------------------------------------------------------------------

TEXT = DraftSpec(types=("ngram-mod", "mtp"), policy="always", ngram_mod=ModConfig(n_match=3, n_min=1, n_max=16))


def test_sources_of_text_come_first_and_the_head_keeps_up(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    """However long others draft, few rows wait, and the head then drafts from the right state."""
    path = tiny_mtp("glm4moe")
    phrase = prompt_ids(30, 5)
    prompt, script = phrase * 2, [*phrase * 4, *prompt_ids(30, 6)]
    engine = open_engine(path, "few", draft=TEXT, ctx=512)
    source = head_of(engine)
    force_at = ForcedHead(source, len(prompt), script)
    engine.sequence.head = force_at
    engine.drafting.drafter.sources = (engine.drafting.drafter.sources[0], force_at)
    most, take = 0, force_at.take

    def watched(position: int, rows: Any) -> None:
        nonlocal most
        take(position, rows)
        most = max(most, force_at.behind)

    force_at.take = watched  # type: ignore[method-assign]
    generation = engine.generate(prompt, max_tokens=len(script), script=script, stop_at_end=False)
    assert [t.id for t in generation] == script
    stats = engine.drafting.drafter.stats
    assert stats["ngram-mod"]["accepted"] > 60
    assert stats["mtp"]["accepted"] > 10
    assert most <= len(prompt) + 1 or most <= mtp.WIDTH + 17
    r = generation.result
    assert r.flash_split.total == r.prefill.bytes + r.decode.bytes
    force_at.feed(engine.sequence.ids)
    other = open_engine(path, "few", draft=spec(), ctx=512)
    other.drafting.drafter = DrafterStack()
    assert ids(other, prompt, len(script), script=script) == script
    head_of(other).feed(other.sequence.ids)
    close_state(head_state(engine), head_state(other))


# ---- refusals ---------------------------------------------------------------------------------------


def test_a_model_without_a_head_is_refused(tmp_path: Path, tiny: Any, tiny_mtp: TinyMtp) -> None:
    headless = Gguf(tiny_mtp("glm4moe"))
    for tensor in headless.tensors:
        tensor.name = tensor.name.replace(b"nextn", b"other")
    two = Gguf(tiny_mtp("hy_v3", 2)).set("general.architecture", "glm4moe")
    two.kv |= {key.replace("hy_v3", "glm4moe"): value for key, value in two.kv.items()}
    foreign = Gguf(tiny_mtp("hy_v3", 2)).set("general.architecture", "qwen3moe")
    foreign.kv |= {key.replace("hy_v3", "qwen3moe"): value for key, value in foreign.kv.items()}
    cases = {
        tiny("qwen3moe"): "has no multi-token-prediction head",
        tiny("llama"): "has no multi-token-prediction head",
        headless.write(tmp_path / "headless.gguf"): "has no multi-token-prediction head",
        two.write(tmp_path / "two.gguf"): "llama.cpp cannot draft with 2 heads of glm4moe",
        foreign.write(tmp_path / "foreign.gguf"): "llama.cpp cannot draft with the head of qwen3moe",
    }
    for path, message in cases.items():
        with pytest.raises(bmoe.UsageError, match=message) as caught:
            bmoe.Engine.open(path, draft=spec())
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_the_command_line(tmp_path: Path) -> None:
    """The summary's lines and the metrics file say the same, and every byte has its cause."""
    metrics = tmp_path / "m.json"
    flags = ("-t", "1", "-c", "256", "-n", "40", "--ignore-eos", "--cache-mb", "0", "--metrics-json", metrics)
    done = run(
        "--mtp", "--draft", "2", "--draft-policy", "always", "--mtp-p-min", "0.1", "-p", "def read(path):", *flags
    )
    assert done.code == 0, done.err
    m = json.loads(metrics.read_text())
    spec, split = m["spec"], m["flash_split"]
    assert m["config"]["draft"]["types"] == ["mtp"]
    assert m["config"]["draft"]["mtp_p_min"] == 0.1
    assert spec["type"] == "mtp"
    assert spec["sources"]["mtp"]["drafted"] == spec["drafted"] >= spec["accepted"] > 0
    assert spec["sources"]["mtp"]["accepted"] == spec["accepted"]
    assert sum(split.values()) == m["run"]["bytes_read"]
    verify = split["base"] + split["accepted"] + split["rejected"]
    assert split["draft_source"] + verify == m["expert"]["bytes_read"]
    mib = 1 << 20
    assert f"mtp: {spec['accepted']}/{spec['drafted']} drafts accepted" in done.err
    assert (
        f"mtp: of {m['expert']['bytes_read'] / mib:.1f} MiB streamed in decode, {split['draft_source'] / mib:.1f} MiB "
        f"({100 * split['draft_source'] / m['expert']['bytes_read']:.1f} %) was the head's own routing, "
        f"{verify / mib:.1f} MiB the verify batches"
    ) in done.err
    plain = run("-p", "def read(path):", *flags)
    assert plain.out == done.out
    # With nothing else said, the demo samples; drafting makes it greedy.
    assert "greedy" in run("--mtp", "-n", "1").err


def test_a_memory_that_cannot_go_back_says_so(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    """llama.cpp keeps no states of qwen3next to go back to; of qwen35moe none where the user wants none."""
    for arch, settings, why in (
        ("qwen3next", {}, "of qwen3next"),
        ("qwen35moe", {"rs_snapshots": 0}, "--rs-snapshots 0"),
    ):
        path = tiny_mtp(arch)
        plain = open_engine(path, **settings)
        assert not any("drafted" in note for note in plain.notes)
        engine = open_engine(path, draft=spec(), **settings)
        assert any(note.startswith("nothing is drafted") and why in note for note in engine.notes)
        assert engine.sequence.head is None
        assert ids(engine, PROMPT) == ids(plain, PROMPT)


def test_the_command_line_refuses(tiny: Any) -> None:
    done = run("--mtp", "-m", tiny("qwen3moe"), "-p", "x")
    assert done.code == 2
    assert done.last.startswith("bmoe: --spec-type mtp: ")
    assert "no multi-token-prediction head" in done.last
    done = run("--mtp", "--temp", "0.5", "-p", "x")
    assert done.code == 2
    assert "greedy" in done.last


@models
@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_the_draft_width_decides_when_the_head_is_asked(
    arch: str, heads: int, wrong: int, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    """With --draft-policy adaptive, the default: the same output, and no graph of the head before a plain step."""
    path = tiny_mtp(arch, heads)
    expected = ids(open_engine(path), PROMPT)
    engine = open_engine(path, "few", draft=replace(spec(), policy="adaptive"))
    force(engine, ForcedHead(head_of(engine), len(PROMPT), expected, wrong))
    generation = engine.generate(PROMPT, max_tokens=N, stop_at_end=False)
    assert [t.id for t in generation] == expected
    r = generation.result
    assert head_of(engine).stats["steps"] < r.spec.decodes
    assert r.flash_split.total == r.prefill.bytes + r.decode.bytes
    stats = head_of(engine).stats
    assert (stats["drafted"], stats["drafted_steps"]) == (r.spec.drafted, r.spec.drafted_steps)


def test_the_heads_experts_are_dropped_like_any(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    """--drop-cold-experts: in the head's drafting graphs too; what only feeds it decides nothing."""
    path = tiny_mtp("glm4moe")
    reads = []
    for threshold in (None, 1.0):
        engine = open_engine(path, "few", draft=spec(), drop_cold_experts=threshold)
        source = head_of(engine)
        first = ids(engine, PROMPT, 1)[0]
        assert engine.cache is not None
        engine.cache.clear()
        before = engine.counters()
        assert len(source.draft(np.array(PROMPT, np.int32), first, 3)) == 3
        done = engine.counters() - before
        reads.append(done.reads)
        assert (done.dropped > 0) == (threshold is not None)
    assert reads[1] < reads[0]


def test_scoring_leaves_the_head_nothing_wrong(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    path, text = tiny_mtp("glm4moe"), prompt_ids(120, 4)
    expected = ids(open_engine(path), PROMPT)
    engine = open_engine(path, draft=spec(), score_rows=16)
    assert ids(engine, PROMPT) == expected
    for _ in engine.score(text, 1):
        pass
    assert head_of(engine).behind == 0
    batches = record(engine)
    prompt = [*text[:60], 65, 66, 67]
    fresh = open_engine(path, draft=spec())
    others = record(fresh)
    same_drafts((ids(engine, prompt), batches), (ids(fresh, prompt), others))


@models
def test_reading_ahead_and_the_head(arch: str, heads: int, tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    """Guesses are for the target's layers; the output is the same, and every byte still has its cause."""
    path = tiny_mtp(arch, heads)
    expected = ids(open_engine(path), PROMPT)
    engine = open_engine(path, "few", draft=spec(), prefetch="next-layer", overlap=True)
    force(engine, ForcedHead(head_of(engine), len(PROMPT), expected, 3))
    generation = engine.generate(PROMPT, max_tokens=N, stop_at_end=False)
    assert [t.id for t in generation] == expected
    r = generation.result
    assert (r.flash_split.bytes["draft_source"] > 0) == (arch not in DENSE_HEADS)
    assert r.flash_split.total == r.prefill.bytes + r.decode.bytes
