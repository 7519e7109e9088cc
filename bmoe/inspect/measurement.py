"""Bounded measurements at a model file: how fast its expert slices can be read, and how long a token takes.

A few seconds, and the memory of a small run: the dense weights, a short context, and the routed experts of one token.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..errors import MemoryBudgetError
from ..experts.budget import MiB
from ..gguf.file import ExpertLayer, ModelFile
from ..host import _memory
from ..speculation import DraftSpec
from ..streamer import ALIGNMENT as PAGE
from ..streamer import _reads
from .hit_model import FEWEST, Routes
from .speed_model import LEVELS, Sample

Progress = Callable[[str, int, int], None]

DISK_BYTES = 384 * MiB
DISK_SECONDS = 2.0
_BATCH = 48  # slices that are queued at once
MOST_CACHE = 2048 * MiB
"""Memory for experts that a measurement takes at most."""
CONTEXT = 256
TOKENS = 24
TEXT_SECONDS = 4.0
CURVE_SECONDS = 4.0
ROUNDS = (2, 8)  # measured tokens of each level: at least, where there is time, and at most
PATIENCE = 3  # times of the above after which it ends with less than enough
UNCACHED = (3, 12)  # tokens without a cache
UNCACHED_SECONDS = 2.0
TEXT = '''def read_stations(path, day):
    """Reads what every station has reported and returns a table, the newest line first."""
    rows = [line.split(",") for line in open(path) if not line.startswith("#")]
    return sorted(rows, key=lambda row: row[0], reverse=True)
'''


@dataclass(frozen=True)
class DiskSpeed:
    """What reading expert slices gave. `direct`: past the page cache; else memory may have answered."""

    bytes: int
    seconds: float
    slice_bytes: int
    lanes: int
    direct: bool

    @property
    def mib_s(self) -> float:
        return self.bytes / MiB / self.seconds


@dataclass
class Probe:
    """Tokens that were run. `samples`: with a cache of `cache` bytes, `uncached`: without one; `routes`: of the text's
    first tokens."""

    samples: list[Sample] = field(default_factory=list)
    uncached: list[Sample] = field(default_factory=list)
    routes: Routes = field(default_factory=lambda: np.zeros((0, 0, 0), np.bool_))
    cache: int = 0
    seconds: float = 0.0


def measure_disk(file: ModelFile, layers: Sequence[ExpertLayer], config: EngineConfig) -> DiskSpeed:
    """Reads slices of random experts, each at most once, through lanes as a run has them.

    Raises ReadError where one cannot be read.
    """
    slices = [
        (t.file, t.offset + i * t.nbytes, t.nbytes)
        for layer in layers
        for t in layer.tensors
        for i in range(t.n_expert)
    ]
    random.shuffle(slices)
    longest = max(t.area for layer in layers for t in layer.tensors)
    batch = max(1, min(_BATCH, DISK_BYTES // longest))
    lanes = _reads.Lanes([os.fspath(p) for p in file.paths], config.io_threads, config.odirect)
    try:
        region = _memory.Region(batch * longest)
        try:
            region.populate(0, region.size)
            if config.odirect:
                for at in range(len(file.paths)):
                    first = next((s for s in slices if s[0] == at), None)
                    if first is not None:
                        lanes.verify_direct(at, first[1], min(first[2], 1 << 16))
            if not lanes.direct:
                _drop_pages(file, slices[: DISK_BYTES // longest])
            moved, spent = 0, 0.0
            for at in range(0, len(slices), batch):
                windows = [
                    _reads.window(*s, region.address + i * longest) for i, s in enumerate(slices[at : at + batch])
                ]
                started = time.perf_counter()
                lanes.read_windows(windows)
                spent += time.perf_counter() - started
                moved += sum(s[2] for s in slices[at : at + batch])
                if moved + batch * longest > DISK_BYTES or spent > DISK_SECONDS:
                    break
            sizes = sorted(s[2] for s in slices)
            return DiskSpeed(moved, max(spent, 1e-9), sizes[len(sizes) // 2], lanes.n_lanes, lanes.direct)
        finally:
            lanes.close()
            region.close()
    finally:
        lanes.close()


def _drop_pages(file: ModelFile, slices: Sequence[tuple[int, int, int]]) -> None:
    """Asks the kernel to forget what it holds of `slices`: without direct reads memory would answer."""
    for index, path in enumerate(file.paths):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for at, offset, nbytes in slices:
                if at == index:
                    os.posix_fadvise(fd, offset // PAGE * PAGE, nbytes + 2 * PAGE, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def probe_config(config: EngineConfig, cache_mb: int) -> EngineConfig:
    """The settings of a run that measures single tokens: as asked, with a short context, and nothing but decode."""
    return replace(
        config,
        cache_mb=cache_mb,
        cache_floor_mb=EngineConfig().cache_floor_mb,
        cache_ceil_mb=None,
        force_cache=cache_mb > 0,
        ctx=min(config.ctx or CONTEXT, CONTEXT),
        ubatch=min(config.ubatch, 32),
        draft=DraftSpec(),
        prefetch="off",
        predict_log=False,
        drop_cold_experts=None,
        drop_in_prefill=False,
        route_trace=None,
        io_trace=None,
        cache_state=None,
        score_rows=0,
    )


def run_probe(path: Path, config: EngineConfig, working_set: int, progress: Progress | None = None) -> Probe:
    """Runs a few tokens of a text, then one token again and again with a chosen part of its experts in the cache.

    `working_set`: the cache that holds one token's routed experts, bytes. Where that is not there, or above
    `MOST_CACHE`, the tokens only run without a cache, and each of them misses everything.
    """
    started = time.perf_counter()
    probe = Probe()
    # Without a cache the reads pass through a small ring, which is another time than that of a cache that misses.
    with Engine(path, probe_config(config, 0), progress) as engine:
        ids = engine.tokenize(TEXT)
        _run_uncached(engine, ids, probe)
        cache_mb = -(-working_set // MiB) + 2
        if cache_mb * MiB > MOST_CACHE or not _run_cached(path, config, cache_mb, ids, probe, progress):
            _run_text(engine, ids, probe)
    probe.seconds = time.perf_counter() - started
    return probe


def _run_cached(
    path: Path, config: EngineConfig, cache_mb: int, ids: list[int], probe: Probe, progress: Progress | None
) -> bool:
    """The part with a cache; False where there is no memory for it."""
    try:
        engine = Engine(path, probe_config(config, cache_mb), progress)
    except MemoryBudgetError:
        return False
    with engine:
        probe.cache = engine.budget_bytes
        _run_text(engine, ids, probe)
        _run_levels(engine, ids, probe)
    return True


def _run_uncached(engine: Engine, ids: list[int], probe: Probe) -> None:
    """Decodes some of the text without a cache."""
    n = min(UNCACHED[1], len(ids) - 1, engine.sequence.context.n_ctx - 2)
    started = time.perf_counter()
    generation = engine.generate(ids[:1], max_tokens=n, stop_at_end=False, script=ids[1:])
    try:
        for token in generation:
            if token.index:
                probe.uncached.append(_sample(engine, token.decode_s, token.stream.bytes, token.stream.stall_ns))
            spent = (time.perf_counter() - started) / UNCACHED_SECONDS
            if token.index and spent > (1 if token.index >= UNCACHED[0] else PATIENCE):
                break
    finally:
        generation.close()


def _run_text(engine: Engine, ids: list[int], probe: Probe) -> None:
    """Decodes the text token by token and notes its routes."""
    engine.streamer.count_uses()
    n = min(TOKENS, len(ids) - 1, engine.sequence.context.n_ctx - 2)
    n_expert = max(layer.n_expert for layer in engine.layers)
    routes = np.zeros((n, len(engine.layers), n_expert), np.bool_)
    before: list[list[int]] = [[0] * layer.n_expert for layer in engine.layers]
    started, done = time.perf_counter(), 0
    generation = engine.generate(ids[:1], max_tokens=n, stop_at_end=False, script=ids[1:])
    try:
        for _ in generation:
            uses = engine.streamer.uses()
            for layer, (now, was) in enumerate(zip(uses, before, strict=True)):
                routes[done, layer, : len(now)] = np.array(now) > np.array(was)
            before = uses
            done += 1
            if (time.perf_counter() - started) / TEXT_SECONDS > (1 if done >= FEWEST else PATIENCE):
                break
    finally:
        generation.close()
    probe.routes = routes[:done]


def _run_levels(engine: Engine, ids: list[int], probe: Probe) -> None:
    """Decodes one token over and over, with the cache emptied to each level in turn."""
    cache = engine.cache
    if cache is None or not probe.cache:
        return
    rng = random.Random(0)
    # A recurrent state cannot go back by one token: then it is the first of a sequence each time.
    text = [] if engine.sequence.context.recurrent else engine.sequence.ids[:-1]
    prompt = [*text, ids[len(text)]]
    cache.clear()
    _step(engine, prompt)
    started = time.perf_counter()
    for number in range(ROUNDS[1]):
        for level in LEVELS:
            spent = (time.perf_counter() - started) / CURVE_SECONDS
            if len(probe.samples) > 1 and spent > (1 if number >= ROUNDS[0] else PATIENCE):
                return
            for layer in range(len(engine.layers)):
                for expert in cache.resident(layer):
                    if rng.random() < level:
                        cache.forget(layer, expert)
            probe.samples.append(_sample(engine, *_step(engine, prompt)))


def _step(engine: Engine, prompt: list[int]) -> tuple[float, int, int]:
    """Computes the last token of `prompt`: seconds, bytes read, nanoseconds of stall."""
    generation = engine.generate(prompt, max_tokens=0)
    for _ in generation:
        pass
    result = generation.result
    return result.prefill_s, result.prefill.bytes, result.prefill.stall_ns


def _sample(engine: Engine, seconds: float, nbytes: int, stall_ns: int) -> Sample:
    routed = sum(min(engine.n_used, layer.n_expert) * layer.expert_bytes for layer in engine.layers)
    return Sample(min(1.0, nbytes / routed), seconds, stall_ns / 1e9 / engine.config.threads)
