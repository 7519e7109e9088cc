"""What files that shrink and reads that fail get while a model runs: one line that names them, no crash, no hang."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_process import start

import bmoe


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
