"""What bad model files get: one line that names them, a fitting exit code, no crash, no hang."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_process import check_refused, run
from conftest import SMALL, in_a_process
from gguf_edit import Gguf

import bmoe

QUICK = ("-p", "Hello there", "-n", "2", "-t", "1", "-c", "64", "--cache-mb", "0", "--io-threads", "1")
I32, DEPRECATED = 26, 4


@pytest.fixture(scope="module")
def hybrid(tiny: Any) -> Path:
    return tiny("qwen35moe", **SMALL)


# ---- files that are no model ----------------------------------------------------------------------


def no_file(path: Path, good: Path) -> None:
    pass


def directory(path: Path, good: Path) -> None:
    path.mkdir()


def fifo(path: Path, good: Path) -> None:
    os.mkfifo(path)


def dangling_link(path: Path, good: Path) -> None:
    path.symlink_to("nowhere")


def link_to_itself(path: Path, good: Path) -> None:
    path.symlink_to(path.name)


def empty(path: Path, good: Path) -> None:
    path.touch()


def text(path: Path, good: Path) -> None:
    path.write_text("Once upon a time")


def cut_at(n: int) -> Callable[[Path, Path], None]:
    def make(path: Path, good: Path) -> None:
        path.write_bytes(good.read_bytes()[:n])

    return make


def last_byte_missing(path: Path, good: Path) -> None:
    path.write_bytes(good.read_bytes()[:-1])


def version(n: int) -> Callable[[Path, Path], None]:
    def make(path: Path, good: Path) -> None:
        path.write_bytes(good.read_bytes()[:4] + struct.pack("<I", n) + good.read_bytes()[8:])

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (no_file, "no such file"),
        (directory, "not a file"),
        (fifo, "not a file"),
        (dangling_link, "no such file"),
        (link_to_itself, "cannot read"),
        (empty, "is empty"),
        (text, "not a GGUF file"),
        (cut_at(3), "not a GGUF file"),
        (cut_at(4), "header"),
        (cut_at(23), "header"),
        (cut_at(24), "header"),
        (cut_at(100), "header"),
        (cut_at(3000), "header"),
        (cut_at(20_000), "truncated: tensor"),
        (last_byte_missing, "truncated: tensor output.weight"),
        (version(0), "version"),
        (version(1), "GGUFv1"),
        (version(99), "version 99"),
        (version(3 << 24), "endianness"),
    ],
)
def test_what_is_no_model(tmp_path: Path, moe: Path, make: Callable[[Path, Path], None], says: str) -> None:
    path = tmp_path / "m.gguf"
    make(path, moe)
    before = sorted(tmp_path.iterdir())
    check_refused(run("-m", path, *QUICK), str(path), says)
    assert sorted(tmp_path.iterdir()) == before


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    check_refused(run("-m", path, *QUICK), "x" * 300, "name too long")


# ---- shards ----------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path, tiny: Any) -> list[Path]:
    """Copies of a model's three shards."""
    first = tiny("qwen3moe", shards=3, **(SMALL | {"n_layer": 3}))
    there = sorted(first.parent.glob(first.name.replace("00001-of", "*-of")))
    assert len(there) == 3
    return [Path(shutil.copy(p, tmp_path / f"m-{i:05d}-of-00003.gguf")) for i, p in enumerate(there, 1)]


def test_shards_run(shards: list[Path]) -> None:
    assert run("-m", shards[0], *QUICK).code == 0


def test_a_missing_shard(shards: list[Path]) -> None:
    shards[1].unlink()
    check_refused(run("-m", shards[0], *QUICK), str(shards[1]), "missing", "all 3 must lie side by side")
    shards[2].unlink()
    check_refused(run("-m", shards[0], *QUICK), str(shards[1]), "and 1 more")


def test_the_wrong_shard_opened(shards: list[Path]) -> None:
    check_refused(run("-m", shards[1], *QUICK), "this is shard 2 of 3", "open m-00001-of-00003.gguf")


def test_a_renamed_shard(shards: list[Path]) -> None:
    other = shards[0].rename(shards[0].with_name("first.gguf"))
    check_refused(run("-m", other, *QUICK), str(other), "must end in -00001-of-00003.gguf")


def test_shards_swapped(shards: list[Path]) -> None:
    shards[1].rename(shards[0].with_name("x"))
    shards[2].rename(shards[1])
    shards[0].with_name("x").rename(shards[2])
    check_refused(run("-m", shards[0], *QUICK), str(shards[1]), "foreign", "shard 3 of 3, expected shard 2 of 3")


def test_foreign_shards(shards: list[Path], moe: Path) -> None:
    good = shards[2].read_bytes()
    shutil.copy(moe, shards[2])
    check_refused(run("-m", shards[0], *QUICK), str(shards[2]), "foreign", "no shard")
    shards[2].write_bytes(good[:300])
    check_refused(run("-m", shards[0], *QUICK), str(shards[2]), "header")
    shards[2].write_bytes(good[:-1000])
    check_refused(run("-m", shards[0], *QUICK), str(shards[2]), "truncated: tensor")
    # Right numbers, wrong model: the same tensors twice, or too few of them.
    alien = Gguf(shards[1]).set("split.no", struct.pack("<H", 2), kind=2)
    alien.write(shards[2])
    check_refused(run("-m", shards[0], *QUICK), str(shards[0]), "foreign")


# ---- headers that lie -------------------------------------------------------------------------------

Change = Callable[[Gguf], object]
ARCH = "qwen3moe"


def dims(name: str, *values: int) -> Change:
    return lambda g: setattr(g.tensor(name), "dims", list(values))


def kind(name: str, value: int) -> Change:
    return lambda g: setattr(g.tensor(name), "type", value)


def rename(old: str, new: bytes) -> Change:
    return lambda g: setattr(g.tensor(old), "name", new)


def offset(name: str, value: int) -> Change:
    return lambda g: setattr(g.tensor(name), "offset", value)


def count(which: str, value: int) -> Change:
    return lambda g: setattr(g, which, value)


def put(key: str, value: Any, kind: int | None = None) -> Change:
    return lambda g: g.set(key, value, kind)


def drop(*keys: str) -> Change:
    return lambda g: g.drop(*keys)


def a_token_twice(g: Gguf) -> None:
    kind, value = g.kv["tokenizer.ggml.tokens"]
    g.kv["tokenizer.ggml.tokens"] = kind, value.replace(b"\x03\0\0\0\0\0\0\0the", b"\x03\0\0\0\0\0\0\0and")


GATE = "blk.0.ffn_gate_exps.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (count("n_tensors", 1 << 62), "header"),
        (count("n_tensors", 1 << 40), "header"),
        (count("n_kv", 1 << 63), "header"),
        (count("n_kv", 1), "header"),
        (put("general.name", struct.pack("<Q", 1 << 60), kind=8), "header"),
        (put("general.name", struct.pack("<Q", 1 << 29), kind=8), "header"),
        (put("x", struct.pack("<IQ", 4, 1 << 60), kind=9), "header"),
        (put("x", struct.pack("<IQ", 9, 1), kind=9), "header"),
        (put("x", b"", kind=99), "header"),
        (dims(GATE, 1 << 62, 1 << 62, 4), "header"),
        (dims(GATE, 64, (1 << 64) - 1, 4), "header"),
        (dims(GATE, 64, 32, 4, 1, 1), "header"),
        (dims(GATE, 64, 32, 1 << 40), "header"),
        (dims(GATE, 64, 16, 8), "blk.0.ffn_gate_exps.weight"),
        (kind(GATE, 999), "header"),
        (kind(GATE, DEPRECATED), "header"),
        (kind(GATE, I32), f"tensor {GATE} has type i32"),
        (kind("output.weight", 9), "tensor output.weight has type q8_1"),
        (kind("blk.1.attn_norm.weight", I32), "tensor blk.1.attn_norm.weight has type i32"),
        (offset(GATE, 1 << 62), "header"),
        (offset(GATE, 7), "header"),
        (rename("output_norm.weight", b"blk.0.attn_q.weight"), "header"),
        (rename("output_norm.weight", b"x" * 64), "header"),
        (rename("output_norm.weight", b"output_norm.\xff"), "the name of a tensor is not text"),
        (rename("output_norm.weight", b"output_n0rm.weight"), "output_norm.weight"),
        (drop("general.architecture"), "no key general.architecture"),
        (put("general.architecture", 7), "no key general.architecture"),
        (put("general.architecture", "mystery"), "mystery"),
        (put("general.architecture", "a\x1b[31m\nb"), "a\\x1b[31m\\nb"),
        (put("general.type", "adapter"), "LoRA adapter"),
        (drop(f"{ARCH}.block_count"), f"key not found in model: {ARCH}.block_count"),
        (drop(f"{ARCH}.attention.head_count"), "blk.0.attn_q.weight"),
        (put(f"{ARCH}.block_count", "two"), f"key {ARCH}.block_count has wrong type str"),
        (put(f"{ARCH}.block_count", ["2"]), f"{ARCH}.block_count"),
        (put(f"{ARCH}.block_count", 3), "blk.2."),
        (put(f"{ARCH}.block_count", 1 << 30), "n_layer_all"),
        (put(f"{ARCH}.block_count", (1 << 32) - 1), f"key {ARCH}.block_count is {(1 << 32) - 1}"),
        (put(f"{ARCH}.embedding_length", 0), "tensor 'token_embd.weight' has wrong shape"),
        (put(f"{ARCH}.attention.head_count", 0), "tensor 'blk.0.attn_q.weight' has wrong shape"),
        (put(f"{ARCH}.attention.head_count", 3), "tensor 'blk.0.attn_q.weight' has wrong shape"),
        (put(f"{ARCH}.expert_used_count", 5), "GGML_ASSERT"),
        (put(f"{ARCH}.expert_used_count", 0), "GGML_ASSERT"),
        (put(f"{ARCH}.expert_count", 0), "n_expert_used_max <= hparams.n_expert"),
        (put(f"{ARCH}.attention.layer_norm_rms_epsilon", -1.0), "layer_norm_rms_epsilon is -1.0"),
        (put(f"{ARCH}.attention.layer_norm_rms_epsilon", float("nan")), "layer_norm_rms_epsilon is nan"),
        (put(f"{ARCH}.rope.dimension_count", 7), f"key {ARCH}.rope.dimension_count is 7"),
        (put(f"{ARCH}.rope.dimension_count", 0), f"key {ARCH}.rope.dimension_count is 0"),
        (put("split.count", "many"), "key split.count is 'many'"),
        (put("split.count", 1 << 31), "so the name must end in"),
        (drop("tokenizer.ggml.model"), "tokenizer.ggml.model"),
        (put("tokenizer.ggml.model", "none"), "no vocabulary"),
        (drop("tokenizer.ggml.tokens"), "tokeniz"),
        (put("tokenizer.ggml.tokens", 5), "tokeniz"),
        (put("tokenizer.ggml.tokens", ["a", "b"]), "tensor 'token_embd.weight' has wrong shape"),
        (drop("tokenizer.ggml.merges"), "merges"),
        (a_token_twice, "GGML_ASSERT(id_to_token.size() == token_to_id.size())"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, moe: Path, change: Change, says: str) -> None:
    gguf = Gguf(moe)
    change(gguf)
    path = gguf.write(tmp_path / "m.gguf")
    done = run("-m", path, *QUICK)
    check_refused(done, str(path), says)
    assert "/llama.cpp/" not in done.err
    assert done.seconds < 10


IN_A_LIBRARY = """
import pathlib
bad = pathlib.Path(sys.argv[1])
for path in (bad, bad.with_name("good.gguf")):
    try:
        with bmoe.Engine.open(path, threads=1, cache_mb=0, ctx=64) as engine:
            print(len(list(engine.generate("Hello there", max_tokens=2, stop_at_end=False))))
    except bmoe.ModelError as e:
        print(e)
"""


def test_an_assertion_while_loading_is_an_exception(tmp_path: Path, moe: Path) -> None:
    """In a library: the process lives, and opens another file."""
    path = Gguf(moe).set(f"{ARCH}.expert_used_count", 5).write(tmp_path / "m.gguf")
    shutil.copy(moe, tmp_path / "good.gguf")
    refused, runs = in_a_process(IN_A_LIBRARY, path)
    assert str(path) in refused
    assert "GGML_ASSERT" in refused
    assert runs == "2"


def test_a_number_of_experts_for_each_layer(tmp_path: Path, moe: Path) -> None:
    n_used = 2
    path = Gguf(moe).set(f"{ARCH}.expert_used_count", struct.pack("<IQII", 4, 2, n_used, n_used), kind=9)
    path = path.write(tmp_path / "m.gguf")
    with bmoe.Engine.open(moe, threads=1, ctx=64) as plain, bmoe.Engine.open(path, threads=1, ctx=64) as engine:
        assert plain.n_used == engine.n_used == n_used
        runs = [[t.id for t in e.generate("Hello there", max_tokens=4, stop_at_end=False)] for e in (plain, engine)]
    assert runs[0] == runs[1]
    check_refused(run("-m", path, *QUICK, "--n-expert-used", "1"), "--n-expert-used", str(path), code=2)


def test_a_file_put_together_again_runs(tmp_path: Path, moe: Path) -> None:
    assert run("-m", Gguf(moe).write(tmp_path / "m.gguf"), *QUICK).code == 0


def test_values_that_only_a_graph_notices(tmp_path: Path, hybrid: Path) -> None:
    """A zero that llama.cpp divides by; and an assertion inside the graph, which nothing can catch."""
    path = Gguf(hybrid).set("qwen35moe.full_attention_interval", 0).write(tmp_path / "zero.gguf")
    check_refused(run("-m", path, *QUICK), str(path), "full_attention_interval is 0")
    path = Gguf(hybrid).set("qwen35moe.rope.dimension_count", 1 << 20).write(tmp_path / "assert.gguf")
    done = run("-m", path, *QUICK)
    assert done.code == 1
    assert done.last.startswith("bmoe: llama.cpp gave up: ")
    assert "GGML_ASSERT(n_dims <= ne0)" in done.last


def damage(good: bytes, header: int, seed: int) -> bytes:
    """The file with a few bytes of its header changed, or cut off somewhere in it."""
    r = random.Random(seed)
    if seed % 4 == 0:
        return good[: r.randrange(header)]
    raw = bytearray(good)
    for _ in range(r.randint(1, 3)):
        at = r.randrange(4, header - 8)
        if seed % 4 == 1:
            raw[at] ^= 1 << r.randrange(8)
        elif seed % 4 == 2:
            raw[at] = r.choice([0, 1, 127, 128, 255])
        else:
            raw[at : at + 8] = struct.pack("<Q", r.choice([0, 1, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]))
    return bytes(raw)


def test_damaged_headers(tmp_path: Path, moe: Path) -> None:
    good, path = moe.read_bytes(), tmp_path / "m.gguf"
    header = len(Gguf(moe).header())
    codes = {0: 0, 1: 0}
    for seed in range(300):
        path.write_bytes(damage(good, header, seed))
        done = run("-m", path, *QUICK, "-q", timeout=10)
        assert done.code in codes, (seed, done)
        codes[done.code] += 1
        if done.code:
            assert done.err.startswith("bmoe: "), (seed, done)
            assert done.err.count("\n") == 1, (seed, done)
    assert codes[1] > 100
