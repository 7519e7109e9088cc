"""A decode step: what Python adds to it, and whole streamed generations against stock llama.cpp.

    python -m pytest bench/gates/bench_decode.py

The model is a tiny one whose routes follow from its tokens (bench/models/tiny/scripted.py), and the tokens
are a script: what is routed, read and evicted is the same on every machine.
"""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Iterator
from operator import sub
from pathlib import Path
from time import perf_counter, perf_counter_ns
from unittest.mock import patch

import numpy as np
import pytest

import bmoe
from bench import reference
from bench.conftest import Compare, Exact
from bench.gates import native
from bench.gates.gate import timed
from bench.gates.scripted_model import PROMPT, SCRIPT, open_engine, write_model
from bmoe.host._memory import Region
from bmoe.speculation import DraftSpec, MapConfig, ModConfig, NgramConfig
from bmoe.streamer import IO_ROW


def run(engine: bmoe.Engine, n: int) -> bmoe.GenerationResult:
    """Generates the first `n` tokens of the script."""
    generation = engine.generate(PROMPT, max_tokens=n, stop_at_end=False, script=SCRIPT)
    for _ in generation:
        pass
    return generation.result


TOKENS = 24

# ---- ratio gates ----------------------------------------------------------------------------------

_Counters = namedtuple("_Counters", "a b c d e f g h i j k l m n o p q r s t u v w x")


def _bare_steps(n: int) -> Iterator[tuple[int, _Counters, float]]:
    """What a decode step does in Python at the least: clocks, two sets of counters and their difference, a token."""
    zero = _Counters(*range(24))
    history: list[int] = []
    for i in range(n):
        started = perf_counter()
        now = _Counters(*([i] * 24))
        history.append(i & 0xFF)
        yield history[-1], _Counters._make(map(sub, now, zero)), perf_counter() - started


@pytest.mark.ratio
def test_python(compare: Compare, tmp_path: Path) -> None:
    """Everything of a step but llama.cpp's graph, which returns at once here; 40 tokens a round."""
    path = write_model(tmp_path)
    with open_engine(path, None, ctx=8192) as engine:
        generation: Iterator[bmoe.Token] = iter(())
        left = 0

        def tokens() -> int:
            nonlocal generation, left
            if left < 40:  # the context is full: begin anew, outside of what is timed
                left = 8000
                generation = engine.generate(PROMPT, max_tokens=left + 1, stop_at_end=False, script=SCRIPT * 16)
                next(generation)
            left -= 40
            started = perf_counter_ns()
            for _ in range(40):
                next(generation)
            return perf_counter_ns() - started

        with patch.object(engine.sequence.context, "decode", lambda tokens: 0):
            compare("decode/python", tokens, timed(lambda: list(_bare_steps(400))))


@pytest.mark.ratio
def test_resident(compare: Compare, tmp_path: Path) -> None:
    """All experts in slots: 24 tokens by the engine, and by llama_decode and an argmax."""
    path = write_model(tmp_path, n_embd=256)
    with open_engine(path, None) as engine, reference.Resident(path, ctx=1024) as plain:
        run(engine, 64)
        before = engine.counters().reads
        plain.eval(PROMPT)
        compare("decode/resident", timed(lambda: _decode(engine)), timed(lambda: _plain_decode(plain)))
        assert engine.counters().reads == before


@pytest.mark.ratio
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("overlap", [False, True])
def test_streamed(overlap: bool, compare: Compare, tmpfs: Path) -> None:
    """Slots for a third of the experts; the reference reads as many bytes with plain preads before it decodes."""
    path = write_model(tmpfs, n_embd=256)
    with open_engine(path, 21, overlap=overlap) as engine, reference.Resident(path, ctx=1024) as plain:
        run(engine, 64)
        plain.eval(PROMPT)
        result = run(engine, TOKENS + 1)
        size = engine.layers[0].tensors[0].nbytes
        n_reads = result.decode.reads
        assert n_reads > TOKENS
        target = np.empty(size, np.uint8)
        step = (path.stat().st_size - size) // n_reads
        windows = native.as_windows([(i * step, size, target.ctypes.data) for i in range(n_reads)])
        fd = os.open(path, os.O_RDONLY)

        def serial() -> None:
            native.plain_reads(fd, windows)
            _plain_decode(plain)

        try:
            name = "decode/streamed, overlapped" if overlap else "decode/streamed"
            compare(name, timed(lambda: _decode(engine)), timed(serial))
        finally:
            os.close(fd)


def _decode(engine: bmoe.Engine) -> None:
    # The prompt but for its last token is kept from the generation before.
    run(engine, TOKENS + 1)


def _plain_decode(plain: reference.Resident) -> None:
    plain.truncate(len(PROMPT) - 1)
    plain.eval(PROMPT[-1:])
    for token in SCRIPT[:TOKENS]:
        plain.logits().argmax()
        plain.eval([token])


# ---- exact gates ----------------------------------------------------------------------------------

DRAFTS: dict[str, DraftSpec] = {
    "none": DraftSpec(),
    "ngram": DraftSpec(("ngram",), policy="always"),
    "ngram-simple": DraftSpec(("ngram-simple",), policy="always", ngram_simple=MapConfig(4, 8)),
    "ngram-map-k": DraftSpec(("ngram-map-k",), policy="always", ngram_map_k=MapConfig(4, 8)),
    "ngram-map-k4v": DraftSpec(("ngram-map-k4v",), policy="always", ngram_map_k4v=MapConfig(4, 8)),
    "ngram-mod": DraftSpec(("ngram-mod",), policy="always", ngram_mod=ModConfig(4, 2, 8, 1 << 12)),
    "all": DraftSpec(
        ("ngram-simple", "ngram-mod", "ngram"),
        policy="always",
        ngram=NgramConfig(5, 2, 16),
        ngram_simple=MapConfig(6, 12),
        ngram_mod=ModConfig(5, 2, 8, 1 << 12),
    ),
}


@pytest.mark.exact
@pytest.mark.parametrize("draft", list(DRAFTS))
@pytest.mark.parametrize("cache", ["few", "all"])
def test_what_a_generation_counts(
    cache: str, draft: str, exact: Exact, planted: frozenset[str], tmp_path: Path
) -> None:
    """Prefill, decode, speculation and reads of a scripted generation, all of it by the engine's own accounts."""
    path = write_model(tmp_path)
    spare = Region(4096)
    with open_engine(path, 21 if cache == "few" else None, overlap=True, ubatch=16, draft=DRAFTS[draft]) as engine:
        engine.lanes.record(1 << 16)
        generation = engine.generate(PROMPT, max_tokens=256, stop_at_end=False, script=SCRIPT)
        for i, _ in enumerate(generation):
            if i == 100 and "dropped-hit" in planted and engine.cache is not None:
                engine.cache.forget(2, engine.cache.resident(2)[0])
            if i == 100 and "extra-read" in planted:
                engine.lanes.read_windows([(0, 0, 4096, 4096, spare.address)])
        r = generation.result
        assert r.token_ids == SCRIPT[:256]
        raw, lost = engine.lanes.take_reads()
        counts = {"reads of lanes": len(raw) // np.dtype(IO_ROW).itemsize + lost}
        for phase, c in (("prefill", r.prefill), ("decode", r.decode)):
            for name in ("plans", "routed", "hits", "misses", "evictions", "rereads", "streamed", "reads", "bytes"):
                counts[f"{phase} {name}"] = getattr(c, name)
        counts |= {f"bytes of {cause}": n for cause, n in r.flash_split.bytes.items()}
        for name in ("drafted", "accepted", "decodes", "drafted_steps", "confirmed", "recoveries"):
            counts[name] = getattr(r.spec, name)
    spare.close()
    exact(f"generation/{cache} slots, {draft}", counts)
