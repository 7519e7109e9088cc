"""The regression gates can fail: each kind is run once with a planted fault, and must say so in one line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
from cli_process import ROOT, environment

from bench.gates import bench_instructions, expect, gate, native

needs_a_compiler = pytest.mark.skipif(native.compiler() is None, reason="needs a C compiler")


def run_gates(*arguments: str, **env: str) -> tuple[int, str, list[str]]:
    """`pytest bench --gate --short ...`: its exit code, its output, and the lines that tell of a breach."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--gate", "--short", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=1800)
    lines = [s for s in done.stdout.splitlines() if s.startswith("gate breached: ")]
    # With CI set, pytest's summary repeats a failure's text whole.
    return done.returncode, done.stdout, list(dict.fromkeys(lines))


# ---- a planted fault for each kind of gate --------------------------------------------------------


@needs_a_compiler
@pytest.mark.parametrize(
    ("file", "tests", "name", "factor"),
    [
        ("bench_drafters.py", "plain_drafter and k4v", "drafters/ngram-map-k4v", 2),
        ("bench_plan.py", "policy and votes", "plan/votes", 8),
        ("bench_kernel.py", "Q4_K", "kernel/Q4_K x 1", 2),
        ("bench_reads.py", "large", "lanes/large x 1", 2),
        ("bench_decode.py", "python", "decode/python", 3),
    ],
)
def test_a_slowdown_is_a_breach(file: str, tests: str, name: str, factor: int) -> None:
    """Slower by a factor: 2, more where a limit has to hold on processors that differ by as much.

    What is not slowed down beside it passes. A busy machine may hide it from one run.
    """
    for _ in range(5):
        code, out, breaches = run_gates(
            f"bench/gates/{file}", "-m", "ratio", "-k", tests, "--plant", f"{name}={factor}"
        )
        if code:
            break
    assert code == 1, out
    limit = gate.read_limits()[name]
    (line,) = breaches
    assert re.fullmatch(
        rf"gate breached: {re.escape(name)}: (\d+\.\d\d) x {re.escape(limit.reference)}, limit {limit.ratio:.2f} "
        rf"\(375 rounds in 4 attempts\): {re.escape(limit.why)}",
        line,
    )


@needs_a_compiler
@pytest.mark.parametrize(
    ("file", "test", "fault", "says"),
    [
        ("bench_kernel.py", "", "extra-read", r"graph/1 tokens: .*reads of lanes (\d+), expected (\d+) \(\+1\)"),
        ("bench_kernel.py", "", "dropped-hit", r"graph/16 tokens, overlapped: .*hits (\d+), expected (\d+) \(-1\)"),
        ("bench_plan.py", "", "dropped-hit", r"plan/lru: hits (\d+), expected (\d+) \(-1\); misses"),
        ("bench_decode.py", "none", "extra-read", r"generation/few slots, none: reads of lanes .* \(\+1\)"),
        ("bench_decode.py", "none", "dropped-hit", r"generation/all slots, none: .*decode misses"),
        ("bench_drafters.py", "", "wrong-draft", r"drafters/ngram, edited copy: accepted (\d+), expected (\d+) \(-"),
        ("bench_allocations.py", "", "allocation", r"allocations/generation: 100 tokens, _reads 100, expected 0"),
        ("bench_allocations.py", "", "call", r"calls/100 decode steps: graphs.counters 200, expected 100 \(\+100\)"),
    ],
)
def test_a_count_that_is_off_is_a_breach(file: str, test: str, fault: str, says: str) -> None:
    code, out, breaches = run_gates(f"bench/gates/{file}", "-m", "exact", "-k", test, "--plant", fault)
    assert code == 1, out
    found = [b for b in breaches if re.match(f"gate breached: {says}", b)]
    assert len(found) == 1, breaches
    assert found[0].endswith("; a change that is meant: python -m pytest bench --gate --rebase")


@needs_a_compiler
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_more_instructions_are_a_breach() -> None:
    """A tenth more work in one drafter; its neighbours stay as they are."""
    expected = json.loads(expect.EXPECTED.read_text())
    if f"instructions@{bench_instructions.toolchain()}" not in expected:
        pytest.skip(f"no counts of {bench_instructions.toolchain()}")
    code, out, breaches = run_gates("bench/gates/bench_instructions.py", "--plant", "instructions")
    assert code == 1, out
    (line,) = breaches
    assert re.match(r"gate breached: instructions@.*: drafters/ngram \d+, expected \d+ \(\+\d+, \+1\d\.\d%\);", line)


@needs_a_compiler
def test_without_valgrind_the_counts_are_left_out_with_a_line(tmp_path: Path) -> None:
    for tool in (str(native.compiler()), "as", "ld"):
        (tmp_path / Path(tool).name).symlink_to(str(shutil.which(tool)))
    code, out, _ = run_gates("bench/gates/bench_instructions.py", PATH=str(tmp_path))
    assert code == 0, out
    assert "instruction counts: valgrind is not installed (apt-get install valgrind)\n" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plant", "drafters/ngram"], "--plant drafters/ngram: give GATE=FACTOR with a gate of gates.toml, or "),
        (["--plant", "drafters/ngram=0.5"], "--plant drafters/ngram=0.5: give GATE=FACTOR"),
        (["--plant", "nothing=2"], "--plant nothing=2: give GATE=FACTOR"),
        (["--plant", "call", "--rebase"], "--rebase would commit what --plant breaks: give one of them"),
    ],
)
def test_what_cannot_be_planted(arguments: list[str], says: str) -> None:
    command = [sys.executable, "-m", "pytest", "bench", "--gate", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 4
    assert says in done.stderr


# ---- the parts ------------------------------------------------------------------------------------

LIMIT = gate.Limit(1.5, "the reference", "a reason")
EFFORT = gate.Effort(rounds=10, attempts=3)


def side(*took: int) -> Callable[[], int]:
    """Rounds that take these nanoseconds, again and again."""
    times: Iterator[int] = cycle(took)
    return lambda: next(times)


def test_a_gate_passes_at_the_first_attempt() -> None:
    verdict = gate.measure("x", side(140), side(100), LIMIT, EFFORT)
    assert (verdict.ratios, verdict.rounds, verdict.breached) == ([1.4], 10, False)
    assert verdict.line == "gate passed: x: 1.40 x the reference, limit 1.50 (10 rounds in 1 attempt): a reason"


def test_a_slow_one_is_measured_again_before_it_is_called_a_breach() -> None:
    verdict = gate.measure("x", side(160), side(100), LIMIT, EFFORT)
    assert (verdict.ratios, verdict.rounds, verdict.breached) == ([1.6] * 3, 70, True)


def test_a_disturbed_attempt_is_not_a_breach() -> None:
    turns = count()
    # The warm-up, and the ten rounds of the first attempt.
    verdict = gate.measure("x", lambda: 300 if next(turns) < 11 else 120, side(100), LIMIT, EFFORT)
    assert (verdict.ratios, verdict.breached) == ([3.0, 1.2], False)


def test_noise_on_one_side_does_not_move_the_ratio() -> None:
    """Most rounds disturbed, or single ones on the reference's side that came out fast."""
    assert gate.estimate([900, 130, 900, 900, 900], [100] * 5) == 1.3
    assert gate.estimate([130] * 5, [100, 100, 20, 100, 100]) == 1.3
    assert gate.estimate([200] * 5, [100] * 5) == 2.0


def test_sides_take_turns_in_coming_first() -> None:
    order: list[str] = []

    def noted(name: str) -> Callable[[], int]:
        return lambda: order.append(name) or 1  # type: ignore[func-returns-value]

    gate.measure("x", noted("a"), noted("b"), LIMIT, gate.Effort(4, 1))
    assert "".join(order) == "ab" + "abba" * 2


def test_a_slowed_side_says_how_long_it_took() -> None:
    assert 3_000_000 <= gate.slowed(lambda: 1_000_000, 3.0)() < 60_000_000


def test_a_limit_needs_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "gates.toml"
    path.write_text('[ratio."x"]\nlimit = 2\nreference = "y"\n')
    with pytest.raises(ValueError, match=r'gates.toml: \[ratio."x"\] needs limit, reference and why'):
        gate.read_limits(path)


def test_counts_are_compared_exactly(tmp_path: Path) -> None:
    path = tmp_path / "expected.json"
    path.write_text('{"run": {"hits": 5, "reads": 100}}')
    known = expect.Expectations(path)
    assert known.breach("run", {"hits": 5, "reads": 100}) == ""
    assert known.breach("run", {"hits": 4, "reads": 101, "new": 1}) == (
        "gate breached: run: hits 4, expected 5 (-1); new 1 is new; reads 101, expected 100 (+1); " + expect.REBASE
    )
    assert known.breach("run", {"hits": 5}).startswith("gate breached: run: reads is gone, expected 100; ")
    assert known.breach("run", {"hits": 5, "reads": 103}, 0.03) == ""
    assert "reads 104, expected 100 (+4, +4.0%)" in known.breach("run", {"hits": 5, "reads": 104}, 0.03)
    assert known.breach("walk", {}) == f"gate breached: walk: nothing is expected yet; {expect.REBASE}"
    assert "f 1, expected 0 (+1); 3 more counts; " in expect.Expectations(
        _written(path, {"run": dict.fromkeys("abcdefghi", 0)})
    ).breach("run", dict.fromkeys("abcdefghi", 1))


def test_rebase_writes_what_has_changed(tmp_path: Path) -> None:
    path = _written(tmp_path / "e.json", {"run": {"hits": 5}, "old": {"a": 1}, "old@python 2": {"a": 1}})
    known = expect.Expectations(path, rebase=True)
    assert known.breach("run", {"hits": 6}) == known.breach("walk", {"a": 1}) == ""
    known.forget_the_rest()
    known.write()
    assert json.loads(path.read_text()) == {"run": {"hits": 6}, "walk": {"a": 1}, "old@python 2": {"a": 1}}
    assert known.changes == ["run: hits 6, expected 5 (+1)", "walk: 1 counts are new", "old: is gone"]


def _written(path: Path, known: dict[str, dict[str, int]]) -> Path:
    path.write_text(json.dumps(known))
    return path


def test_a_profile_is_read_by_object_file() -> None:
    """What callees have cost is not counted twice."""
    profile = """desc: Trigger: Client Request: plan/lru
ob=/a/_cache.cpython-311-x86_64-linux-gnu.so
fl=???
fn=one
0 10
cob=/lib/libc.so.6
cfn=memcpy
calls=2 0
0 500
3 5
ob=/lib/libc.so.6
fn=memcpy
0 500
ob=/a/_cache.cpython-311-x86_64-linux-gnu.so
fn=two
7 1
totals: 516
"""
    name, found = bench_instructions.read_profile(profile)
    assert name == "plan/lru"
    assert found == {"_cache.cpython-311-x86_64-linux-gnu.so": 16, "libc.so.6": 500}


@needs_a_compiler
def test_history_is_saved_and_compared(tmp_path: Path) -> None:
    """Without --gate the same files are measured by pytest-benchmark, both sides of each gate."""
    storage = f"--benchmark-storage={tmp_path}"
    command = [sys.executable, "-m", "pytest", "bench/gates/bench_reads.py", "-k", "small", storage]
    options: dict[str, Any] = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True, "timeout": 900}
    for more in (["--benchmark-save=first"], ["--benchmark-compare=0001"]):
        done = subprocess.run([*command, *more], **options)
        assert done.returncode == 0, done.stdout
    assert "(0001_first)" in done.stdout
    assert "benchmark 'lanes/small'" in done.stdout
    saved = json.loads(next(tmp_path.rglob("0001_first.json")).read_text())
    assert {b["name"] for b in saved["benchmarks"]} == {"test_small_reads[bmoe]", "test_small_reads[reference]"}
