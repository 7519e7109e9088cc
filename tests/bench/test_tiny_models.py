"""The tiny models themselves: stock llama.cpp must load and decode every one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from bench.models.tiny import ARCHES, QUANTS, SPECIALS, prompt_ids, scripted_routes, vocabulary, write_tiny
from bench.reference import Resident

TEXT = "The quick brown fox jumps över the lazy dog, 12 times."


@pytest.fixture(autouse=True)
def _plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep weights in the file's own layout.

    The AMX layout crashes where llama.cpp was built by a GCC that drops the stores to the tile
    configuration (ggml-org/llama.cpp#20824), and repacked weights would make results depend on the CPU.
    """
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def plain() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", plain)


class Run:
    """A loaded model, its greedy continuation of `TEXT`, and the logits of each step."""

    def __init__(self, path: Path, steps: int = 16) -> None:
        llm = llama_cpp.Llama(
            model_path=str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, use_mmap=True
        )
        try:
            tokens = llm.tokenize(TEXT.encode(), add_bos=False)
            self.round_trip = llm.detokenize(tokens).decode()
            self.special = llm.tokenize(SPECIALS[1].encode(), add_bos=False, special=True)
            self.eos = llm.token_eos()
            self.logits: list[NDArray[np.float32]] = []
            self.tokens: list[int] = []
            step = tokens[:20]
            for _ in range(steps):
                llm.eval(step)
                last = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
                self.logits.append(np.ctypeslib.as_array(last, (llm.n_vocab(),)).copy())
                step = [int(self.logits[-1].argmax())]
                self.tokens += step
        finally:
            llm.close()


def check(run: Run) -> None:
    assert all(np.isfinite(logits).all() for logits in run.logits)
    assert run.logits[-1].std() > 1
    assert len(set(run.tokens)) >= 3
    assert run.eos not in run.tokens


def expert_tensors(*paths: Path) -> Iterator[Any]:
    for path in paths:
        for tensor in GGUFReader(path).tensors:
            if tensor.name.endswith("_exps.weight"):
                yield tensor


@pytest.mark.parametrize("arch", ARCHES)
def test_each_architecture_decodes(tmp_path: Path, arch: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch)
    run = Run(path)
    check(run)
    assert run.round_trip == TEXT
    assert run.special == [vocabulary().index(SPECIALS[1])]
    experts = list(expert_tensors(path))
    assert bool(experts) == (arch != "llama")
    assert all(len(tensor.shape) == 3 and tensor.shape[2] == 8 for tensor in experts)


@pytest.mark.parametrize("quant", QUANTS)
def test_each_quantization_decodes(tmp_path: Path, quant: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", "qwen3moe", quant)
    check(Run(path))
    names = {tensor.tensor_type.name for tensor in expert_tensors(path)}
    assert names == ({"Q4_K", "Q6_K", "Q8_0"} if quant == "mixed" else {quant})


def test_mixed_differs_within_a_layer_and_between_layers(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "qwen3moe", "mixed")
    types = {tensor.name: tensor.tensor_type for tensor in expert_tensors(path)}
    up, down = ([types[f"blk.{il}.ffn_{part}_exps.weight"] for il in range(3)] for part in ("up", "down"))
    assert len(set(up)) == len(set(down)) == 3
    assert all(a != b for a, b in zip(up, down, strict=True))


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "whole.gguf", "qwen3moe")
    first = write_tiny(tmp_path / "m.gguf", "qwen3moe", shards=3)
    assert first.name == "m-00001-of-00003.gguf"
    shards = sorted(tmp_path.glob("m-*"))
    layers = [{tensor.name.split(".")[1] for tensor in expert_tensors(shard)} for shard in shards]
    assert layers == [{"0"}, {"1"}, {"2"}]
    sharded, single = Run(first), Run(whole)
    assert sharded.tokens == single.tokens
    np.testing.assert_array_equal(sharded.logits[-1], single.logits[-1])


@pytest.mark.parametrize("arch", ["glm4moe", "qwen35moe", "deepseek2"])
def test_a_nextn_block_is_there_and_left_alone(tmp_path: Path, arch: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch, nextn=True, shards=2)
    check(Run(path))
    last = [tensor.name for tensor in expert_tensors(*tmp_path.glob("m-*")) if ".3." in tensor.name]
    assert len(last) == 3


def test_the_seed_decides_the_file(tmp_path: Path) -> None:
    a, b, c = (write_tiny(tmp_path / f"{i}.gguf", "qwen3moe", seed=seed) for i, seed in enumerate((0, 0, 1)))
    assert a.read_bytes() == b.read_bytes()
    assert a.read_bytes() != c.read_bytes()


@pytest.mark.parametrize(
    ("arch", "quant", "options"),
    [
        ("mystery", "F32", {}),
        ("llama", "Q9_9", {}),
        ("llama", "F32", {"nextn": True}),
        ("llama", "F32", {"shards": 4}),
        ("llama", "F32", {"n_layer": 1}),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, arch: str, quant: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        write_tiny(tmp_path / "m.gguf", arch, quant, **options)


@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
def test_a_scripted_model_routes_by_its_tokens(quant: str, tmp_path: Path) -> None:
    """Whatever the tokens before were; and different tokens, and layers, route differently."""
    path = write_tiny(tmp_path / "scripted.gguf", "qwen3moe", quant, n_layer=4, n_expert=16, n_used=4, scripted=True)
    tokens = prompt_ids(120)
    with Resident(path, ubatch=16, record=True) as model:
        model.eval(tokens)
        routes = model.routes
    for layer in range(3):  # of the last layer llama.cpp computes only the rows whose logits are wanted
        rows = [tuple(row) for il, batch in routes if il == layer for row in batch]
        assert rows == [scripted_routes(t, layer, 16, 4) for t in tokens]
        assert len(set(rows)) > 16
    assert scripted_routes(0, 0, 16, 4) != scripted_routes(0, 1, 16, 4)
