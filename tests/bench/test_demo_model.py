"""The demo model's recipe: its text, its schedule, and, where torch is installed, its network against llama.cpp."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from functools import partialmethod
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.models.demo_model import batches, corpus
from bench.models.demo_model.shape import Plan, Shape

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra [train]")

CODE = '''import os


def first(value, other):
    """Return the larger of two."""
    if value > other:
        return value
    return other


class Box:
    def open(self):
        return self.content * 2 + self.content


def last(value):
    return value
'''


def test_documents_are_collected_once_and_sorted_by_kind(tmp_path: Path) -> None:
    lib, docs = tmp_path / "lib", tmp_path / "docs"
    for name, text in {
        "lib/a.py": CODE,
        "lib/again.py": CODE,
        "lib/test/test_a.py": CODE + "# a test\n",
        "lib/table.py": "x = [" + "0x12345, " * 60 + "]\n",
        "lib/short.py": "x = 1\n",
        "lib/site-packages/b.py": CODE + "# not of the library\n",
        "docs/a.rst.txt": "A title\n=======\n\n" + "Some words about it. " * 20,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = corpus.collect(lib, docs)
    assert [(d.name, d.kind) for d in found] == [
        ("lib/a.py", "library"),
        ("lib/test/test_a.py", "tests"),
        ("doc/a.rst.txt", "docs"),
    ]
    assert [d.held_out for d in found] == [corpus.held_out(d.name) for d in found]
    with pytest.raises(FileNotFoundError, match=r"\*\.py"):
        corpus.collect(docs, docs)


def test_one_name_in_fifty_is_held_out() -> None:
    kept = sum(corpus.held_out(f"lib/{i}.py") for i in range(20_000))
    assert 300 < kept < 500


def test_definitions_end_where_their_indentation_does() -> None:
    blocks = corpus.definitions(CODE, least=10)
    assert [b.split("(")[0].split(":")[0].strip() for b in blocks] == ["def first", "class Box", "def open", "def last"]
    assert blocks[0].endswith("return other\n")
    assert blocks[2].startswith("    def open")
    assert blocks[2].endswith("self.content\n")


def test_a_repetition_has_definitions_that_are_asked_for_again() -> None:
    text = "\n\n".join(f"def name{i}(value):\n    return value * {i} + value\n" + "    # more\n" * 25 for i in range(6))
    documents = [corpus.Document("lib/a.py", "library", text, False)]
    made = corpus.repetitions(documents, 40, seed=3)
    assert made == corpus.repetitions(documents, 40, seed=3)
    again = 0
    for m in made:
        parts = re.split(r"\n(?=def |# Again)", m.text)
        assert sum(map(len, parts)) <= 3600 + 2 * max(map(len, parts))
        at, first, copied = 0, dict[str, str](), [""]
        for part in parts:
            asked, _, block = part.rpartition(f"{corpus.CUE}\n")
            name = re.match(r"def (\w+)", block)
            if name is None:  # the line that asks
                assert part == corpus.CUE
                at += len(part) + 1
                continue
            assert asked == ""
            hidden = (max(0, at - len(corpus.CUE) - 2), at + name.end())
            assert (hidden in m.unscored) == (name.group() in first)
            if hidden in m.unscored:
                assert m.text[: at - 1].endswith("\n" + corpus.CUE)
                assert name.group() != copied[-1]
                copied.append(name.group())
            assert first.setdefault(name.group(), block.rstrip()) == block.rstrip()
            at += len(part) + 1
        assert len(m.unscored) == len(copied) - 1
        again += len(copied) - 1
    assert again > 40


def test_the_schedule_warms_up_holds_and_falls() -> None:
    plan = Plan(tokens=8192 * 1200)
    rates = [plan.rate_at(i) for i in range(plan.main_steps)]
    assert (plan.steps, plan.main_steps) == (1200, 1000)
    assert rates[0] == pytest.approx(plan.rate / plan.warmup)
    assert max(rates) == plan.rate == rates[plan.warmup] == rates[399]
    assert rates[-1] == pytest.approx(plan.rate * (plan.floor + (1 - plan.floor) / 600))
    assert rates[400:] == sorted(rates[400:], reverse=True)
    assert [plan.length(i) for i in (0, 614, 615, 849, 850, 999)] == [256, 256, 512, 512, 1024, 1024]
    assert plan.mix_at(614) == plan.early_mix
    assert plan.mix_at(615) == plan.mix
    assert [plan.heads_at(i) for i in (0, 299, 301, 999)] == [False, False, True, True]
    assert sum(plan.mix) == pytest.approx(1)
    assert sum(plan.early_mix) == pytest.approx(1)


def test_the_last_part_has_a_rate_and_a_mix_of_its_own_and_begins_where_files_do() -> None:
    plan = Plan(tokens=8192 * 1200)
    rates = [plan.rate_at(i) for i in range(1000, 1200)]
    top = rates.index(max(rates))
    assert 0.9 * plan.finish_rate * plan.rate < rates[top] < plan.finish_rate * plan.rate
    assert top in (plan.finish_warmup - 2, plan.finish_warmup - 1)
    assert rates[:top] == sorted(rates[:top])
    assert rates[0] > plan.rate_at(999)
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert plan.rate * plan.floor < rates[-1] < 1.3 * plan.rate * plan.floor
    assert [plan.length(i) for i in (1000, 1199)] == [1024, 1024]
    assert plan.mix_at(999) == plan.mix
    assert plan.mix_at(1000) == plan.finish_mix
    assert sum(plan.finish_mix) == pytest.approx(1)
    assert [plan.starts_at(i) for i in (0, 999, 1000)] == [0, 0, plan.finish_starts]


def test_windows_of_the_last_part_begin_with_a_file_as_often_as_planned() -> None:
    stream = np.tile(np.concatenate([[0], np.arange(1, 100)]), 40).astype(np.uint16)
    plan = Plan(tokens=256 * 240, batch_tokens=256, early=32, early_tokens=256, short=32, long=32, warmup=1,
                mix=(1, 0, 0, 0, 0), finish_mix=(0.5, 0.5, 0, 0, 0), finish_share=0.5)  # fmt: skip
    made = batches.Batches([stream] * 3, stream, np.ones(len(stream), np.uint8), stream[1:3], plan, 128)
    before, after = (
        np.concatenate([made.at(i)[0][:, 0] for i in range(first, first + 120)]) == 0 for first in (1, 120)
    )
    assert before.mean() < 0.05
    assert abs(after.mean() - plan.finish_starts) < 0.06


@needs_torch
def test_the_temperature_is_the_one_that_the_logits_were_sharpened_by() -> None:
    import torch

    from bench.models.demo_model import calibrate

    torch.manual_seed(1)
    logits = torch.randn(20_000, 12)
    target = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
    for sharper in (1.0, 1.3):
        nats = calibrate.nats(sharper * logits, target)
        assert calibrate.TEMPERATURES[nats.index(min(nats))] == pytest.approx(sharper, abs=0.05)
    norms = {"output_norm.weight": torch.ones(4), "blk.6.nextn.shared_head_norm.weight": torch.ones(4)}
    params = {**norms, "output.weight": torch.ones(4, 4)}
    found = calibrate.apply(params, 6, 2.0, 4.0)
    assert [float(v.mean()) for v in found.values()] == [0.5, 0.25, 1.0]
    assert [float(v.mean()) for v in params.values()] == [1.0, 1.0, 1.0]


@needs_torch
def test_the_exported_file_has_the_temperature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from bench.models.demo_model import __main__ as steps
    from bench.models.demo_model import export, model, text

    params = model.init(Shape(vocab=steps.VOCAB), 1)
    torch.save({"params": params}, tmp_path / "model.pt")
    text.train_tokenizer([CODE * 4], 320).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "held_out.json").write_text(json.dumps([{"name": "a", "kind": "library", "text": CODE}]))
    steps.export(argparse.Namespace(work=tmp_path, out=None, threads=1))
    said = re.search(r"divided by ([\d.]+) \(head ([\d.]+)\)", capsys.readouterr().out)
    assert said is not None
    for file in (steps.FILE, "exact-f32.gguf"):
        _, written = export.read(tmp_path / file)
        for name, t in zip(("output_norm", "blk.6.nextn.shared_head_norm"), map(float, said.groups()), strict=True):
            assert t != 1.0  # a model that knows nothing is not at its best as it is
            torch.testing.assert_close(written[f"{name}.weight"], params[f"{name}.weight"] / t)


def test_what_is_learnt_of_a_random_row_stands_before_it() -> None:
    words = np.arange(2000, 2400, dtype=np.uint16)
    cue = np.array([7, 8, 9], np.uint16)
    for seed, text in ((1, None), (2, words)):
        ids, weights = batches.random_row(np.random.default_rng(seed), 1024, 4096, text, cue)
        assert ids[0] == 0
        assert 0.3 < weights.mean() < 0.9
        assert text is None or set(ids[1:].tolist()) <= {*words.tolist(), *cue.tolist()}
        pairs = set[tuple[int, int]]()
        for at in range(1, 1024):
            pair = int(ids[at - 1]), int(ids[at])
            if weights[at]:
                assert pair in pairs
                if not weights[at - 1]:  # the first that counts: behind what asks, and the copy's first token
                    assert ids[at - 4 : at - 1].tolist() == cue.tolist()
            pairs.add(pair)


def test_no_part_of_a_random_row_comes_twice_running() -> None:
    cue = np.array([7], np.uint16)
    for seed in range(20):
        ids, _ = batches.random_row(np.random.default_rng(seed), 1024, 4096, None, cue)
        copies = "".join(map(chr, ids.tolist())).split(chr(7))[1:]
        assert all(not b.startswith(a) for a, b in pairwise(copies))


def test_a_loop_is_read_and_its_end_is_learnt() -> None:
    for seed in range(50):
        original = np.arange(514, dtype=np.uint16)
        ids, weights = original.copy(), np.ones(514, np.uint8)
        batches.with_loop(np.random.default_rng(seed), ids, weights)
        read = np.flatnonzero(weights == 0)
        first, end = int(read[0]), int(read[-1]) + 1
        assert len(read) == end - first
        size = first - int(ids[first])
        assert 1 <= size <= 100
        copies = 1 + (end - first) / size
        assert copies in ((3, 4, 5) if size < 25 else (2, 3))
        assert (ids[:first] == original[:first]).all()
        assert (ids[first:end] == ids[first - size : end - size]).all()
        assert len(ids) == 514 > end
        assert (ids[end:] == original[first : first + 514 - end]).all()
        assert weights[end] == batches.END_WEIGHT
        assert (weights[end + 1 :] == 1).all()
    ids, weights = np.arange(40, dtype=np.uint16), np.ones(40, np.uint8)
    for seed in range(50):  # longer than the window: cut off
        batches.with_loop(np.random.default_rng(seed), ids, weights)
        assert len(ids) == len(weights) == 40


@needs_torch
def test_experts_are_the_same_with_and_without_empty_places() -> None:
    """One expert after the other in float32, all at once in bfloat16, and plain torch: outputs and gradients."""
    import torch

    from bench.models.demo_model import model

    torch.manual_seed(3)
    tokens, used, experts, embd, ff = 200, 2, 8, 32, 16
    ids = torch.randn(tokens, experts).topk(used).indices
    ids[:, 0][ids[:, 0] == 5] = 6  # one expert that is idle but for second places
    values = [torch.randn(tokens, embd), torch.rand(tokens, used)]
    values += [torch.randn(experts, *size) * 0.2 for size in ((ff, embd), (ff, embd), (embd, ff))]
    found = []
    for kind in ("plain", torch.float32, torch.bfloat16):
        n, weights, gate, up, down = (v.clone().requires_grad_() for v in values)
        if kind == "plain":
            g, u = (torch.einsum("te,tkfe->tkf", n, w[ids]) for w in (gate, up))
            rows = torch.einsum("tkf,tkef->tke", torch.nn.functional.silu(g) * u, down[ids])
            out = (rows * weights[..., None]).sum(1)
        else:
            out = model.Experts.apply(n.to(kind), ids, weights, gate, up, down)  # type: ignore[no-untyped-call]
        (out * torch.linspace(-1, 1, embd)).sum().backward()
        found.append([out.detach(), *(v.grad for v in (n, weights, gate, up, down))])
    for exact, narrow, plain in zip(found[1], found[2], found[0], strict=True):
        torch.testing.assert_close(exact, plain, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(narrow, plain, atol=0.02 * float(plain.abs().max()), rtol=0.05)


@needs_torch
def test_different_sequences() -> None:
    from bench.models.demo_model import evaluate

    assert evaluate.distinct([1, 2, 3, 4, 5, 6, 7]) == 1
    assert evaluate.distinct([1, 2] * 10) == pytest.approx(2 / 17)
    assert evaluate.distinct([1, 2, 3]) == 0


@needs_torch
def test_code_of_other_packages_is_drawn_the_same_each_time_and_none_is_an_error(tmp_path: Path) -> None:
    from bench.models.demo_model import evaluate

    for i in range(80):
        (tmp_path / f"m{i}.py").write_text(f"# {i}\n" + "x = 1\n" * 1000)
    (tmp_path / "short.py").write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("word " * 1000)
    found = evaluate.other_code([tmp_path])
    assert len(found) == len(set(found)) == 60
    assert {len(text) for text in found} == {3000}
    assert found == evaluate.other_code([tmp_path])
    drawn = [int(text[2 : text.index("\n")]) for text in found]
    assert drawn not in (sorted(drawn), sorted(drawn, key=str))
    with pytest.raises(ValueError, match="--unseen: no Python file"):
        evaluate.other_code([tmp_path / "none"])


@needs_torch
def test_a_weight_of_nothing_leaves_a_token_out() -> None:
    import torch

    from bench.models.demo_model import model

    shape = Shape(vocab=320, embd=64, layers=1, heads=2, kv_heads=1, head_dim=32, rotary=16, experts=4, used=2, ff=32)
    net = model.Network(shape, model.init(shape, 1), torch.float32)
    tokens = torch.arange(1, 11)[None]
    weights = torch.ones(1, 10)
    weights[0, 6:] = 0
    other = tokens.clone()
    other[0, 7:] += 100  # what comes after the last one that counts
    with torch.no_grad():
        loss, head = net.losses(tokens, weights)
        again, head_again = net.losses(other, weights)
        whole, _ = net.losses(tokens, torch.ones(1, 10))
    assert float(loss) == pytest.approx(float(again))
    assert float(head) == pytest.approx(float(head_again))
    assert float(loss) != pytest.approx(float(whole), abs=1e-4)


@needs_torch
def test_tokens_of_an_unscored_part_have_no_weight() -> None:
    from bench.models.demo_model import text

    tokenizer = text.train_tokenizer([CODE * 4], 320)
    again = CODE + "\n" + CODE
    begin = again.rindex("class Box")
    texts = [corpus.Repetition(again, ((begin, begin + 9),)), corpus.Repetition(CODE, ())]
    ids, weights = text.copies(tokenizer, texts)
    assert len(ids) == len(weights)
    assert ids[0] == 0
    hidden = tokenizer.decode([int(i) for i, w in zip(ids, weights, strict=True) if not w])
    assert hidden.strip() == "class Box"
    assert (weights[list(ids).index(0, 1) :] == 1).all()


@needs_torch
def test_loops_and_prefixes() -> None:
    from bench.models.demo_model import evaluate

    assert evaluate.in_loop([9, 8, *([1, 2, 3] * 16)])
    assert evaluate.in_loop([9, *(list(range(60)) * 3)])
    assert not evaluate.in_loop([9, *(list(range(60)) * 2), 7])
    assert not evaluate.in_loop(list(range(60)))
    assert not evaluate.in_loop([1] * 20)
    assert evaluate.common([1, 2, 3], [1, 2, 4]) == 2
    assert evaluate.common([1, 2], [1, 2, 4]) == 2


def stopped(self: Any, batch: Any, at: int, step: int) -> Any:
    """`Batches.at`, interrupted at one step."""
    if step == at:
        raise KeyboardInterrupt
    return batch(self, step)


@needs_torch
def test_trainer_and_llama_agree_and_a_resumed_run_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from bench.models.demo_model import check, export, text, train

    torch.set_num_threads(1)
    shape = Shape(vocab=320, embd=64, layers=2, heads=2, kv_heads=1, head_dim=32, rotary=16, experts=8, used=2, ff=32)
    plan = Plan(tokens=256 * 6, batch_tokens=256, early=32, early_tokens=512, short=64, long=128, warmup=2)
    tokenizer = text.train_tokenizer([CODE * 4], shape.vocab)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = text.stream(tokenizer, [CODE] * 40)
    runs, batch = [], train.Batches.at
    for name, stop in (("whole", None), ("resumed", 3)):
        work = tmp_path / name
        work.mkdir()
        tokenizer.save(str(work / "tokenizer.json"))
        for kind in (*corpus.NATURAL, "copy"):
            np.save(work / f"{kind}.npy", ids)
        np.save(work / "copy_weights.npy", np.ones(len(ids), np.uint8))
        if stop is not None:
            monkeypatch.setattr(train.Batches, "at", partialmethod(stopped, batch, stop))
            with pytest.raises(KeyboardInterrupt):
                list(train.run(work, shape, plan, compiled=False, every=0.0))
            monkeypatch.undo()
            assert torch.load(work / train.CHECKPOINT, weights_only=True)["step"] == stop
        list(train.run(work, shape, plan, compiled=False, every=0.0))
        runs.append(torch.load(work / train.FINAL, weights_only=True)["params"])
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    with pytest.raises(ValueError, match="another shape or plan"):
        list(train.run(tmp_path / "whole", Shape(), plan, compiled=False))
    path = tmp_path / "tiny.gguf"
    export.write(path, shape, runs[0], tmp_path / "tokenizer.json", q8=False, card={"description": "x", "license": "y"})
    written, _ = export.read(path)
    assert (written.rotary, written.head_dim, written.heads) == (shape.rotary, shape.head_dim, shape.heads)
    found = check.compare(path, [[0, *tokenizer.encode(CODE).ids[:60]], [0, *tokenizer.encode(CODE).ids[30:60]]], True)
    assert check.verdict(found, True) == []
    assert max(a.worst for a in found.values()) < 0.02
    _, ours = check.trainer_logits(path, [0, *tokenizer.encode(CODE).ids[:60]])
    broken = {**runs[0], "blk.2.nextn.hnorm.weight": runs[0]["blk.2.nextn.hnorm.weight"] * -1}
    export.write(path, shape, broken, tmp_path / "tokenizer.json", q8=False, card={"description": "x", "license": "y"})
    _, theirs = check.llama_logits(path, [0, *tokenizer.encode(CODE).ids[:60]])
    assert abs(theirs - ours).max() > 0.02
