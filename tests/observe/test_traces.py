"""Traces: what is written is what the engine did, and a replay of it has every hit and every miss."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_process import run, start
from conftest import Cache, OpenEngine, Tiny
from csv_rows import rows_of
from generating import generate

import bmoe
from bench.models.tiny import prompt_ids
from bench.reference import Resident
from bmoe.analysis import io_trace
from bmoe.analysis.replay import CacheReplay, ReplayCounts
from bmoe.analysis.route_trace import read_trace
from bmoe.errors import ReadError, UsageError
from bmoe.host import files
from bmoe.speculation import DraftSpec, NgramConfig

PROMPT = prompt_ids(40, 3)
WIDE = DraftSpec(types=("ngram",), draft=6, policy="always", ngram=NgramConfig(min_match=2))
DROPS = {"drop_cold_experts": 1.0, "drop_in_prefill": True}
# Repeats itself, but not quite: drafts are accepted, and drafts are rejected.
SCRIPT = [5, 6, 7, 8, 9, 5, 6, 7, 9, 9, 5, 6, 7, 8, 9, 5, 6, 8, 8, 9, 5, 6, 7, 8, 9]
MODEL = {"n_expert": 16, "n_used": 4}


def traced_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a trace, whose preamble is all at its beginning."""
    preamble = [line.startswith("#") for line in path.read_text().splitlines()]
    assert preamble == sorted(preamble, reverse=True)
    return rows_of(path)


def check(tally: ReplayCounts, results: list[Any]) -> None:
    """The replay has the hits and misses of each generation, in prefill and in decode."""
    for turn, result in enumerate(results):
        for phase, c in enumerate((result.prefill, result.decode)):
            assert tally.count(phase, turn) == (c.hits, c.hits + c.misses), (turn, phase)
            assert tally.rate(phase, turn) == c.hit_rate


@pytest.mark.parametrize("policy", ["votes", "lru"])
@pytest.mark.parametrize(
    ("cache", "settings"),
    [
        ("few", {}),
        (10, {"overlap": True, "threads": 2, "ubatch": 16}),
        ("few", {"draft": WIDE}),
        ("few", {"draft": WIDE, **DROPS}),
        (14, {**DROPS, "overlap": True}),
        (24, {"overlap": True, "prefetch": "next-layer", "io_threads": 2}),
        ("off", {}),
        ("all", {}),
    ],
)
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "gemma4"])
def test_a_replay_has_what_the_engine_reported(
    arch: str, cache: Cache, settings: dict[str, Any], policy: str, tiny: Tiny, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Two generations that share a prefix: exactly the hits and misses, and every byte."""
    path = tmp_path / "route.csv"
    model = tiny(arch, None if arch == "gpt-oss" else "Q8_0", **MODEL)
    engine = open_engine(model, cache, cache_policy=policy, route_trace=str(path), **settings)
    script = SCRIPT if "draft" in settings else None
    results = [generate(engine, p, script=script) for p in (PROMPT, [*PROMPT[:20], *PROMPT[5:25]])]
    c = engine.counters()
    engine.close()
    assert not engine.failures
    trace = read_trace(path)
    replay = CacheReplay.recorded(trace)
    tally = replay.run()
    check(tally, results)
    assert (sum(tally.hits.values()), tally.evictions) == (c.hits, c.evictions)
    if "prefetch" not in settings:
        assert (tally.rereads, tally.read) == (c.rereads, c.bytes)
    assert [replay.cache.resident(i) for i in range(len(engine.layers))] == [
        engine.cache.resident(i) for i in range(len(engine.layers)) if engine.cache
    ]
    rows = traced_rows(path)
    assert len(rows) == c.routed
    assert sum(int(r["dropped"]) for r in rows) == c.dropped
    if "drop_cold_experts" in settings:
        assert c.dropped
    if "draft" in settings:
        assert results[0].spec.accepted < results[0].spec.drafted
        assert "reject:" in path.read_text()
    if "prefetch" not in settings:
        assert sum(int(r["expert_bytes"]) for r in rows) == c.bytes
    else:
        assert len({(r["batch"], r["expert"]) for r in rows if r["residency"] == "2"}) == c.guess_hits


def test_a_wrong_replay_is_noticed(tiny: Tiny, open_engine: OpenEngine, tmp_path: Path) -> None:
    """The comparison above can fail: one routed expert, one event or one quota that is another changes the counts."""
    path = tmp_path / "route.csv"
    engine = open_engine(tiny("qwen3moe", "Q8_0", **MODEL), "few", draft=WIDE, route_trace=str(path))
    generate(engine, PROMPT, script=SCRIPT)
    engine.close()
    right = CacheReplay.recorded(read_trace(path)).run()
    text = path.read_text()
    for pattern, other in ((r"reject:\d+", ""), (r"quota=\d+", "quota=1"), (r"left:\d+", "left:9999")):
        (tmp_path / "other.csv").write_text(re.sub(pattern, other, text))
        assert re.search(pattern, text), pattern
        wrong = CacheReplay.recorded(read_trace(tmp_path / "other.csv")).run()
        assert (wrong.hits, wrong.evictions) != (right.hits, right.evictions), pattern


@pytest.mark.parametrize("arch", ["qwen3moe", "glm4moe", "gpt-oss", "gemma4", "deepseek2"])
def test_rows_are_what_llama_cpp_routes(arch: str, tiny: Tiny, open_engine: OpenEngine, tmp_path: Path) -> None:
    path, model = tmp_path / "route.csv", tiny(arch, None if arch == "gpt-oss" else "Q8_0", **MODEL)
    engine = open_engine(model, "few", route_trace=str(path), ubatch=16)
    generate(engine, PROMPT, 8)
    engine.close()
    with Resident(model, record=True, threads=1, ubatch=16) as resident:
        routes = resident.generate(PROMPT, 8).routes
    rows = traced_rows(path)
    traced = [(b.layer, [list(row) for row in b.rows]) for b in read_trace(path).batches()]
    assert traced == routes
    weights = np.array([float(r["weight"]) for r in rows]).reshape(-1, 4)
    assert np.isfinite(weights).all()
    assert (weights > 0).all()
    if arch in ("qwen3moe", "gpt-oss"):
        assert np.allclose(weights.sum(axis=1), 1, atol=1e-4)
        assert (np.diff(weights, axis=1) <= 1e-6).all()
    prefill = [r for r in rows if r["phase"] == "0"]
    assert sorted({int(r["step"]) for r in prefill}) == list(range(40))
    assert sorted({int(r["step"]) for r in rows if r["phase"] == "1"}) == list(range(40, 47))
    last = max(int(r["layer"]) for r in rows)
    # Most graphs compute in the last layer the tokens whose logits are wanted: the last of each batch.
    whole = set(range(40)) if arch in ("gpt-oss", "gemma4") else {15, 31, 39}
    assert {int(r["step"]) for r in prefill if int(r["layer"]) == last} == whole


def test_after_a_failed_read_and_a_stop_the_replay_goes_on(tiny: Tiny, open_engine: OpenEngine, tmp_path: Path) -> None:
    """What a stopped graph leaves out of the cache, the replay leaves out."""
    path = tmp_path / "route.csv"
    engine = open_engine(tiny("qwen3moe", "Q8_0", **MODEL), 12, route_trace=str(path), overlap=True)
    first = generate(engine, PROMPT)
    engine.lanes.sabotage(3)
    broken = engine.generate(prompt_ids(40, 4), max_tokens=4)
    with pytest.raises(ReadError):
        list(broken)
    engine.lanes.sabotage(0)
    stopped = engine.generate(prompt_ids(40, 5), max_tokens=30, stop_at_end=False)
    for token in stopped:
        if token.index == 9:
            engine.cancel()
    last = generate(engine, prompt_ids(30, 6))
    c = engine.counters()
    engine.close()
    tally = CacheReplay.recorded(read_trace(path)).run()
    check(tally, [first, broken.result, stopped.result, last])
    assert sum(tally.hits.values()) == c.hits
    assert "clear" in path.read_text()


def test_texts_that_are_scored_are_traced(tiny: Tiny, open_engine: OpenEngine, tmp_path: Path) -> None:
    path = tmp_path / "route.csv"
    engine = open_engine(tiny("qwen3moe", "Q8_0", **MODEL), 12, route_trace=str(path), score_rows=16)
    results = []
    for one_by_one in (False, True):
        scoring = engine.score(PROMPT, 20, one_by_one=one_by_one)
        list(scoring)
        results.append(scoring.result)
    engine.close()
    check(CacheReplay.recorded(read_trace(path)).run(), results)


def test_a_trace_changes_nothing(tiny: Tiny, open_engine: OpenEngine, tmp_path: Path) -> None:
    model = tiny("qwen3moe", "Q8_0", **MODEL)
    plain = generate(open_engine(model, "few", overlap=True), PROMPT)
    traced = open_engine(
        model, "few", overlap=True, route_trace=str(tmp_path / "r.csv"), io_trace=str(tmp_path / "i.csv")
    )
    result = generate(traced, PROMPT)
    assert result.token_ids == plain.token_ids
    assert (result.decode.hits, result.decode.bytes) == (plain.decode.hits, plain.decode.bytes)


# ---- reads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"overlap": True, "draft": WIDE}, {"overlap": True, "prefetch": "next-layer"}]
)
def test_every_read_is_in_the_io_trace(
    settings: dict[str, Any], tiny: Tiny, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Bytes add up to what was reported, by phase, and each row names the slice that lies there."""
    path = tmp_path / "io.csv"
    engine = open_engine(tiny("gpt-oss", None, **MODEL), 24, io_trace=str(path), **settings)
    results = [generate(engine, PROMPT), generate(engine, prompt_ids(30, 9))]
    c = engine.counters()
    engine.close()
    assert engine.traces.io is not None
    assert engine.traces.io.lost == 0
    rows = traced_rows(path)
    experts = [r for r in rows if r["part"] != "dense"]
    assert len(experts) == c.reads
    assert sum(int(r["slice_bytes"]) for r in experts) == c.bytes
    assert sum(int(r["bytes"]) for r in rows) == c.disk_bytes
    for turn, result in enumerate(results):
        for phase, counters in enumerate((result.prefill, result.decode)):
            if "prefetch" not in settings:  # a guess may be read after the batch that made it
                mine = [r for r in experts if (r["turn"], r["phase"]) == (str(turn), str(phase))]
                assert sum(int(r["slice_bytes"]) for r in mine) == counters.bytes
    slices = {(f"{i}", t.name.split(".")[-2]): t for i, la in enumerate(engine.layers) for t in la.tensors}
    for r in experts:
        t = slices[r["layer"], r["part"]]
        start = t.offset + int(r["expert"]) * t.nbytes
        assert int(r["offset"]) == start // 4096 * 4096
        assert int(r["slice_bytes"]) == t.nbytes
        assert int(r["latency_us"]) > 0
        assert 0 <= int(r["lane"]) < engine.config.io_threads
    assert {r["cause"] for r in rows} == {"dense", "prefill", "decode"}
    # Lanes work side by side, so their reads take at least as long as one of them is under way; and some had to wait.
    assert sum(int(r["latency_us"]) for r in rows) >= 0.9 * c.disk_ns / 1e3
    assert sum(int(r["queue_us"]) for r in rows) > 0
    told = io_trace.summarise(io_trace.read_io_trace(path))
    assert sum(s.bytes for s in told) == c.disk_bytes
    assert [s.failed for s in told] == [0, 0, 0]


def test_reads_without_room_are_counted(tiny: Tiny, open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0", **MODEL), "few", io_trace=str(tmp_path / "io.csv"))
    engine.lanes.record(5)
    generate(engine, PROMPT, 4)
    reads = engine.counters().reads
    engine.close()
    assert engine.traces.io is not None
    rows = [r for r in traced_rows(tmp_path / "io.csv") if r["part"] != "dense"]
    assert engine.traces.io.lost > 0
    assert len(rows) + engine.traces.io.lost == reads
    assert f"{engine.traces.io.lost} reads lost" in "\n".join(engine.traces.lines())


def test_busy_time_is_that_of_the_union() -> None:
    assert io_trace.busy_us([0, 5, 20, 21], [10, 12, 30, 22]) == 22
    assert io_trace.busy_us([], []) == 0


# ---- files ------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path, tiny: Tiny) -> None:
    model = tiny("qwen3moe", "Q8_0", **MODEL)
    arguments = ("-m", model, "-p", "Hello", "-n", "8", "-c", "128", "-t", "1", "--ignore-eos")
    plain = run(*arguments)
    full = run(*arguments, "--route-trace", "/dev/full", "--io-trace", "/dev/full")
    assert (full.code, full.out) == (0, plain.out)
    said = [line for line in full.err.splitlines() if os.strerror(errno.ENOSPC) in line]
    assert [line.split(":")[1].strip() for line in said] == ["--route-trace", "--io-trace"]
    quiet = run(*arguments, "-q", "--route-trace", "/dev/full")
    assert len(quiet.err.splitlines()) == 1


def test_what_does_not_fit_is_cut_off_at_a_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = os.pwrite, [25]

    def pwrite(fd: int, data: Any, at: int) -> int:
        n = min(len(data), left[0])
        if n == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= n
        return real(fd, bytes(data[:n]), at)

    monkeypatch.setattr(files.os, "pwrite", pwrite)
    out = files.LineFile(tmp_path / "t.csv", "--x")
    out.write("one,two\n")
    out.write("three,four\n")
    out.write("a line that is longer than what is left\n")
    out.write("more\n")
    assert (tmp_path / "t.csv").read_text() == "one,two\nthree,four\n"
    assert "--x: ended early" in out.failure
    assert "No space left" in out.failure
    out.close()


def test_a_killed_run_leaves_whole_rows(tmp_path: Path, tiny: Tiny) -> None:
    path, model = tmp_path / "r.csv", tiny("qwen3moe", "Q8_0", **MODEL)
    process = start("-m", model, "-p", "Hello", "-n", "4000", "-c", "4096", "--ignore-eos", "--route-trace", path)
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end and not (path.exists() and path.stat().st_size > 20_000):
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert path.read_bytes().endswith(b"\n")
    trace = read_trace(path)
    assert len(trace) > 100
    replayed = CacheReplay.recorded(trace).run()
    assert sum(replayed.looked.values()) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--route-trace", "no/such/place.csv"), "--route-trace: cannot write"),
        (("--io-trace", "."), "--io-trace: . is a directory"),
        (("--route-trace", "a.csv", "--io-trace", "a.csv"), "is what --route-trace writes"),
        (("--route-trace", "a.csv", "--metrics-json", "a.csv"), "give another path"),
    ],
)
def test_paths_are_checked_before_the_run(arguments: tuple[str, ...], message: str, tmp_path: Path, tiny: Tiny) -> None:
    done = run("-m", tiny("qwen3moe", "Q8_0", **MODEL), "-p", "x", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert message in done.last
    assert "Traceback" not in done.err
    assert not any(tmp_path.iterdir())


def test_a_library_is_told_of_a_bad_path(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--route-trace"):
        bmoe.Engine.open(tiny("qwen3moe", "Q8_0", **MODEL), route_trace=str(tmp_path / "no" / "t.csv"))


def test_a_model_name_is_one_word(tmp_path: Path, tiny: Tiny) -> None:
    odd = tmp_path / "my model=1 layer=2.gguf"
    odd.symlink_to(tiny("qwen3moe", "Q8_0", **MODEL))
    with bmoe.Engine.open(odd, cache_mb="auto", route_trace=str(tmp_path / "t.csv"), ctx=64) as engine:
        generate(engine, PROMPT[:4], 2)
    trace = read_trace(tmp_path / "t.csv")
    assert trace.header["model"] == "my_model=1_layer=2.gguf"
    assert sorted(trace.expert_bytes) == list(range(len(engine.layers)))
