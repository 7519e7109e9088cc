"""`bmoe inspect`: what it prints, and what goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_process import check_refused, interruptible, run, start
from inspect_runs import LARGE, SMALL, as_json, inspect

import bmoe
import bmoe.engine.engine
import bmoe.inspect.inspection
from bmoe.cli import inspect_view, main
from bmoe.engine.config import EngineConfig
from bmoe.inspect import forecast, measurement
from bmoe.inspect.inspection import inspect_model


@pytest.fixture(scope="module")
def moe(tiny: Any) -> Path:
    return tiny("qwen3moe", "Q8_0", **SMALL)


# ---- what is printed --------------------------------------------------------------------------------


def test_the_lines(moe: Path) -> None:
    done = inspect(moe, "--overlap")
    assert done.code == 0
    lines = done.out.splitlines()
    heads = [line.partition(":")[0] for line in lines]
    order = ["model", "experts", "types", "sizes", "context", "cache", "floor", "disk", "token", "hits"]
    assert [h for h in heads if h in order] == order
    assert any(line.startswith("auto ") for line in lines)
    assert "experts: 8 in each of 2 layers" in done.out


def test_unmeasured_is_marked_unknown(moe: Path) -> None:
    done = inspect(moe, "--no-measure")
    assert done.code == 0
    assert "disk: unknown (--no-measure)" in done.out
    table = done.out.partition("tok/s\n")[2].splitlines()
    assert table
    assert all("unknown" in line for line in table)


def test_a_refused_direct_read_is_said(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = measurement._reads.Lanes
    found = inspect_model(moe, EngineConfig(threads=1))
    assert measurement.measure_disk(found.file, found.layers, found.config).direct
    monkeypatch.setattr(measurement._reads, "Lanes", lambda paths, n, direct: real(paths, n, False))
    lines = inspect_view.measured_lines(found, forecast.measure(found))
    assert "through the page cache (the file system refuses direct reads): memory may have answered" in lines[0]
    assert "through the page cache (--no-odirect)" in inspect(moe, "--no-odirect").out


def test_the_disk_is_measured_within_bounds(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspect_model(moe, EngineConfig(threads=1))
    sizes = {t.nbytes for layer in found.layers for t in layer.tensors}
    whole = sum(t.nbytes * t.n_expert for layer in found.layers for t in layer.tensors)
    assert len(sizes) == 1  # so that bytes are a number of slices
    size = sizes.pop()
    area = max(t.area for layer in found.layers for t in layer.tensors)
    assert measurement.measure_disk(found.file, found.layers, found.config).bytes == whole  # each slice once
    monkeypatch.setattr(measurement, "_BATCH", 4)
    with monkeypatch.context() as m:
        m.setattr(measurement, "DISK_BYTES", 12 * area)
        assert 4 * size < measurement.measure_disk(found.file, found.layers, found.config).bytes <= 12 * area < whole
    monkeypatch.setattr(measurement, "DISK_SECONDS", 0.0)
    assert measurement.measure_disk(found.file, found.layers, found.config).bytes == 4 * size


def test_a_refused_cache_is_said_and_the_rest_too(tiny: Any) -> None:
    path = tiny("qwen3moe", "Q8_0", **LARGE)
    done = inspect(path, "--no-measure", "--cache-mb", "1")
    assert done.code == 0
    assert "cache: refused: --cache-mb 1 is too small" in done.out
    asked = run("-m", path, "-p", "a", "-n", "1", "-t", "1", "--cache-mb", "1")
    assert asked.code == 2
    assert asked.last.removeprefix("bmoe: ").partition(":")[0] == "--cache-mb 1 is too small"


def test_a_dense_model(tiny: Any) -> None:
    path = tiny("llama", n_layer=2)
    done = inspect(path)
    assert done.code == 0
    assert "experts: none that are routed (*_exps.weight): a dense model, nothing is streamed" in done.out
    assert "tok/s" not in done.out
    found = as_json(path)
    assert (found["cache"], found["predictions"], found["disk"]) == (None, [], None)


# ---- what goes wrong --------------------------------------------------------------------------------


def test_shards(tiny: Any, tmp_path: Path) -> None:
    first = tiny("qwen3moe", **SMALL, shards=2)
    whole = as_json(tiny("qwen3moe", **SMALL), "--no-measure")
    found = as_json(first, "--no-measure")
    assert found["files"] == 2
    assert found["bytes"]["token"] == whole["bytes"]["token"]
    assert found["bytes"]["experts"] == whole["bytes"]["experts"]
    assert "2 shards" in inspect(first, "--no-measure").out
    measured = as_json(first)
    assert measured["disk"]["bytes"] == found["bytes"]["experts"]
    for shard in first.parent.glob(f"{first.name.partition('-00001')[0]}*"):
        shutil.copy(shard, tmp_path)
    second = tmp_path / first.name.replace("-00001-of", "-00002-of")
    check_refused(inspect(second), "shard 2 of 2", "open ")
    second.unlink()
    check_refused(inspect(tmp_path / first.name), second.name, "shard is missing")


def damage_nothing(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def scribble(path: Path) -> None:
    path.write_text("no model")


@pytest.mark.parametrize(
    ("damage", "says"),
    [(damage_nothing, "no such file"), (truncate, "truncated: tensor"), (scribble, "not a GGUF file")],
)
def test_a_file_that_is_none(moe: Path, tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(moe, path)
    damage(path)
    check_refused(inspect(path), "model.gguf", says)
    check_refused(inspect(path, "--json"), "model.gguf", says)


def test_no_permission(moe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no(*args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bmoe.gguf.file, "open", no, raising=False)
    assert main.main(["inspect", str(moe)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"bmoe: {moe}: cannot read: Permission denied\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--io-threads", "0"), "--io-threads: 0 is out of range"),
        (("--nonsense",), "unrecognized arguments: --nonsense"),
        (("--cache-mb", "much"), "--cache-mb: 'much' is none of"),
        (("-m", "other.gguf"), "MODEL and -m exclude each other"),
        (("--mtp",), "has no multi-token-prediction head"),
        (("--n-expert-used", "99"), "is more than the model's 8 experts"),
    ],
)
def test_flags_that_cannot_be(moe: Path, flags: tuple[str, ...], says: str) -> None:
    check_refused(inspect(moe, *flags), says, code=2)


@pytest.mark.parametrize("mark", [b"model:", b"floor:"])
def test_interrupted(tiny: Any, mark: bytes) -> None:
    path = tiny("qwen3moe", "Q8_0", **LARGE)
    for _ in range(10):
        process = start("inspect", path, "-t", "1", preexec_fn=interruptible)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(mark):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        if process.returncode:  # else it was done before the signal came
            break
    assert (process.returncode, err) == (130, b"bmoe: interrupted\n"), out


def test_nobody_reads(moe: Path) -> None:
    process = start("inspect", moe, "-t", "1", "--no-measure")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) in (0, 1)
    assert process.stderr is not None
    assert process.stderr.read() == b""
