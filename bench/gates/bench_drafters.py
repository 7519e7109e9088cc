"""The drafters by themselves: what a step costs, and how good the drafts are.

    python -m pytest bench/gates/bench_drafters.py --benchmark-columns=min,median,iqr,rounds --benchmark-sort=name
    python -m pytest bench/gates/bench_drafters.py --gate      # against a plain drafter, and counts: docs/gates.md
    python bench/gates/bench_drafters.py        # acceptance and coverage on the 12 shared streams, and memory

The first is a pytest-benchmark suite: one step at a history of 131,072 tokens, a whole stream, a new prompt; times
are of the Python call, conversion of the result included. `drafter_compare.py` compares with llama.cpp.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gates import native, scripts
from bench.gates.gate import timed
from bmoe import drafting
from bmoe.speculation._drafters import replay

Tokens = npt.NDArray[np.int32]
LONG = 131072


def fibonacci(n: int) -> Tokens:
    a, b = [1], [1, 2]
    while len(b) < n:
        a, b = b, b + a
    return np.array(b[:n], np.int32)


def edited_copy(n: int) -> Tokens:
    """A text of n / 4 tokens of 32,000, then three copies, in which one token of thirty is another."""
    rng = np.random.default_rng(1)
    text = np.tile(rng.integers(0, 32000, n // 4, dtype=np.int32), 4)
    at = rng.random(n) < 1 / 30
    at[: n // 4] = False
    text[at] = rng.integers(0, 32000, int(at.sum()), dtype=np.int32)
    return text


STREAMS: dict[str, Callable[[int], Tokens]] = {
    "edited copy": edited_copy,
    "nothing": lambda n: np.random.default_rng(2).integers(0, 32000, n, dtype=np.int32),
    "one token": lambda n: np.full(n, 9, np.int32),
    "period 2": lambda n: np.tile(np.array([5, 6], np.int32), n // 2),
    "fibonacci": fibonacci,
    "two letters": lambda n: np.random.default_rng(3).integers(0, 2, n, dtype=np.int32),
}


@pytest.mark.parametrize("stream", list(STREAMS))
@pytest.mark.parametrize("name", drafting.TYPES)
def test_step_at_131072(benchmark: Any, name: str, stream: str) -> None:
    """One draft and one token confirmed, with 131,072 tokens of history at the end of the run."""
    text = STREAMS[stream](LONG)
    rounds = 2000
    drafter = drafting.make(name)
    drafter.begin(text[: LONG - rounds - 100])
    at = iter(range(LONG - rounds - 50, LONG))

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        pos = next(at)
        return (text[:pos], int(text[pos])), {}

    drafter.draft(text[: LONG - rounds - 90], 0)
    benchmark.extra_info["bytes per token"] = round(drafter.nbytes / LONG, 1)
    benchmark.pedantic(drafter.draft, setup=setup, rounds=rounds)


@pytest.mark.parametrize("name", drafting.TYPES)
def test_stream(benchmark: Any, name: str) -> None:
    """16,384 tokens of an edited copy, drafted, verified and accepted."""
    text = edited_copy(16384)
    benchmark.pedantic(replay, setup=lambda: ((drafting.make(name), text, 4096), {}), rounds=20, warmup_rounds=2)


@pytest.mark.parametrize("name", drafting.TYPES)
def test_begin(benchmark: Any, name: str) -> None:
    """A prompt of 131,072 tokens that shares nothing with the last one."""
    prompts = [edited_copy(LONG), edited_copy(LONG)[::-1].copy()]
    drafter = drafting.make(name)
    turn = iter(range(1 << 30))
    benchmark.pedantic(drafter.begin, setup=lambda: ((prompts[next(turn) % 2],), {}), rounds=10, warmup_rounds=2)


# Gates.

PROMPT = 4096
# A table of the plain drafter's size: what is compared is work, not pages that the kernel has to clear.
SETTINGS: dict[str, dict[str, Any]] = {"ngram-mod": {"table_size": 1 << 18}}


def _mixed() -> Tokens:
    """24,576 tokens: an edited copy, loops, and text with nothing to draft from."""
    return np.concatenate([scripts.edited_copy(12288), scripts.loops(8192), scripts.noise(4096)])


@pytest.mark.ratio
@pytest.mark.parametrize("name", drafting.TYPES)
def test_against_a_plain_drafter(name: str, compare: Any) -> None:
    """A whole stream, its index built and given back, on both sides."""
    text, settings = _mixed(), SETTINGS.get(name, {})
    if name == "ngram-simple":
        steps, _, accepted, sizes, _ = replay(drafting.make(name), text, PROMPT)
        plain = native.plain_drafter(text, PROMPT, 12, 48)
        assert plain == (steps, len(sizes), int(sizes.sum()), int(accepted.sum()))
    compare(
        f"drafters/{name}",
        timed(lambda: replay(drafting.make(name, **settings), text, PROMPT)),
        timed(lambda: native.plain_drafter(text, PROMPT, 12, 48)),
    )


@pytest.mark.exact
@pytest.mark.parametrize("stream", list(scripts.STREAMS))
@pytest.mark.parametrize("name", drafting.TYPES)
def test_what_is_drafted(name: str, stream: str, exact: Any, planted: frozenset[str]) -> None:
    """Steps, drafts, tokens drafted and accepted, and which."""
    text = scripts.STREAMS[stream](16384)
    if "wrong-draft" in planted:
        text[9000] += 1
    drafter = drafting.make(name)
    steps, _, accepted, sizes, drafted = replay(drafter, text, PROMPT)
    weights = np.arange(1, len(drafted) + 1, dtype=np.int64) % 1009
    counts = {"steps": steps, "drafts": len(sizes), "drafted": int(sizes.sum()), "accepted": int(accepted.sum())}
    exact(f"drafters/{name}, {stream}", {**counts, "tokens, weighed": int((drafted * weights).sum())})


# Quality.

VECTORS = Path(__file__).parents[2] / "tests" / "data" / "drafters" / "reference_vectors.json.gz"

# Milliseconds of a verify batch of N positions, experts streamed through a 1000 MiB cache: a measurement on the
# 12-layer file of Qwen3-30B-A3B's shape, uniform routing (docs/drafting.md). It weighs drafts of different lengths
# against each other here; it is not a measurement of these streams.
BATCH_MS = {1: 110, 2: 139, 4: 280, 8: 664, 16: 925, 32: 1270, 64: 1652}

QUALITY: list[tuple[str, dict[str, int]]] = [
    ("ngram", {}),
    ("ngram", {"max_match": 64}),
    ("ngram", {"n_max": 64, "min_match": 12}),
    ("ngram", {"n_max": 64, "min_match": 12, "max_match": 64}),
    ("ngram-simple", {}),
    ("ngram-simple", {"size_n": 3, "size_m": 5}),
    ("ngram-map-k", {}),
    ("ngram-map-k", {"size_n": 3, "size_m": 6}),
    ("ngram-map-k4v", {}),
    ("ngram-map-k4v", {"size_n": 8, "size_m": 8, "min_hits": 2}),
    ("ngram-map-k4v", {"size_n": 4, "size_m": 6, "min_hits": 2}),
    ("ngram-mod", {}),
    ("ngram-mod", {"n_match": 16, "n_min": 2, "n_max": 32}),
    ("ngram-mod", {"n_match": 4, "n_min": 1, "n_max": 8, "table_size": 512}),
]


def batch_ms(positions: int) -> float:
    """Interpolated from BATCH_MS; positions >= 1."""
    low = max(n for n in BATCH_MS if n <= positions)
    high = min((n for n in BATCH_MS if n >= positions), default=low)
    if low == high:
        return BATCH_MS[low] * positions / low
    return BATCH_MS[low] + (BATCH_MS[high] - BATCH_MS[low]) * (positions - low) / (high - low)


def quality() -> None:
    with gzip.open(VECTORS) as f:
        streams = json.load(f)
    print("# sums over the 12 shared streams; estimate: tokens per second against plain decoding, were every batch as")
    print("# slow as BATCH_MS says, geometric mean over the streams")
    print(
        "{:15} {:9} {:42} {:>6} {:>9} {:>9} {:>8} {:>9} {:>9}".format(
            "drafter", "variant", "settings", "steps", "coverage", "accepted", "of", "tok/step", "estimate"
        )
    )
    for name, config in QUALITY:
        for compat in (False,) if name == "ngram" else (True, False):
            steps = drafts = accepted = drafted = tokens = 0
            logs = []
            for s in streams:
                drafter = drafting.make(name, compat=compat, **config)
                n, _, hit, sizes, _ = replay(drafter, np.array(s["tokens"], np.int32), s["prompt_len"])
                took = (n - len(sizes)) * batch_ms(1) + sum(batch_ms(1 + int(size)) for size in sizes)
                target = len(s["tokens"]) - 1 - s["prompt_len"]
                logs.append(math.log(target * batch_ms(1) / took))
                steps, drafts, tokens = steps + n, drafts + len(sizes), tokens + target
                accepted, drafted = accepted + int(hit.sum()), drafted + int(sizes.sum())
            given = ",".join(f"{key}={value}" for key, value in config.items())
            print(
                f"{name:15} {'compat' if compat else 'default':9} {given:42} {steps:6}"
                f" {drafts / steps:9.1%} {accepted / max(drafted, 1):9.1%} {drafted:8} {tokens / steps:9.2f}"
                f" {math.exp(sum(logs) / len(logs)):9.3f}"
            )


def memory() -> None:
    print(f"\n# bytes held per token of a history of {LONG} tokens, fixed tables included")
    print("{:15}".format("drafter") + "".join(f"{stream:>13}" for stream in STREAMS))
    for name in drafting.TYPES:
        row = f"{name:15}"
        for make_text in STREAMS.values():
            drafter = drafting.make(name)
            replay(drafter, make_text(LONG), LONG - 4096)
            row += f"{drafter.nbytes / LONG:13.1f}"
        print(row)


if __name__ == "__main__":
    quality()
    memory()
