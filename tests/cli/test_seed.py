"""--temp without --seed: another text each time, and the seed that gives the same again, said and written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cli_process import Finished, run

from bmoe.engine import demo


def drawn(path: Path, metrics: Path, *flags: str) -> tuple[Finished, dict[str, Any]]:
    """A run that draws; its metrics."""
    done = run("-m", path, "-p", "Hello", "-n", "24", "-t", "1", "-c", "128", "--temp", "1.5", "--ignore-eos", *flags,
               "--metrics-json", metrics)  # fmt: skip
    assert done.code == 0, done.err
    return done, json.loads(metrics.read_text())


def said(done: Finished) -> int:
    (line,) = [line for line in done.err.splitlines() if line.startswith("sampling: ")]
    found = re.fullmatch(r"sampling: --seed (\d+) draws the same again", line)
    assert found
    return int(found[1])


def test_a_seed_is_drawn_said_and_written(tiny: Any, tmp_path: Path) -> None:
    path = tiny("qwen3moe", "Q8_0")
    runs = [drawn(path, tmp_path / "m.json") for _ in range(3)]
    assert len({done.out for done, _ in runs}) == 3
    for done, metrics in runs:
        seed = said(done)
        assert metrics["config"]["sampling"]["seed"] == seed
        again, written = drawn(path, tmp_path / "m.json", "--seed", str(seed))
        assert again.out == done.out
        assert written["token_ids"] == metrics["token_ids"]
        assert said(again) == seed


def test_the_demo_keeps_its_own(tiny: Any) -> None:
    first, second = run("-n", "12", "-t", "1"), run("-n", "12", "-t", "1")
    assert first.out == second.out
    assert said(first) == demo.SAMPLING.seed


def test_greedy_says_nothing_of_seeds(tiny: Any) -> None:
    done = run("-m", tiny("qwen3moe", "Q8_0"), "-p", "Hello", "-n", "4", "-t", "1", "-c", "128")
    assert "seed" not in done.err
