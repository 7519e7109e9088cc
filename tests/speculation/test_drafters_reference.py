"""The shared reference runs of llama.cpp's own drafters, step for step and draft for draft."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_drafters

from bmoe import drafting
from bmoe.speculation._drafters import replay

VECTORS = Path(__file__).parents[1] / "data" / "drafters" / "reference_vectors.json.gz"
STREAMS = ["compete", "edit_bisect", "edit_colorsys", "edit_heapq", "edit_stat", "period_1", "period_2", "period_33"]
STREAMS += ["rand_0", "rand_1", "rand_3", "rand_5"]
RUNS = 11


@cache
def vectors() -> dict[str, dict[str, Any]]:
    with gzip.open(VECTORS) as f:
        return {s["stream"]: s for s in json.load(f)}


def expected(run: dict[str, Any]) -> list[tuple[int, int, list[int]]]:
    return [(d["pos"], d["accepted"], d["tokens"]) for d in run["drafts"]]


def driven(drafter: Any, tokens: list[int], prompt_len: int, convert: Any) -> tuple[int, list[Any]]:
    """The driver of shared/data/README.md, through the Python face."""
    drafter.begin(convert(tokens[:prompt_len]))
    pos, steps, drafts = prompt_len, 0, []
    whole = convert(tokens)
    while pos + 1 < len(tokens):
        draft = list(map(int, drafter.draft(whole[:pos], tokens[pos])))
        steps += 1
        accepted = 0
        while accepted < len(draft) and tokens[pos + 1 + accepted : pos + 2 + accepted] == [draft[accepted]]:
            accepted += 1
        if draft:
            drafter.accept(accepted)
            drafts.append((pos, accepted, draft))
        pos += 1 + accepted
    return steps, drafts


def test_all_streams_are_here() -> None:
    assert sorted(vectors()) == STREAMS
    assert all(len(s["runs"]) == RUNS for s in vectors().values())


@pytest.mark.parametrize("index", range(RUNS))
@pytest.mark.parametrize("stream", STREAMS)
def test_compat_reproduces_llama_cpp(stream: str, index: int) -> None:
    s = vectors()[stream]
    run = s["runs"][index]
    drafter = drafting.make(run["drafter"], compat=True, **run["config"])
    steps, pos, accepted, sizes, flat = replay(drafter, s["tokens"], s["prompt_len"])
    drafts = [d.tolist() for d in np.split(flat, np.cumsum(sizes)[:-1])] if len(sizes) else []
    assert steps == run["steps"]
    assert list(zip(pos.tolist(), accepted.tolist(), drafts, strict=True)) == expected(run)
    assert drafter.stats["drafted_steps"] == len(run["drafts"])
    assert drafter.stats["accepted"] == sum(d["accepted"] for d in run["drafts"])


@pytest.mark.parametrize("index", range(RUNS))
@pytest.mark.parametrize("stream", ["edit_bisect", "rand_0"])
def test_through_the_python_face(stream: str, index: int) -> None:
    s = vectors()[stream]
    run = s["runs"][index]
    drafter = drafting.make(run["drafter"], compat=True, **run["config"])
    assert driven(drafter, s["tokens"], s["prompt_len"], lambda t: np.array(t, np.int32)) == (
        run["steps"],
        expected(run),
    )


@pytest.mark.parametrize("index", range(RUNS))
@pytest.mark.parametrize("stream", ["edit_bisect", "rand_0", "rand_1", "rand_5"])
def test_plain_reference_reproduces_llama_cpp(stream: str, index: int) -> None:
    """tests/support/reference_drafters.py, against which everything else is compared, is itself right."""
    s = vectors()[stream]
    run = s["runs"][index]
    reference = reference_drafters.make(run["drafter"], compat=True, **run["config"])
    assert driven(reference, s["tokens"], s["prompt_len"], list) == (run["steps"], expected(run))


@pytest.mark.parametrize("index", [i for i in range(RUNS) if i in (5, 6, 7)])
@pytest.mark.parametrize("stream", STREAMS)
def test_ngram_mod_default_needs_no_reset(stream: str, index: int) -> None:
    """Within one request, and below the quarter of the table that makes llama.cpp drop its prompt, the default
    drafts the same without ever resetting: a reset is followed by adding the whole history again."""
    s = vectors()[stream]
    run = next(r for i, r in enumerate(r for r in s["runs"] if r["drafter"] == "ngram-mod") if i == index - 5)
    assert "table_size" not in run["config"]
    _, pos, accepted, sizes, flat = replay(drafting.make("ngram-mod", **run["config"]), s["tokens"], s["prompt_len"])
    assert [(d["pos"], d["accepted"], len(d["tokens"])) for d in run["drafts"]] == list(
        zip(pos.tolist(), accepted.tolist(), sizes.tolist(), strict=True)
    )
    assert flat.tolist() == [t for d in run["drafts"] for t in d["tokens"]]
