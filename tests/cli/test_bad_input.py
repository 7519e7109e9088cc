"""What bad model files and bad reads get: one line that names them, a fitting exit code, no crash, no hang."""

from __future__ import annotations

import os
import random
import resource
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_process import Finished, run, start
from conftest import in_a_process
from gguf_edit import Gguf

import bmoe
from bmoe.host import memory

SMALL = {"n_layer": 2, "n_embd": 64, "n_ff": 32, "n_expert": 4}
QUICK = ("-p", "Hello there", "-n", "2", "-t", "1", "-c", "64", "--cache-mb", "0", "--io-threads", "1")
I32, DEPRECATED = 26, 4


@pytest.fixture(scope="module")
def moe(tiny: Any) -> Path:
    return tiny("qwen3moe", **SMALL)


@pytest.fixture(scope="module")
def hybrid(tiny: Any) -> Path:
    return tiny("qwen35moe", **SMALL)


def check_refused(done: Finished, *parts: str, code: int = 1) -> None:
    """One line on stderr that starts with the program's name and holds each of `parts`, and nothing else."""
    assert done.code == code, done
    assert done.out == ""
    assert done.err.startswith("bmoe: "), done.err
    assert done.err.count("\n") == 1, done.err
    for part in parts:
        assert part in done.err


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
        (put(f"{ARCH}.block_count", 1 << 30), "bmoe"),
        (put(f"{ARCH}.block_count", (1 << 32) - 1), f"key {ARCH}.block_count is {(1 << 32) - 1}"),
        (put(f"{ARCH}.embedding_length", 0), "bmoe"),
        (put(f"{ARCH}.attention.head_count", 0), "bmoe"),
        (put(f"{ARCH}.attention.head_count", 3), "bmoe"),
        (put(f"{ARCH}.expert_used_count", 5), "GGML_ASSERT"),
        (put(f"{ARCH}.expert_used_count", 0), "GGML_ASSERT"),
        (put(f"{ARCH}.expert_count", 0), "bmoe"),
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
        (put("tokenizer.ggml.tokens", ["a", "b"]), "bmoe"),
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


def test_a_context_beyond_memory(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address space would hold it; only touching it would be fatal, so it must not be granted."""
    little = memory.MemoryFacts(mem_total=1 << 30, mem_available=100 << 20)
    monkeypatch.setattr(memory, "read_memory_facts", lambda: little)
    with pytest.raises(bmoe.BmoeError, match=r"cannot make a context of 1048576 tokens \(.*\): use a smaller -c"):
        bmoe.Engine.open(moe, threads=1, cache_mb=0, ctx=1 << 20)
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    with bmoe.Engine.open(moe, threads=1, cache_mb=0, ctx=1 << 10) as engine:
        assert len(list(engine.generate("Hello there", max_tokens=2, stop_at_end=False))) == 2


def test_no_thread_for_the_background(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "bmoe-populate":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    # Room for what the tests before have left in this process, too: it is taken off the cache.
    with bmoe.Engine.open(moe, threads=1, cache_mb=512, ctx=64) as engine:
        assert len(list(engine.generate("Hello there", max_tokens=2, stop_at_end=False))) == 2


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


# ---- files and disks that fail while running -----------------------------------------------------------


def test_a_file_that_shrinks(tmp_path: Path, moe: Path, open_engine: Any) -> None:
    path = Path(shutil.copy(moe, tmp_path / "m.gguf"))
    good = path.read_bytes()
    wanted = [t.id for t in open_engine(moe, "off").generate("Hello there", max_tokens=12)]
    engine = open_engine(path, "off", io_threads=2)
    generation, got = engine.generate("Hello there", max_tokens=12), []

    def go_on() -> None:
        for token in generation:
            got.append(token.id)
            if len(got) == 5:
                os.truncate(path, len(good) // 2)

    with pytest.raises(bmoe.ReadError, match=f"{path}: read at byte .* the file is shorter than when it was opened"):
        go_on()
    assert got == wanted[: len(got)]
    assert len(got) <= 6
    path.write_bytes(good)
    assert [t.id for t in engine.generate("Hello there", max_tokens=12)] == wanted


@pytest.mark.parametrize("mode", ["mmap", "warm"])
def test_a_mapped_file_that_shrinks(tmp_path: Path, tiny: Any, open_engine: Any, mode: str) -> None:
    """Dense weights that lie in a map: nothing is read by a call that could fail."""
    good = tiny("llama", "Q8_0", n_layer=4, n_embd=256, n_ff=512)
    path = Path(shutil.copy(good, tmp_path / "m.gguf"))
    wanted = [t.id for t in open_engine(good, "off").generate("Hello there", max_tokens=12, stop_at_end=False)]
    engine = open_engine(path, "off", dense_weights=mode)
    generation, got = engine.generate("Hello there", max_tokens=12, stop_at_end=False), []

    def go_on() -> None:
        for token in generation:
            got.append(token.id)
            if len(got) == 5:
                os.truncate(path, 4096)

    with pytest.raises(bmoe.ReadError, match=f"{path}: a page of it cannot be read any more"):
        go_on()
    assert got == wanted[:5]
    with pytest.raises(bmoe.ReadError):
        list(engine.generate("Hello there", max_tokens=1))
    assert [t.id for t in open_engine(good, "off").generate("Hello there", max_tokens=3)] == wanted[:3]


def failing_after(engine: bmoe.Engine, prompt: str, n: int, got: list[int]) -> None:
    """Generates; from the n-th token on, every read fails."""
    engine.lanes.sabotage(0 if n else 3)
    for token in engine.generate(prompt, max_tokens=8):
        got.append(token.id)
        if len(got) == n:
            engine.lanes.sabotage(3)


@pytest.mark.parametrize("cache", ["off", 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_reads_that_fail_stop_the_generation(moe: Path, open_engine: Any, cache: Any, overlap: bool) -> None:
    """Whatever read fails, at whatever time: what came before is right, and nothing comes after."""
    engine = open_engine(moe, cache, overlap=overlap)
    wanted = [t.id for t in engine.generate("Hello there", max_tokens=8)]
    for n in (0, 1, 2, 5):
        got: list[int] = []
        with pytest.raises(bmoe.ReadError, match=r"read at byte \d+ failed: Input/output error"):
            failing_after(engine, "Hello there" if n else "Another one", n, got)
        assert got == wanted[:n]
        engine.lanes.sabotage(0)
        assert [t.id for t in engine.generate("Hello there", max_tokens=8)] == wanted


def test_a_file_that_shrinks_under_a_run(tmp_path: Path, tiny: Any) -> None:
    path = Path(shutil.copy(tiny("qwen3moe"), tmp_path / "m.gguf"))
    metrics = tmp_path / "metrics.json"
    flags = ("-n", "2000", "-t", "1", "--cache-mb", "0", "--ignore-eos", "--metrics-json", metrics)
    process = start("-m", path, "-p", "Hello there", *flags)
    assert process.stdout is not None
    assert process.stdout.read(20)
    os.truncate(path, path.stat().st_size // 2)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 1
    last = err.decode().splitlines()[-1]
    assert last.startswith(f"bmoe: {path}: read at byte ")
    assert "shorter than when it was opened" in last
    assert len(out) < 1900
    assert not metrics.exists()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_gone_before_it_is_read(moe: Path, tmp_path: Path) -> None:
    """An unlinked file stays readable while it is open."""
    path = Path(shutil.copy(moe, tmp_path / "m.gguf"))
    with bmoe.Engine.open(path, threads=1, cache_mb=0, ctx=64) as engine:
        path.unlink()
        assert len(list(engine.generate("Hello there", max_tokens=3, stop_at_end=False))) == 3
