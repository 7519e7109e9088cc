"""The demo model's recipe: its text, its schedule, and, where torch is installed, its network against llama.cpp."""

from __future__ import annotations

import importlib.util
import random
import re
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.demo_model import batches, corpus
from bench.demo_model.shape import Plan, Shape

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


def test_a_repetition_has_definitions_that_come_again() -> None:
    text = "\n\n".join(f"def name{i}(value):\n    return value * {i} + value\n" + "    # more\n" * 25 for i in range(6))
    documents = [corpus.Document("lib/a.py", "library", text, False)]
    made = corpus.repetitions(documents, 40, seed=3)
    assert made == corpus.repetitions(documents, 40, seed=3)
    again = edited = 0
    for m in made:
        blocks = re.split(r"\n(?=def )", m.text)
        assert sum(map(len, blocks)) <= 3600 + max(map(len, blocks))
        at, first = 0, dict[str, str]()
        for block in blocks:
            name = re.match(r"def (\w+)", block)
            assert name is not None
            hidden = (max(0, at - 1), at + name.end())
            assert (hidden in m.unscored) == (name.group() in first)
            body = first.setdefault(name.group(), block.rstrip())
            again += hidden in m.unscored
            edited += body != block.rstrip()
            at += len(block) + 1
    assert 0.05 < edited / again < 0.3


def test_an_edited_definition_keeps_its_first_line() -> None:
    block = "def area(width):\n    width = width + 1\n    return width * 2\n"
    edited = corpus.renamed(block, random.Random(0))
    assert edited.startswith("def area(width):\n")
    assert "width" not in edited.split("\n", 1)[1].replace("widths", "")
    assert corpus.renamed("def f(): pass\n", random.Random(0)) == "def f(): pass\n"


def test_the_schedule_warms_up_holds_and_falls() -> None:
    plan = Plan(tokens=8192 * 1000)
    rates = [plan.rate_at(i) for i in range(plan.steps)]
    assert plan.steps == 1000
    assert rates[0] == pytest.approx(plan.rate / plan.warmup)
    assert max(rates) == plan.rate == rates[plan.warmup] == rates[399]
    assert rates[-1] == pytest.approx(plan.rate * (plan.floor + (1 - plan.floor) / 600))
    assert rates[400:] == sorted(rates[400:], reverse=True)
    assert [plan.length(i) for i in (0, 299, 300, 749, 750, 999)] == [256, 256, 512, 512, 1024, 1024]
    assert plan.mix_at(299) == plan.early_mix
    assert plan.mix_at(300) == plan.mix
    assert sum(plan.mix) == pytest.approx(1)
    assert sum(plan.early_mix) == pytest.approx(1)


def test_what_is_learnt_of_a_random_row_stands_before_it() -> None:
    words = np.arange(2000, 2400, dtype=np.uint16)
    for seed, text in ((1, None), (2, words)):
        ids, weights = batches.random_row(np.random.default_rng(seed), 1024, 4096, text)
        assert ids[0] == 0
        assert 0.3 < weights.mean() < 0.9
        assert text is None or set(ids[1:].tolist()) <= set(words.tolist())
        pairs = set[tuple[int, int]]()
        for at in range(1, 1024):
            pair = int(ids[at - 1]), int(ids[at])
            if weights[at]:
                assert pair in pairs
            pairs.add(pair)


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
        assert copies in ((3, 4, 5) if size < 25 else (3,))
        assert (ids[:first] == original[:first]).all()
        assert (ids[first:end] == ids[first - size : end - size]).all()
        assert len(ids) == 514 > end
        assert (ids[end:] == original[first : first + 514 - end]).all()


@needs_torch
def test_a_weight_of_nothing_leaves_a_token_out() -> None:
    import torch

    from bench.demo_model import model

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
    from bench.demo_model import text

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
    from bench.demo_model import evaluate

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

    from bench.demo_model import check, export, text, train

    torch.set_num_threads(1)
    shape = Shape(vocab=320, embd=64, layers=2, heads=2, kv_heads=1, head_dim=32, rotary=16, experts=8, used=2, ff=32)
    plan = Plan(tokens=256 * 6, batch_tokens=256, early=32, short=64, long=128, warmup=2)
    tokenizer = text.train_tokenizer([CODE * 4], shape.vocab)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = text.stream(tokenizer, [CODE] * 40)
    runs, batch = [], train.Batches.at
    for name, stop in (("whole", None), ("resumed", 3)):
        work = tmp_path / name
        work.mkdir()
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
    found = check.compare(path, [0, *tokenizer.encode(CODE).ids[:60]], True)
    assert check.verdict(found, True) == []
    assert max(a.worst for a in found.values()) < 0.02
    _, ours = check.trainer_logits(path, [0, *tokenizer.encode(CODE).ids[:60]])
    broken = {**runs[0], "blk.2.nextn.hnorm.weight": runs[0]["blk.2.nextn.hnorm.weight"] * -1}
    export.write(path, shape, broken, tmp_path / "tokenizer.json", q8=False, card={"description": "x", "license": "y"})
    _, theirs = check.llama_logits(path, [0, *tokenizer.encode(CODE).ids[:60]])
    assert abs(theirs - ours).max() > 0.02
