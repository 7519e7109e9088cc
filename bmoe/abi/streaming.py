"""Checks of the engine on the installed release: its loader, its reading of graphs, and its results bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..engine.engine import Engine
from ..errors import ModelError
from ..gguf.header import GgufHeader
from . import tiny
from .check import BrokenError, Files, SkippedError, check, expect
from .graph import REUSE
from .layout import LAYOUTS
from .names import BINDINGS, LEFT_OUT
from .stock import Stock, some_tokens

ENGINE = (BINDINGS, LEFT_OUT, *LAYOUTS)
"""What no engine can be opened without."""
OPENS, IDENTITY = "loader: opens", "identity: one token at a time"
PROMPT, STEPS = 24, 12


def _open(path: Path, **settings: Any) -> Engine:
    """An engine with two threads, overlapped, without a cache unless told otherwise."""
    return Engine.open(path, **{"threads": 2, "ctx": 256, "overlap": True, "cache_mb": 0, **settings})


@check("header: values", "GGUF headers are parsed as they were written", "bmoe/gguf/header.py", (LEFT_OUT, *LAYOUTS))
def header(files: Files) -> str:
    with GgufHeader(str(files.tiny)) as h:
        values, tensors, at = h.values(), h.tensors(), h.data_offset
    for name, (_, _, value) in tiny.NUMBERS.items():
        expect(f"a key of type {name}", values.get(f"bmoe.{name}"), value)
    expect("an array", values.get("bmoe.array"), (1, -2, 3))
    expect("a string", values.get("general.architecture"), "qwen3moe")
    expect("the end of the last tensor", at + max(t.offset + t.nbytes for t in tensors), files.tiny.stat().st_size)
    shape = next(t.shape for t in tensors if t.name == "blk.0.ffn_down_exps.weight")
    expect("a shape", shape, (tiny.FF, tiny.EMBD, tiny.EXPERTS, 1))
    return f"{len(tiny.NUMBERS) + 2} types, {len(tensors)} tensors"


@check(
    OPENS,
    "the loader reads through the given FILE, asks the buffer type for each tensor's size, and takes its memory",
    "ext/bmoe/llama/_ggml.pyx (ModelHost), bmoe/llama/model.py (load_model)",
    ENGINE,
)
def opens(files: Files) -> str:
    with _open(files.tiny) as engine, GgufHeader(str(files.tiny)) as h:
        expect("tensors", set(engine.model.tensors), {t.name for t in h.tensors()})
        return f"{len(engine.model.tensors)} tensors found"


@check("loader: shards", "headers of shards are put together by gguf_*", "bmoe/gguf/header.py (merged_with)", (OPENS,))
def shards(files: Files) -> str:
    runs = []
    for path in (files.tiny, files.shards):
        with _open(path) as engine:
            runs.append([t.id for t in engine.generate(some_tokens(4), max_tokens=4, stop_at_end=False)])
    expect("tokens of the shards", runs[1], runs[0])
    return "2 shards"


@check("loader: overrides", "kv_overrides replace keys of the file", "bmoe/llama/model.py (load_model)", (OPENS,))
def overrides(files: Files) -> str:
    with _open(files.tiny, n_expert_used=1) as engine:
        generation = engine.generate(some_tokens(4), max_tokens=4, stop_at_end=False)
        list(generation)
        expect("experts routed for 3 tokens", generation.result.decode.routed, 3 * tiny.LAYERS)
    return "1 expert for each token"


@check(
    "loader: heads on demand",
    "load_mtp decides whether the tensors of heads are loaded",
    "bmoe/llama/model.py (load_model)",
    (OPENS, "names: bindings of --mtp"),
)
def on_demand(files: Files) -> str:
    from ..speculation import DraftSpec

    found = []
    for draft in (DraftSpec(), DraftSpec(types=("mtp",))):
        with _open(files.demo, draft=draft) as engine:
            found.append(sum(".nextn." in name for name in engine.model.tensors))
    expect("tensors of the head without --mtp", found[0], 0)
    expect("tensors of the head with --mtp", found[1] > 0, True)
    return f"{found[1]} tensors"


@check(
    "loader: a failed assertion",
    "while a model is loaded, an assertion that fails is an error with llama.cpp's reason in the log",
    "ext/bmoe/llama/ggml_log.pxi, bmoe/llama/log.py (assertions_caught)",
    (OPENS,),
)
def assertion(files: Files) -> str:
    try:
        with _open(files.spoiled):
            raise BrokenError("a file that routes more experts than it has is opened")
    except ModelError as e:
        said = str(e)
    expect("the reason is told", "GGML_ASSERT" in said or "expert" in said, True)
    return said.partition("cannot load it: ")[2]


@check(
    "loader: reasons",
    "what the GGUF parser complains of is in the log",
    "bmoe/llama/log.py (captured_log)",
    (LEFT_OUT,),
)
def reasons(files: Files) -> str:
    damaged = files.spoiled.with_name("damaged.gguf")
    damaged.write_bytes(files.tiny.read_bytes()[:300])
    try:
        with GgufHeader(str(damaged)):
            raise BrokenError("a header of 300 bytes is read")
    except ModelError as e:
        expect("a reason is given", "no reason given" in str(e), False)
        return str(e).rpartition("header: ")[2]


@check(
    "context: sizes",
    "the log says what KV cache, compute and output buffers take",
    "bmoe/llama/context.py (_BUFFER_LINE)",
    (OPENS,),
)
def sizes(files: Files) -> str:
    with _open(files.demo) as engine:
        b = engine.buffers
    # Six layers of keys and values of 256 positions, F16: far from 0 whatever the padding.
    expect("KV cache is in the log", b.kv > 1 << 16, True)
    expect("compute buffers are in the log", b.compute > 1 << 16, True)
    return f"KV {b.kv >> 10} KiB, compute {b.compute >> 10} KiB"


def _same(engine: Engine, path: Path, prompt: int, ubatch: int) -> None:
    ids = some_tokens(prompt, seed=2)
    tokens, logits = Stock(path, ubatch=ubatch).generate(ids, STEPS, ubatch)
    at = 0
    for token in engine.generate(ids, max_tokens=STEPS, stop_at_end=False):
        got = engine.sequence.context.logits()
        if token.id != tokens[at] or not np.array_equal(got, logits[at]):
            n, most = int((got != logits[at]).sum()), float(np.abs(got - logits[at]).max())
            raise BrokenError(
                f"{path.name}: step {at} differs from the resident run in {n} logits, by up to {most:.3g}"
            )
        at += 1
    expect("steps", at, STEPS)


def _compare(files: Files, prompt: int, ubatch: int, **settings: Any) -> str:
    seen = []
    for path in (files.demo, files.tiny, *files.models):
        for cache in (0, "auto"):
            with _open(path, cache_mb=cache, ubatch=ubatch, **settings) as engine:
                _same(engine, path, prompt, ubatch)
                # Unless the rewritten matmuls are run, this compares stock llama.cpp with itself.
                if engine.layers and not engine.counters().misses:
                    raise BrokenError(f"{path.name}: the engine served no expert")
                seen.append(engine.arch)
    return f"the same bits: {', '.join(dict.fromkeys(seen))}"


@check(
    IDENTITY,
    "streamed logits are those of the resident run, bit for bit",
    "ext/bmoe/streamer/kernel.pxi",
    (OPENS, REUSE),
)
def one_by_one(files: Files) -> str:
    return _compare(files, PROMPT, 1)


@check(
    "identity: wide batches",
    "streamed logits of batches of 64, where ggml may use its tiled kernel, are those of the resident run",
    "ext/bmoe/streamer/kernel.pxi (_rows)",
    (OPENS, REUSE),
)
def wide(files: Files) -> str:
    return _compare(files, 96, 64)


@check(
    "identity: verify batches",
    "streamed logits of each token of a batch are those of the resident run",
    "bmoe/llama/context.py (decode_each)",
    (OPENS, REUSE),
)
def verify(files: Files) -> str:
    ids = some_tokens(12, seed=3)
    for path in (files.demo, files.tiny, *files.models):
        stock = Stock(path, ubatch=64)
        stock.decode(ids[:4])
        expected = stock.decode_each(ids[4:], 4)
        with _open(path, ubatch=64, score_rows=16) as engine:
            engine.sequence.context.decode(np.array(ids[:4], np.int32))
            expect("llama_decode", engine.sequence.context.decode_each(np.array(ids[4:], np.int32), 4), 0)
            for i, logits in enumerate(expected):
                expect(
                    f"{path.name}: row {i} is the same",
                    bool(np.array_equal(engine.sequence.context.logits_of(i), logits)),
                    True,
                )
                expect(f"{path.name}: greedy choice {i}", engine.sequence.context.greedy(i)[0], int(np.argmax(logits)))
    return "8 rows"


@check(
    "graph: routers", "routers can be read off the graph and run again", "ext/bmoe/streamer/_router.pyx", (IDENTITY,)
)
def routers(files: Files) -> str:
    seen = []
    for path in (files.demo, files.tiny, *files.models):
        with _open(path, cache_mb="auto", predict_log=True) as engine:
            list(engine.generate(some_tokens(8), max_tokens=6, stop_at_end=False))
            if path in (files.demo, files.tiny):
                expect(f"{path.name}: layers whose router cannot be read", engine.streamer.unpredictable(), [])
            for i, score in enumerate(engine.streamer.scores()):
                right, whole = score["control"]
                expect(
                    f"{path.name}: routed experts that layer {i}'s own router names",
                    f"{right} of {whole}",
                    f"{whole} of {whole}",
                )
            seen.append(engine.arch)
    return ", ".join(dict.fromkeys(seen))


@check(
    "graph: routing weights",
    "the final routing weights are a [1, top_k, tokens] operand of a MUL on what the last expert matmul has become",
    "ext/bmoe/streamer/_dropping.pyx (drop_walk)",
    (IDENTITY,),
)
def weights(files: Files) -> str:
    for path in (files.demo, files.tiny):
        with _open(path, cache_mb="auto", drop_cold_experts=1.0) as engine:
            list(engine.generate(some_tokens(4), max_tokens=6, stop_at_end=False))
            c = engine.counters()
            expect(f"{path.name}: layers and positions decided", c.drop_positions, 5 * len(engine.layers))
            expect(
                f"{path.name}: the weight that fell is a share",
                0 <= c.drop_mass <= c.drop_positions and (c.dropped > 0) == (c.drop_mass > 0),
                True,
            )
    return "found in every layer"


@check(
    "sampling: chain", "llama.cpp's sampler chain draws by its seed", "bmoe/llama/sampler.py (SamplerChain)", (OPENS,)
)
def sampling(files: Files) -> str:
    from ..engine.config import Sampling

    runs = []
    for seed in (1, 1, 2, 3, 4):
        with _open(files.tiny) as engine:
            how = Sampling(temp=2.0, top_k=0, top_p=1.0, seed=seed)
            runs.append([t.id for t in engine.generate(some_tokens(4), max_tokens=8, sampling=how, stop_at_end=False)])
    expect("the second run with a seed", runs[1], runs[0])
    expect("other seeds draw otherwise", any(r != runs[0] for r in runs[2:]), True)
    return "5 runs"


@check(
    "memory: recurrent snapshots",
    "a recurrent state goes back n_rs_seq tokens",
    "bmoe/llama/context.py (Context)",
    (OPENS,),
)
def snapshots(files: Files) -> str:
    done = []
    for path in files.models:
        with _open(path, draft=_drafts(4), ubatch=64) as engine:
            if not engine.sequence.context.recurrent:
                continue
            expect(f"{path.name}: snapshots", engine.sequence.context.n_snapshots > 0, True)
            ids = np.array(some_tokens(12), np.int32)
            engine.sequence.context.decode(ids[:8])
            engine.sequence.context.decode_each(ids[8:11], 8)
            expect(f"{path.name}: taken back", engine.sequence.context.truncate(9), True)
            engine.sequence.context.decode(ids[9:10])
            got = engine.sequence.context.logits().copy()
            engine.sequence.context.clear()
            engine.sequence.context.decode(ids[:8])
            engine.sequence.context.decode_each(ids[8:9], 8)
            engine.sequence.context.decode(ids[9:10])
            close = np.allclose(got, engine.sequence.context.logits(), atol=0.05)
            expect(f"{path.name}: logits after it are those without the tail", bool(close), True)
            done.append(engine.arch)
    if not done:
        raise SkippedError("no recurrent model was given with --model")
    return ", ".join(done)


def _drafts(n: int) -> Any:
    from ..speculation import DraftSpec

    return DraftSpec(types=("ngram",), draft=n)
