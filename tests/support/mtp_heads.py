"""What drives multi-token-prediction heads in the tests: forced heads, recorded ones, a resident one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as C

import bmoe
from bench.models.tiny import prompt_ids
from bench.models.tiny.heads import BUILDERS
from bmoe.llama.head import HEADS
from bmoe.speculation import DraftSpec, mtp
from bmoe.speculation.mtp import MtpSource

TinyMtp = Callable[..., Path]


class ForcedHead(MtpSource):
    """Drafts what `answer` says should follow the first `prompt_len` tokens, whatever the head's graph says.

    The graph runs all the same, and is fed with these tokens. `wrong`: of the drafted tokens, one in `wrong` is not
    that of the answer; 0: none.
    """

    def __init__(self, source: MtpSource, prompt_len: int, answer: Sequence[int], wrong: int = 0) -> None:
        super().__init__(source.head, source.n_max)
        self.prompt_len, self.answer, self.wrong = prompt_len, list(answer), wrong
        self.chosen = 0

    def choose(self, i: int) -> tuple[int, bool]:
        super().choose(i)
        at = self._reaches - self.prompt_len
        token = self.answer[at] if at < len(self.answer) else 0
        self.chosen += 1
        return ((token + 1) % 256 if self.wrong and self.chosen % self.wrong == 0 else token), True


def force(engine: bmoe.Engine, source: MtpSource) -> None:
    """Makes `source` the engine's head and its only drafter."""
    engine.sequence.head = source
    engine.drafting.drafter = bmoe.drafting.DrafterStack([source])


def head_state(engine: bmoe.Engine) -> bytes:
    """Keys, values and positions that the head's context holds."""
    assert engine.sequence.head is not None
    handle = engine.sequence.head.head.handle  # type: ignore[attr-defined]
    buffer = (ctypes.c_uint8 * C.llama_state_seq_get_size(handle, 0))()
    n = C.llama_state_seq_get_data(handle, buffer, len(buffer), 0)
    return bytes(buffer[:n])


@dataclass
class Batch:
    """One graph of a head: what went in, and the logits of its outputs, float32 [n, n_vocab]."""

    head: int
    tokens: list[int]
    rows: np.ndarray[Any, np.dtype[np.float32]]
    position: int
    held: int
    logits: np.ndarray[Any, np.dtype[np.float32]]


def record(engine: bmoe.Engine) -> list[Batch]:
    """The list to which every graph of the engine's head is added."""
    assert engine.sequence.head is not None
    source, context = engine.sequence.head, engine.sequence.head.head
    run, batches = context.run, list[Batch]()

    def recorded(head: int, tokens: Sequence[int], rows: Any, position: int, outputs: bool) -> int:
        given = rows.copy()  # of the head's own: the graph overwrites it
        code = run(head, tokens, rows, position, outputs)
        kept = [context.output_logits(i).copy() for i in range(len(tokens) if outputs else 0)]
        logits = np.array(kept, np.float32)
        batches.append(Batch(head, list(tokens), given, position, source.held, logits))
        return code

    context.run = recorded  # type: ignore[method-assign]
    return batches


class ResidentHead:
    """The head of a model that stock llama.cpp has loaded whole; replays batches. Nothing of bmoe is used."""

    def __init__(self, path: os.PathLike[str], n_outputs: int) -> None:
        params = C.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = False
        params.load_mtp = True
        self.model = C.llama_model_load_from_file(os.fsencode(path), params)
        assert self.model
        context = C.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = 256, 64, 64
        context.n_threads = context.n_threads_batch = 1
        context.n_outputs_max = n_outputs
        context.ctx_type = C.LLAMA_CONTEXT_TYPE_MTP
        self.context = C.llama_init_from_model(self.model, context)
        assert self.context
        self.lib = ctypes.CDLL(C._lib._name)
        address = ctypes.cast(self.context, ctypes.c_void_p)
        self.lib._Z26llama_set_embeddings_nextnP13llama_contextbb(address, ctypes.c_bool(True), ctypes.c_bool(True))
        self.address = address
        self.batch = C.llama_batch_ext_init(self.context)
        self.n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self.model))

    def replay(self, batch: Batch) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Logits of each output, float32 [n, n_vocab]."""
        # What the head holds beyond its confirmed tokens is taken back between drafts, or between heads.
        memory = C.llama_get_memory(self.context)
        assert C.llama_memory_seq_rm(memory, 0, batch.position, -1)
        C.llama_batch_ext_clear(self.batch)
        for i, token in enumerate(batch.tokens):
            row = np.ascontiguousarray(batch.rows[i])
            embd = C.llama_embd(row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, len(row))
            assert C.llama_batch_ext_add_token(self.batch, 0, token) == i
            assert C.llama_batch_ext_set_pos(self.batch, i, ctypes.byref(ctypes.c_int32(batch.position + i)))
            assert C.llama_batch_ext_set_embd_token(self.batch, i, embd)
            assert C.llama_batch_ext_set_output_logits(self.batch, i, bool(len(batch.logits)))
        self.lib._Z28llama_set_nextn_layer_offsetP13llama_contexti(self.address, ctypes.c_int32(batch.head))
        assert C.llama_process(self.context, C.LLAMA_PROCESS_TYPE_DECODE, self.batch) == 0
        logits = [
            np.ctypeslib.as_array(C.llama_get_logits_ith(self.context, i), (self.n_vocab,)).copy()
            for i in range(len(batch.logits))
        ]
        return np.array(logits, np.float32)

    def close(self) -> None:
        C.llama_batch_ext_free(self.batch)
        C.llama_free(self.context)
        C.llama_model_free(self.model)


N = 40
PROMPT = prompt_ids(24, 3)
MODELS = [("glm4moe", 1), ("deepseek2", 1), ("qwen35moe", 1), ("hy_v3", 2), ("hy_v3", 3)]
MODELS += [(arch, 2 if HEADS[arch] > 1 else 1) for arch in BUILDERS if arch not in ("hy_v3", "qwen3next")]
FLIPPED = 0.1  # of the positions of a run, those that a router's near-tie may change, or one
DENSE_HEADS = ("mimo2", "qwen35")  # whose heads have no experts; qwen35 has none at all
models = pytest.mark.parametrize(("arch", "heads"), MODELS, ids=[f"{arch}-{heads}" for arch, heads in MODELS])


def spec(draft: int = 3, **settings: Any) -> DraftSpec:
    return DraftSpec(types=("mtp",), draft=draft, policy="always", **settings)


def ids(engine: bmoe.Engine, prompt: Sequence[int], n: int = N, **settings: Any) -> list[int]:
    return [t.id for t in engine.generate(prompt, max_tokens=n, stop_at_end=False, **settings)]


def head_of(engine: bmoe.Engine) -> mtp.MtpSource:
    assert engine.sequence.head is not None
    return engine.sequence.head


def close_state(a: bytes, b: bytes) -> None:
    """Two states of a head's context: the same positions; keys and values but for the rounding of wider batches."""
    assert len(a) == len(b)
    x, y = np.frombuffer(a[: len(a) & ~1], np.float16), np.frombuffer(b[: len(b) & ~1], np.float16)
    wide, narrow = x.astype(np.float64), y.astype(np.float64)
    np.testing.assert_allclose(wide, narrow, atol=0.02, rtol=0.02)
    # How many are the same to the bit depends on the processor's kernels (0.78 to 0.99); nearly all are next to it.
    assert np.isclose(wide, narrow, rtol=2**-9, atol=2**-10).mean() > 0.95


def same_drafts(a: tuple[list[int], list[Batch]], b: tuple[list[int], list[Batch]]) -> None:
    """Two runs wrote the same, and their heads, asked at the same places, gave the same first token.

    Logits but for the rounding of batches of other widths. It can tip a near-tie of a router, after which a position's
    logits are others altogether; a wrong row or key moves those of every position behind it.
    """
    assert a[0] == b[0]
    first = [
        {
            x.position: x
            for x in batches
            if len(x.logits) and len(x.tokens) == 1 and x.head == 0 and x.position == x.held
        }
        for _, batches in (a, b)
    ]
    assert first[0].keys() == first[1].keys()
    assert len(first[0]) >= 5
    apart = 0
    for position, x in first[0].items():
        assert x.tokens == first[1][position].tokens
        apart += not np.allclose(x.logits, first[1][position].logits, atol=0.1)
    assert apart <= max(1, FLIPPED * len(first[0]))
