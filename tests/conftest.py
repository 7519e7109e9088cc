"""Fixtures that several test files share: tiny models, resident runs, and engines with a budget to the byte."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from machine import Machine

# Two compute threads, the read lanes and the tests share few cores: waiting threads sleep instead of spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from mtp_heads import TinyMtp

import bmoe
from bench import reference
from bench.models.tiny import write_tiny, write_tiny_mtp
from bmoe.experts import slots
from bmoe.experts.budget import CacheDecision, ModelSizes
from bmoe.gguf import file as gguf_file

SMALL = {"n_layer": 2, "n_embd": 64, "n_ff": 32, "n_expert": 4}
Tiny = Callable[..., Path]
Resident = Callable[..., list[reference.Run]]
OpenEngine = Callable[..., bmoe.Engine]
Cache = str | int
"""What an engine of the tests may keep: "off", "few" (a third of the experts), "all", or a number of slots."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`write_tiny` without the path: each model is written once. On disk, where tmp_path is."""
    base, written = tmp_path_factory.mktemp("tiny"), dict[str, Path]()

    def write(arch: str, quant: str | None = None, **options: Any) -> Path:
        key = "-".join([arch, str(quant), *(f"{k}{v}" for k, v in sorted(options.items()))])
        if key not in written:
            written[key] = write_tiny(base / f"{key}.gguf", arch, quant, **options)
        return written[key]

    return write


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """An invented machine without limits."""
    return Machine(tmp_path)


@pytest.fixture(scope="session")
def moe(tiny: Tiny) -> Path:
    """The smallest model that streams; a file whose tests need another has its own of that name."""
    return tiny("qwen3moe", **SMALL)


@pytest.fixture(scope="session")
def tiny_mtp(tmp_path_factory: pytest.TempPathFactory) -> TinyMtp:
    """`write_tiny_mtp` without the path: each model is written once."""
    base, written = tmp_path_factory.mktemp("mtp"), dict[str, Path]()

    def write(arch: str, heads: int = 1, quant: str = "F32") -> Path:
        key = f"{arch}-{heads}-{quant}"
        if key not in written:
            written[key] = write_tiny_mtp(base / f"{key}.gguf", arch, quant, heads)
        return written[key]

    return write


@pytest.fixture(scope="session")
def resident() -> Resident:
    """Greedy runs of stock llama.cpp, one for each prompt, each from an empty sequence; made once."""
    made: dict[Any, list[reference.Run]] = {}

    def run(path: Path, prompts: Sequence[Sequence[int]], n: int, **settings: Any) -> list[reference.Run]:
        key = (path, tuple(map(tuple, prompts)), n, tuple(sorted(settings.items())))
        if key not in made:
            with reference.Resident(path, **settings) as model:
                made[key] = [model.generate(prompt, n) for prompt in prompts]
        return made[key]

    return run


def direct_works(path: Path) -> bool:
    """Whether the file system takes O_DIRECT at all."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def budget(path: Path, cache: Cache) -> int:
    """Bytes of cache, ring included, with which `cache` holds for the experts of the model at `path`."""
    file = gguf_file.open_model_file(path)
    layers = gguf_file.expert_layers(file.tensors, [t.name for t in file.tensors])
    ring = slots.RING_AREAS * slots.ring_stride(layers)
    if cache == "off" or not layers:
        return 0
    if cache == "all":
        return slots.all_experts_bytes(layers)
    if cache == "few":
        return ring + max(ring, sum(layer.n_expert * layer.slot_bytes for layer in layers) // 3)
    return ring + int(cache) * max(layer.slot_bytes for layer in layers)


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    """`Engine.open` with a budget that no memory measurement decides; checks the cache's index at the end."""
    opened: list[bmoe.Engine] = []
    with contextlib.ExitStack() as stack:

        def open_(path: Path, cache: Cache = "all", **settings: Any) -> bmoe.Engine:
            wanted = budget(path, cache)
            everything = budget(path, "all")

            def decide(request: object, sizes: ModelSizes, *_: object) -> CacheDecision:
                # What the process itself holds is charged to the budget.
                return CacheDecision("fixed", wanted and wanted + sizes.experts - everything, sizes)

            settings = {"threads": 1, "ctx": 256, **settings}
            engine = stack.enter_context(bmoe.Engine.open(path, grant=decide, **settings))
            opened.append(engine)
            return engine

        yield open_
    for engine in opened:
        if engine.cache is not None:
            engine.cache.check()


def in_a_process(code: str, path: Path) -> list[str]:
    """What `code` prints, with `path` in sys.argv[1]: for what must not hang, nor touch a model that was freed."""
    run = [sys.executable, "-c", "import sys, bmoe\n" + code, str(path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.splitlines()
