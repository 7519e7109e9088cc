"""`bmoe inspect`: its numbers against the file read otherwise, its decision against a run's, and its measurements."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import held
import pytest
from gguf import GGUFReader
from inspect_runs import LARGE, SMALL, as_json
from mtp_heads import TinyMtp

import bmoe
import bmoe.engine.opening
import bmoe.inspect.inspection
from bench.models.tiny import ARCHES
from bmoe.engine import demo
from bmoe.engine.config import EngineConfig
from bmoe.errors import MemoryBudgetError
from bmoe.experts import budget
from bmoe.host.memory import MemoryFacts
from bmoe.inspect import forecast, measurement
from bmoe.inspect.inspection import inspect_model
from bmoe.speculation import DraftSpec

MiB = 1 << 20
NAMES = ("none", "one token", "10 %", "20 %", "35 %", "50 %", "100 %", "auto")
MOE = [arch for arch in ARCHES if arch != "llama"]


@pytest.fixture(scope="module")
def moe(tiny: Any) -> Path:
    return tiny("qwen3moe", "Q8_0", **SMALL)


# ---- the numbers, from the file by another reader ---------------------------------------------------


def by_hand(path: Path, skip: str = "\0") -> dict[str, Any]:
    """Sizes of the model at `path` as gguf-py reads it; tensors that start with `skip` are left out of the experts."""
    reader = GGUFReader(path)
    arch = str(reader.fields["general.architecture"].contents())
    used = reader.fields[f"{arch}.expert_used_count"].contents()
    experts: dict[str, list[Any]] = {}
    for t in reader.tensors:
        if "_exps.weight" in t.name and not t.name.startswith(skip):
            experts.setdefault(t.name.split(".ffn")[0], []).append(t)
    each = [sum(int(t.n_bytes) // int(t.shape[2]) for t in tensors) for tensors in experts.values()]
    types: dict[str, int] = {}
    for t in reader.tensors:
        types[t.tensor_type.name.lower()] = types.get(t.tensor_type.name.lower(), 0) + int(t.n_bytes)
    return {
        "layers": len(experts),
        "count": max(int(tensors[0].shape[2]) for tensors in experts.values()),
        "used": used,
        "experts": sum(int(t.n_bytes) for tensors in experts.values() for t in tensors),
        "expert_min": min(each),
        "expert_max": max(each),
        "token": used * sum(each),
        "types": types,
        "all": sum(int(t.n_bytes) for t in reader.tensors),
    }


@pytest.mark.parametrize("arch", MOE)
def test_sizes_are_those_of_the_file(tiny: Any, arch: str) -> None:
    path = tiny(arch, **SMALL)
    found, hand = as_json(path, "--no-measure"), by_hand(path)
    assert found["arch"] == ("gpt-oss" if arch == "gpt-oss" else arch)
    assert {k: found["experts"][k] for k in ("layers", "count", "used")} == {
        k: hand[k] for k in ("layers", "count", "used")
    }
    sizes = found["bytes"]
    assert {k: sizes[k] for k in ("experts", "expert_min", "expert_max", "token")} == {
        k: hand[k] for k in ("experts", "expert_min", "expert_max", "token")
    }
    assert sizes["file"] == path.stat().st_size
    assert {name.lower(): n for name, n in found["types"].items()} == hand["types"]
    # Whole pages around each run of dense tensors.
    dense = hand["all"] - hand["experts"]
    assert dense <= sizes["dense"] < dense + 64 * 1024
    assert found["disk"] is None
    assert found["measured"] is None
    assert [row["tok_s"] for row in found["predictions"]] == [None] * len(NAMES)


def test_the_demo_model() -> None:
    path = demo.model_path()
    found, hand = as_json("--no-measure"), by_hand(path, skip="blk.6")
    assert found["model"] == str(path)
    assert found["layers"] == 6
    assert found["bytes"]["token"] == hand["token"]
    assert found["bytes"]["experts"] == hand["experts"]
    head = [t for t in GGUFReader(path).tensors if t.name.startswith("blk.6.")]
    experts = sum(int(t.n_bytes) for t in head if "_exps.weight" in t.name)
    assert found["head"] == {
        "n": 1,
        "dense": sum(int(t.n_bytes) for t in head) - experts,
        "experts": experts,
        "token": experts * 4 // 32,
        "loaded": False,
    }


# ---- what a run allocates and decides ---------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [{}, {"ctx": 256}, {"ctx": 1024, "ubatch": 64}, {"n_expert_used": 1}]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("number", range(3))
def test_buffers_are_those_that_the_engine_allocates(tiny: Any, arch: str, number: int) -> None:
    path, settings = tiny(arch, **SMALL), SETTINGS[number]
    found = inspect_model(path, EngineConfig(threads=1, **settings))
    with bmoe.Engine.open(path, threads=1, **settings) as engine:
        assert found.buffers == engine.buffers
        assert found.dense == engine.weights.dense_bytes
        assert found.layers == engine.layers
        assert found.n_used == engine.n_used
        assert found.shape.n_ctx == engine.config.ctx


@pytest.mark.parametrize("arch", ["glm4moe", "qwen35moe", "deepseek2"])
def test_a_head_is_counted_where_it_is_asked_for(tiny_mtp: TinyMtp, arch: str) -> None:
    path = tiny_mtp(arch)
    draft = DraftSpec(types=("mtp",), draft=3)
    without = inspect_model(path, EngineConfig(threads=1))
    found = inspect_model(path, EngineConfig(threads=1, draft=draft))
    with bmoe.Engine.open(path, threads=1, draft=draft) as engine:
        assert found.buffers == engine.buffers
        assert found.dense == engine.weights.dense_bytes
        assert found.layers == engine.layers
    assert found.head is not None
    assert without.head is not None
    assert (found.head.loaded, without.head.loaded) == (True, False)
    assert found.token_bytes - without.token_bytes == found.head.token
    assert found.expert_bytes - without.expert_bytes == found.head.experts


REQUESTS: list[dict[str, Any]] = [
    {},
    {"cache_floor_mb": 200},
    {"cache_ceil_mb": 3},
    {"cache_mb": 2},
    {"cache_mb": 0},
    {"cache_mb": 100000},
    {"dense_weights": "mmap"},
    {"ctx": 2048},
    {"n_expert_used": 2},
]


REFUSED = [{"cache_mb": mb, "ctx": 256, "ubatch": 64} for mb in (25, 100000)]
# For what `auto` leaves to the system, and for a part of the experts beside it; or for less than is asked for.
ENOUGH, TOO_LITTLE = 256 * MiB + 9 * MiB, 28 * MiB


@pytest.mark.parametrize(
    ("request_", "room"),
    [*((r, ENOUGH) for r in REQUESTS), *((r, TOO_LITTLE) for r in REFUSED)],
    ids=map(str, [*REQUESTS, *REFUSED]),
)
def test_what_auto_says_is_what_a_run_decides(
    tiny: Any, request_: dict[str, Any], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("qwen3moe", "Q8_0", **LARGE)
    config = EngineConfig(**{"threads": 1, "force_cache": request_.get("cache_mb") != 0, **request_})
    # A run asks when its dense weights and its KV cache have taken their share.
    facts = MemoryFacts(mem_total=2048 * MiB, mem_available=room)
    # What this process holds differs from moment to moment; both are told the same.
    monkeypatch.setattr(bmoe.engine.opening, "base_rss", lambda: 10 * MiB)
    monkeypatch.setattr(bmoe.inspect.inspection.memory, "read_memory_facts", lambda: facts)
    found = inspect_model(path, config)
    taken: list[int] = []

    def decide(request: Any, sizes: Any, _: MemoryFacts, already_resident: int = 0) -> Any:
        taken.append(already_resident)
        return budget.decide(request, sizes, replace(facts, mem_available=room - already_resident), already_resident)

    assert (found.decision is None) == (room == TOO_LITTLE)
    if found.decision is None:
        with pytest.raises(MemoryBudgetError) as caught:
            bmoe.Engine(path, config, grant=decide)
        figures = _figures(str(caught.value))
        assert len(figures) == 2
        assert figures == pytest.approx(_figures(found.refused), abs=2)
    else:
        with bmoe.Engine(path, config, grant=decide) as engine:
            # Each of the run's figures is rounded to a MiB on its own: "already resident" may cost one.
            assert abs(found.decision.budget - engine.budget_bytes) <= 2 * MiB
            assert engine.decision is not None
            assert found.decision.mode == engine.decision.mode
            assert found.sizes == engine.decision.sizes
    assert taken


def _figures(line: str) -> list[int]:
    """The size asked for, and the largest that fits."""
    return [int(n) for n in re.findall(r"(?:--cache-mb|largest that fits is) (\d+)", line)]


def test_keys_and_values_are_not_subtracted_twice(tiny: Any) -> None:
    """llama.cpp zeroes them when it makes the context: what is available then no longer has them."""
    path = tiny("qwen3moe", "Q8_0", **LARGE)
    with bmoe.Engine.open(path, threads=1, ctx=32768, ubatch=32) as engine:
        kv = engine.buffers.kv
        assert kv > 30 * MiB
        assert 0.9 * kv < engine.zeroed <= kv + engine.buffers.recurrent
        assert engine.decision is not None
        resident = next(term.mib for term in engine.decision.terms if term.name == "already resident")
        assert resident >= (0.9 * kv + engine.weights.dense_bytes) // MiB - 1


# ---- measured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe", "gpt-oss"])
def test_a_measured_model(tiny: Any, arch: str) -> None:
    path = tiny(arch, **SMALL)
    found = as_json(path, "--overlap", "-c", "128")
    assert found["disk"]["bytes"] == found["bytes"]["experts"]
    assert found["disk"]["mib_s"] == pytest.approx(found["disk"]["bytes"] / MiB / found["disk"]["seconds"])
    assert found["measured"]["tokens"] >= 4
    assert found["measured"]["uncached_s"] > 0
    points = found["measured"]["token_s"]
    assert points == sorted(points)
    assert [p[1] for p in points] == sorted(p[1] for p in points)
    assert points[0][0] < 0.05
    names = [row["name"] for row in found["predictions"]]
    assert sorted(names) == sorted(NAMES)
    assert names[-1] == "auto"
    for row in found["predictions"]:
        assert row["tok_s"]["low"] <= row["tok_s"]["mid"] <= row["tok_s"]["high"]
        routed = found["bytes"]["token"]
        assert row["bytes_per_token"]["mid"] == pytest.approx(routed * (1 - row["hit_rate"]["mid"]))
    none, auto = found["predictions"][0], found["predictions"][-1]
    assert (none["budget"], none["share"], none["hit_rate"]["high"]) == (0, 0.0, 0.0)
    assert none["tok_s"]["mid"] == pytest.approx(1 / found["measured"]["uncached_s"])
    assert auto["budget"] == found["cache"]["budget"]
    everything = next(row for row in found["predictions"] if row["name"] == "100 %")
    assert everything["share"] == 1.0
    assert everything["hit_rate"]["mid"] > 0.95


def test_samples_miss_what_they_are_made_to_miss(tiny: Any) -> None:
    path = tiny("qwen3moe", "Q8_0", **LARGE)
    config = EngineConfig(threads=1, overlap=True)
    found = inspect_model(path, config)
    got = measurement.run_probe(path, config, found.sizes.working_set)
    assert got.cache >= found.sizes.working_set
    levels = sorted({round(s.missed, 1) for s in got.samples})
    assert levels[0] == 0.0
    assert levels[-1] == 1.0
    assert got.uncached
    assert all(s.missed == pytest.approx(1.0) for s in got.uncached)
    assert (got.routes.sum(axis=2) == 4).all()
    assert got.routes.shape[1:] == (4, 32)


def test_routes_are_those_of_the_route_trace(tiny: Any, tmp_path: Path) -> None:
    from bmoe.analysis.route_trace import read_trace

    path = tiny("qwen3moe", "Q8_0", **LARGE)
    got = measurement.run_probe(path, EngineConfig(threads=1), inspect_model(path, EngineConfig()).sizes.working_set)
    trace = tmp_path / "routes.csv"
    with bmoe.Engine.open(
        path, threads=1, ctx=measurement.CONTEXT, ubatch=32, cache_mb=0, route_trace=str(trace)
    ) as engine:
        ids = engine.tokenize(measurement.TEXT)
        for _ in engine.generate(ids[:1], max_tokens=len(got.routes), script=ids[1:], stop_at_end=False):
            pass
    rows: dict[int, list[list[int]]] = {}
    for batch in read_trace(trace).batches():
        rows.setdefault(batch.layer, []).extend(sorted(row) for row in batch.rows)
    assert len(rows) == got.routes.shape[1] == LARGE["n_layer"]
    for layer, tokens in enumerate(rows[la] for la in sorted(rows)):
        assert [r.nonzero()[0].tolist() for r in got.routes[:, layer]] == tokens[: len(got.routes)]


def test_without_room_for_one_token_it_runs_without_a_cache(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny("qwen3moe", "Q8_0", **LARGE)
    config = EngineConfig(threads=1, overlap=True)
    found = inspect_model(path, config)
    monkeypatch.setattr(measurement, "MOST_CACHE", 0)
    measured = forecast.measure(found)
    assert measured.probe.cache == 0
    assert measured.probe.samples == []
    assert measured.seen is not None
    assert measured.curve is not None
    assert not measured.curve.hot
    assert measured.curve.seconds(0.0) < measured.curve.seconds(1.0)


def test_nothing_is_left_behind(moe: Path) -> None:
    threads, files = threading.active_count(), len(held.files())
    native = held.threads()
    forecast.measure(inspect_model(moe, EngineConfig(threads=1)))
    assert threading.active_count() == threads
    assert len(held.files()) == files
    assert held.threads() <= native + 1
