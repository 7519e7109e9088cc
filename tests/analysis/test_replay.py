"""Replays of recorded routes: the shared curves, and what the engine's policy reaches on them."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path

import pytest

from bench.studies import replay, replay_policies
from bmoe.analysis.route_trace import RouteTrace, read_trace

SHARED = Path(__file__).parents[3] / "shared" / "data" / "route-traces"
NAMES = ("qwen", "gptoss", "gemma")
MiB = 1 << 20
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared traces are not here")


@cache
def trace(name: str) -> RouteTrace:
    return read_trace(SHARED / f"{name}.route.csv.gz")


@cache
def curve(name: str) -> dict[tuple[int, str], dict[str, float]]:
    """The expected figures by budget and policy."""
    with open(SHARED / f"{name}.expected-hit-curve.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    keys = ("hit_pct_cum", "hit_pct_decode", "read_mib")
    return {(int(r["budget_mib"]), r["policy"]): {k: float(r[k]) for k in keys} for r in rows}


@pytest.mark.parametrize("name", NAMES)
def test_lru_is_the_expected_curve(name: str) -> None:
    for mib in replay.CURVE:
        row, expected = replay.row(trace(name), mib, "lru"), curve(name)[mib, "lru"]
        assert row["hit_pct_decode"] == pytest.approx(expected["hit_pct_decode"], abs=0.002), mib
        assert row["hit_pct_cum"] == pytest.approx(expected["hit_pct_cum"], abs=0.002), mib
        assert row["read_mib"] == pytest.approx(expected["read_mib"], abs=0.2), mib


@pytest.mark.parametrize("policy", ["belady", "lfu", "layer", "layerlfu"])
def test_the_other_policies_are_the_expected_curves(policy: str) -> None:
    for name in NAMES:
        row, expected = replay.row(trace(name), 1500, policy), curve(name)[1500, policy]
        assert row["hit_pct_decode"] == pytest.approx(expected["hit_pct_decode"], abs=0.002), name


def test_random_is_near_the_expected_curve() -> None:
    got = replay.row(trace("qwen"), 2000, "random")["hit_pct_decode"]
    assert got == pytest.approx(curve("qwen")[2000, "random"]["hit_pct_decode"], abs=1.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_engines_lru_is_near_the_curve(name: str) -> None:
    """Slots in classes, given up before a batch's reads instead of after: a little more or less."""
    for mib in (2000, 4000):
        got = replay.row(trace(name), mib, "engine-lru")["hit_pct_decode"]
        assert got == pytest.approx(curve(name)[mib, "lru"]["hit_pct_decode"], abs=1.5)


@pytest.mark.parametrize("name", NAMES)
def test_the_default_is_at_least_the_best_online_policy(name: str) -> None:
    """From 750 MiB: below, the curves' shares of layers hold more than the budget, see the next test."""
    for mib in replay.CURVE[2:]:
        got = replay.row(trace(name), mib, "default")
        best = max(curve(name)[mib, p]["hit_pct_decode"] for p in ("lru", "lfu", "layer", "layerlfu"))
        assert got["hit_pct_decode"] >= best, (mib, got, best)
        assert got["held_mib"] <= mib


@pytest.mark.parametrize("name", NAMES)
def test_with_the_memory_that_a_share_of_each_layer_holds_the_default_has_more(name: str) -> None:
    """At 500 MiB the curves' layer policies hold a whole token's experts, far more than 500 MiB."""
    layered = replay_policies.replay(trace(name), 500 * MiB, "layer")
    assert layered.held_bytes > 650 * MiB
    assert replay.replay(trace(name), layered.held_bytes, "default").decode_pct > layered.decode_pct + 2


@pytest.mark.parametrize(
    ("name", "mib", "floor"),
    [("qwen", 500, 31.5), ("qwen", 2000, 65.5), ("qwen", 4000, 83.3), ("gptoss", 500, 17.5), ("gptoss", 2000, 39.0),
     ("gptoss", 4000, 54.5), ("gemma", 500, 34.0), ("gemma", 2000, 68.5), ("gemma", 4000, 85.0)],
)  # fmt: skip
def test_what_the_default_reaches(name: str, mib: int, floor: float) -> None:
    assert replay.row(trace(name), mib, "default")["hit_pct_decode"] >= floor


def test_it_has_hits_however_small_the_budget() -> None:
    for name in NAMES:
        for mib in (0, 20, 50, 250):
            got = replay.replay(trace(name), mib * MiB, "default")
            assert (got.decode_pct > 0) == (mib > 0), (name, mib)
            assert got.held_bytes <= mib * MiB


def test_the_command_writes_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    path = str(SHARED / "gptoss.route.csv.gz")
    assert replay.main([path, "--budgets", "500,2000", "--policies", "lru,belady,default", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [(r["trace"], r["budget_mib"], r["policy"]) for r in rows] == [
        ("gptoss", mib, policy) for mib in (500, 2000) for policy in ("lru", "belady", "default")
    ]
    assert {"hit_pct_decode", "hit_pct_cum", "read_mib", "held_mib"} < rows[0].keys()
    assert f"{rows[5]['hit_pct_decode']:.2f}" in capsys.readouterr().out


def test_what_the_command_cannot_do_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SHARED / "gptoss.route.csv.gz")
    assert replay.main([str(tmp_path / "none.gz")]) == 1
    assert capsys.readouterr().err == f"replay: {tmp_path / 'none.gz'}: No such file or directory\n"
    assert replay.main([path, "--budgets", "500", "--policies", "default", "--json", str(tmp_path)]) == 1
    assert "--json: cannot write" in capsys.readouterr().err
    for flags in (["--budgets", "a"], ["--budgets", "0"], ["--policies", "fifo"]):
        with pytest.raises(SystemExit) as e:
            replay.main([path, *flags])
        assert e.value.code == 2
