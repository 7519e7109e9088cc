"""Warm starts: the state file, what is read ahead from it, and that nothing but speed depends on it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_process import interruptible, run, start
from conftest import Cache, OpenEngine, Tiny
from generating import generate

import bmoe
import bmoe.cli.metrics_file
from bench.models.tiny import prompt_ids
from bmoe.analysis.replay import CacheReplay
from bmoe.analysis.route_trace import read_trace
from bmoe.errors import UsageError
from bmoe.experts import warm_start
from bmoe.streamer import _warm_start

PROMPT = prompt_ids(40, 3)
MODEL = {"n_expert": 16, "n_used": 4}
LAYERS = 3


@pytest.fixture
def model(tiny: Tiny) -> Path:
    return tiny("qwen3moe", "Q8_0", **MODEL)


@pytest.fixture
def state(model: Path, open_engine: OpenEngine, tmp_path: Path) -> Path:
    """A state that a run on another prompt has left."""
    path = tmp_path / "state.json"
    engine = open_engine(model, 12, cache_state=str(path))
    generate(engine, prompt_ids(40, 8), 40)
    engine.close()
    assert not engine.failures
    return path


def test_the_file_holds_what_was_routed(model: Path, open_engine: OpenEngine, tmp_path: Path) -> None:
    path, trace = tmp_path / "state.json", tmp_path / "r.csv"
    engine = open_engine(model, "few", cache_state=str(path), route_trace=str(trace))
    assert engine.preload is None
    generate(engine, PROMPT)
    engine.close()
    data = json.loads(path.read_text())
    columns = read_trace(trace).columns
    for layer in range(LAYERS):
        counted = np.bincount(columns["expert"][columns["layer"] == layer], minlength=16)
        assert data["counts"][layer] == counted.tolist()
    assert set(data) == {"bmoe_cache_state", "model", "counts"}
    assert {p.name for p in tmp_path.iterdir()} == {"state.json", "r.csv"}


def test_counts_of_runs_before_fade(state: Path, model: Path, open_engine: OpenEngine) -> None:
    old = json.loads(state.read_text())["counts"]
    engine = open_engine(model, 12, cache_state=str(state))
    generate(engine, PROMPT, 8)
    uses = engine.streamer.uses()
    engine.close()
    new = json.loads(state.read_text())["counts"]
    assert new == [[u + o // 2 for u, o in zip(a, b, strict=True)] for a, b in zip(uses, old, strict=True)]
    # A run that routes nothing has nothing to say.
    open_engine(model, 12, cache_state=str(state)).close()
    assert json.loads(state.read_text())["counts"] == new


@pytest.mark.parametrize("policy", ["votes", "lru"])
@pytest.mark.parametrize("cache", [12, "few", "all"])
def test_the_hottest_are_read_ahead(
    cache: Cache, policy: str, state: Path, model: Path, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """As many as there are slots, the likeliest first; every byte is in a counter, and in the trace."""
    io = tmp_path / "io.csv"
    engine = open_engine(model, cache, cache_state=str(state), cache_policy=policy, io_trace=str(io))
    assert engine.preload is not None
    assert engine.cache is not None
    assert engine.preload.wait(20)
    order = warm_start.by_frequency(json.loads(state.read_text())["counts"])
    expected = order[: engine.cache.n_slots]
    assert engine.cache.n_resident == len(expected)
    held = {(layer, e) for layer in range(LAYERS) for e in engine.cache.resident(layer)}
    assert held == set(expected)
    loader = engine.preload.loader
    assert loader.experts == len(expected)
    assert loader.bytes == sum(engine.layers[layer].expert_bytes for layer, _ in expected)
    assert engine.counters().bytes == 0
    first = generate(engine, PROMPT)
    c, ahead = engine.counters(), engine.preload.lanes.counters()["disk_bytes"]
    assert 0 < loader.used() <= loader.experts
    summary = bmoe.cli.metrics_file.warm_start(engine)
    assert summary is not None
    assert (summary["experts"], summary["bytes_read"]) == (loader.experts, loader.bytes)
    engine.close()
    rows = [line.split(",") for line in io.read_text().splitlines() if not line.startswith("#")]
    by_cause: dict[str, int] = {}
    for row in rows[1:]:
        by_cause[row[-1]] = by_cause.get(row[-1], 0) + int(row[rows[0].index("slice_bytes")])
    assert by_cause["preload"] == loader.bytes
    assert by_cause.get("prefill", 0) + by_cause.get("decode", 0) == c.bytes == first.prefill.bytes + first.decode.bytes
    assert sum(int(row[rows[0].index("bytes")]) for row in rows[1:]) == c.disk_bytes + ahead


@pytest.mark.parametrize("settings", [{}, {"overlap": True, "threads": 2}, {"overlap": True, "prefetch": "next-layer"}])
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "gemma4", "glm4moe"])
def test_the_output_is_that_of_a_cold_start(
    arch: str, settings: dict[str, Any], tiny: Tiny, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """While reads ahead are under way, and after them; logits bit for bit."""
    path, state = tiny(arch, None if arch == "gpt-oss" else "Q8_0", **MODEL), tmp_path / "s.json"
    cold = open_engine(path, 24, cache_state=str(state), **settings)
    expected, logits = generate(cold, PROMPT, 40).token_ids, cold.sequence.context.logits().copy()
    cold.close()
    for wait in (False, True):
        engine = open_engine(path, 24, cache_state=str(state), **settings)
        assert engine.preload is not None
        if wait:
            engine.preload.wait()
        assert generate(engine, PROMPT, 40).token_ids == expected
        assert np.array_equal(engine.sequence.context.logits(), logits)
        assert engine.preload.wait(20)
        if wait:  # else the run may have read all of it first
            assert engine.preload.loader.experts > 0
        assert engine.preload.failure == ""
        engine.close()


def test_a_byte_that_is_wrong_in_a_slot_shows(state: Path, model: Path, open_engine: OpenEngine) -> None:
    """The comparison above can fail: what was read ahead is what is computed with."""
    right = generate(open_engine(model, "all"), PROMPT).token_ids
    engine = open_engine(model, "all", cache_state=str(state))
    assert engine.preload is not None
    engine.preload.wait()
    for byte in range(0, 64, 4):
        engine.streamer.corrupt(byte)
    assert generate(engine, PROMPT).token_ids != right


@pytest.mark.parametrize("policy", ["votes", "lru"])
@pytest.mark.parametrize("delay", [0.0, 0.002, 0.02])
def test_a_replay_has_what_a_warm_run_had(
    policy: str, delay: float, state: Path, model: Path, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Experts enter the cache beside the batches; the trace has them between the same two."""
    path = tmp_path / "r.csv"
    engine = open_engine(model, 30, cache_state=str(state), cache_policy=policy, route_trace=str(path), overlap=True)
    assert engine.preload is not None
    # Slowed, so that reads ahead meet batches.
    load = engine.preload.loader.load
    engine.preload.loader = _Slow(load, engine.preload.loader, delay)  # type: ignore[assignment]
    results = [generate(engine, p) for p in (PROMPT, prompt_ids(20, 9))]
    engine.preload.wait(20)
    c = engine.counters()
    engine.close()
    tally = CacheReplay.recorded(read_trace(path)).run()
    for turn, result in enumerate(results):
        for phase, counters in enumerate((result.prefill, result.decode)):
            assert tally.count(phase, turn) == (counters.hits, counters.hits + counters.misses)
    assert (tally.evictions, tally.rereads, tally.read) == (c.evictions, c.rereads, c.bytes)


class _Slow:
    def __init__(self, load: Any, loader: _warm_start.Loader, delay: float) -> None:
        self._load, self._loader, self._delay = load, loader, delay

    def load(self, layer: int, expert: int) -> int:
        time.sleep(self._delay)
        return self._load(layer, expert)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def test_reads_ahead_wait_for_real_ones(state: Path, model: Path, open_engine: OpenEngine) -> None:
    """Nothing is begun while the engine's lanes have a read queued or under way."""
    engine = open_engine(model, 30, cache_state=str(state))
    assert engine.preload is not None
    engine.preload.wait()
    loader = engine.preload.loader
    assert engine.cache is not None
    engine.cache.clear()
    busy, outcomes = threading.Event(), []

    def read() -> None:
        t = engine.layers[0].tensors[0]
        size = 1 << 16
        buffer = np.zeros(2 * size, np.uint8)
        address = -(-buffer.ctypes.data // 4096) * 4096
        busy.set()
        engine.lanes.read_windows([(0, t.offset // 4096 * 4096, 4096, 4096, address)] * 20_000)

    thread = threading.Thread(target=read)
    thread.start()
    busy.wait()
    while thread.is_alive() and "busy" not in outcomes:
        outcomes.append(_warm_start.OUTCOMES[loader.load(0, len(outcomes) % 16)])
    thread.join()
    assert "busy" in outcomes
    assert _warm_start.OUTCOMES[loader.load(1, 3)] == "loaded"
    assert _warm_start.OUTCOMES[loader.load(1, 3)] == "resident"
    with pytest.raises(ValueError, match="no expert"):
        loader.load(0, 16)
    with pytest.raises(ValueError, match="no expert"):
        loader.load(LAYERS, 0)


def test_a_failed_read_ahead_ends_reading_ahead_only(state: Path, model: Path, open_engine: OpenEngine) -> None:
    expected = generate(open_engine(model, 30), PROMPT).token_ids
    engine = open_engine(model, 30, cache_state=str(state))
    assert engine.preload is not None
    assert engine.cache is not None
    engine.preload.wait()
    engine.cache.clear()
    engine.preload.lanes.sabotage(3)
    assert _warm_start.OUTCOMES[engine.preload.loader.load(0, 1)] == "failed"
    assert engine.cache.resident(0) == []
    assert generate(engine, PROMPT).token_ids == expected


# ---- bad files ------------------------------------------------------------------------------------------


def _damage(path: Path, what: str) -> None:
    data = json.loads(path.read_text())
    if what == "not json":
        path.write_text(path.read_text()[:-20])
    elif what == "binary":
        path.write_bytes(b"\x00\xff\xfe" * 100)
    elif what == "deep":
        path.write_text("[" * 100_000)
    elif what == "a list":
        path.write_text("[1, 2]")
    elif what == "no state":
        path.write_text('{"a": 1}')
    elif what == "version":
        path.write_text(json.dumps({**data, "bmoe_cache_state": 99}))
    elif what == "no model":
        path.write_text(json.dumps({**data, "model": 3}))
    elif what in ("arch", "file_bytes", "header_sha256", "experts"):
        path.write_text(json.dumps({**data, "model": {**data["model"], what: "other"}}))
    else:
        counts: Any = {
            "fewer layers": data["counts"][:-1],
            "fewer experts": [row[:-1] for row in data["counts"]],
            "negative": [[-1, *row[1:]] for row in data["counts"]],
            "float": [[0.5, *row[1:]] for row in data["counts"]],
            "bool": [[True, *row[1:]] for row in data["counts"]],
            "huge": [[1 << 80, *row[1:]] for row in data["counts"]],
            "text": "many",
        }[what]
        path.write_text(json.dumps({**data, "counts": counts}))


BAD = {
    "not json": "damaged", "binary": "damaged", "deep": "damaged", "a list": "no cache state",
    "no state": "no cache state", "version": "version 99", "no model": "names no model", "arch": "another model",
    "file_bytes": "another model", "header_sha256": "another model", "experts": "another model",
    "fewer layers": "do not fit", "fewer experts": "do not fit", "negative": "do not fit", "float": "do not fit",
    "bool": "do not fit", "huge": "do not fit", "text": "do not fit",
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_ignored_with_one_line(what: str, state: Path, model: Path, open_engine: OpenEngine) -> None:
    good = json.loads(state.read_text())
    _damage(state, what)
    engine = open_engine(model, 12, cache_state=str(state))
    (line,) = [note for note in engine.notes if "--cache-state" in note]
    assert BAD[what] in line
    assert str(state) in line
    assert "\n" not in line
    assert engine.preload is None
    generate(engine, PROMPT, 4)
    engine.close()
    assert json.loads(state.read_text())["model"] == good["model"]


def test_another_models_file_is_not_used(state: Path, tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "F32", **MODEL), 12, cache_state=str(state))
    assert any("another model" in note for note in engine.notes)
    assert engine.preload is None


# ---- the command line -----------------------------------------------------------------------------------


def test_the_flag(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    arguments = ("-m", model, "-p", "Hello", "-n", "8", "-c", "128", "-t", "1", "--ignore-eos")
    cold = run(*arguments, "--cache-state", path)
    assert cold.code == 0, cold.err
    assert "warm start" not in cold.err
    assert path.exists()
    metrics = tmp_path / "m.json"
    again = run(*arguments, "--cache-state", path, "--metrics-json", metrics)
    assert (again.code, again.out) == (0, cold.out)
    assert "warm start: " in again.err
    assert json.loads(metrics.read_text())["warm_start"]["experts"] > 0
    path.write_text("{")
    bad = run(*arguments, "--cache-state", path)
    assert (bad.code, bad.out) == (0, cold.out)
    assert len([line for line in bad.err.splitlines() if "--cache-state" in line]) == 1
    for wrong, message in (
        (("--cache-state", tmp_path), "is a directory"),
        (("--cache-state", tmp_path / "no" / "s.json"), "--cache-state: cannot write"),
        (("--cache-state", path, "--cache-mb", "0"), "--cache-state needs a cache"),
        (("--cache-state", model), "is read by this run"),
    ):
        refused = run(*arguments, *wrong)
        assert refused.code == 2
        assert message in refused.last
        assert "Traceback" not in refused.err


def test_the_state_is_written_after_ctrl_c(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    process = start(
        "-m", model, "-p", "Hello", "-n", "16000", "-c", "16384", "--ignore-eos", "-t", "1", "--cache-state", path,
        preexec_fn=interruptible,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert sum(map(sum, json.loads(path.read_text())["counts"])) > 0


def test_a_state_that_cannot_be_written_is_said(model: Path, open_engine: OpenEngine, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    engine = open_engine(model, 12, cache_state=str(place / "s.json"))
    generate(engine, PROMPT, 4)
    place.rmdir()
    engine.close()
    (line,) = engine.failures
    assert "--cache-state: cannot write" in line


def test_without_a_cache_it_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="needs a cache"):
        bmoe.EngineConfig(cache_mb=0, cache_state="x")
