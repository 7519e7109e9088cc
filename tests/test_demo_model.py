"""The demo model's recipe: its text, its schedule, and, where torch is installed, its network against llama.cpp."""

from __future__ import annotations

import importlib.util
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from bench.demo_model import corpus
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


def test_a_repetition_has_its_first_definition_again_at_its_end() -> None:
    text = "\n\n".join(f"def name{i}(value):\n    return value * {i} + value\n" + "    # more\n" * 25 for i in range(6))
    made = corpus.repetitions([corpus.Document("lib/a.py", "library", text, False)], 20, seed=3)
    assert made == corpus.repetitions([corpus.Document("lib/a.py", "library", text, False)], 20, seed=3)
    assert all(len(t) <= 2800 for t in made)
    whole = 0
    for t in made:
        first = t.split("\n", 1)[0].split("(")[0]
        assert t.count(first + "(") == 2
        half = t[: len(t) - t[::-1].index(first[::-1]) - len(first)]
        whole += t[len(half) :] == t[: len(t) - len(half)]
    assert 0 < whole < 20  # some come back edited


def test_the_schedule_warms_up_holds_and_falls() -> None:
    plan = Plan(tokens=8192 * 1000)
    rates = [plan.rate_at(i) for i in range(plan.steps)]
    assert plan.steps == 1000
    assert rates[0] == pytest.approx(plan.rate / plan.warmup)
    assert max(rates) == plan.rate == rates[plan.warmup] == rates[399]
    assert rates[-1] == pytest.approx(plan.rate * (plan.floor + (1 - plan.floor) / 600))
    assert rates[400:] == sorted(rates[400:], reverse=True)
    assert [plan.length(i) for i in (0, 749, 750, 999)] == [512, 512, 1024, 1024]


@needs_torch
def test_loops_and_prefixes() -> None:
    from bench.demo_model import evaluate

    assert evaluate.in_loop([9, 8, *([1, 2, 3] * 16)])
    assert not evaluate.in_loop(list(range(60)))
    assert not evaluate.in_loop([1] * 20)
    assert evaluate.common([1, 2, 3], [1, 2, 4]) == 2
    assert evaluate.common([1, 2], [1, 2, 4]) == 2


def stopped(batches: Any, batch: Any, at: int, step: int) -> Any:
    """`Batches.at`, interrupted at one step."""
    if step == at:
        raise KeyboardInterrupt
    return batch(batches, step)


@needs_torch
def test_trainer_and_llama_agree_and_a_resumed_run_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    import torch

    from bench.demo_model import check, export, text, train

    torch.set_num_threads(1)
    shape = Shape(vocab=320, embd=64, layers=2, heads=2, kv_heads=1, head_dim=32, experts=8, used=2, ff=32)
    plan = Plan(tokens=256 * 6, batch_tokens=256, short=64, long=128, warmup=2)
    tokenizer = text.train_tokenizer([CODE * 4], shape.vocab)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = text.stream(tokenizer, [CODE] * 40)
    runs, batch = [], train.Batches.at
    for name, stop in (("whole", None), ("resumed", 3)):
        work = tmp_path / name
        work.mkdir()
        for kind in text.KINDS:
            np.save(work / f"{kind}.npy", ids)
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
    found = check.compare(path, [0, *tokenizer.encode(CODE).ids[:60]], True)
    assert check.verdict(found, True) == []
    assert max(a.worst for a in found.values()) < 0.02
    _, ours = check.trainer_logits(path, [0, *tokenizer.encode(CODE).ids[:60]])
    broken = {**runs[0], "blk.2.nextn.hnorm.weight": runs[0]["blk.2.nextn.hnorm.weight"] * -1}
    export.write(path, shape, broken, tmp_path / "tokenizer.json", q8=False, card={"description": "x", "license": "y"})
    _, theirs = check.llama_logits(path, [0, *tokenizer.encode(CODE).ids[:60]])
    assert abs(theirs - ours).max() > 0.02
