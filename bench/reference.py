"""What streamed runs are compared with: stock llama.cpp with the whole model resident.

`Resident` uses nothing of bmoe. Weights stay in the file's own layout (`use_extra_bufts=False`): repacked ones
make results depend on the CPU, and the AMX layout crashes where a GCC has dropped the tile configuration.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Route = tuple[int, list[list[int]]]
"""One layer of one batch: its number in the model, and the experts of each of its tokens."""


class Tensor(ctypes.Structure):
    """The head of ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


@dataclass
class Run:
    """A generation: its tokens, the logits each was chosen from, and the routes where they were recorded."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)


class Resident:
    """A model loaded whole by stock llama.cpp; a context manager. `record`: note which experts are routed."""

    def __init__(
        self, path: os.PathLike[str], *, threads: int = 1, ubatch: int = 512, ctx: int = 256, record: bool = False
    ) -> None:
        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)
        C.llama_backend_init()
        params = C.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = False
        self.model = C.llama_model_load_from_file(os.fsencode(path), params)
        assert self.model, path
        self.ubatch = min(ubatch, ctx)
        self.routes: list[Route] = []
        context = C.llama_context_default_params()
        context.n_ctx = ctx
        context.n_batch = context.n_ubatch = self.ubatch
        context.n_threads = context.n_threads_batch = threads
        if record:
            self._hook = C.ggml_backend_sched_eval_callback(self._on_node)
            context.cb_eval = self._hook
        self.context = C.llama_init_from_model(self.model, context)
        assert self.context, path
        self.memory = C.llama_get_memory(self.context)
        self.n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self.model))

    def _on_node(self, address: Any, ask: bool, _: Any) -> bool:
        node = Tensor.from_address(ctypes.cast(address, ctypes.c_void_p).value or 0)
        if not node.name.startswith(b"ffn_moe_topk-"):
            return not ask
        if not ask:
            n_used, n_tokens = node.ne[0], node.ne[1]
            rows = [(ctypes.c_int32 * n_used).from_address(node.data + i * node.nb[1]) for i in range(n_tokens)]
            self.routes.append((int(node.name.split(b"-")[1]), [list(row) for row in rows]))
        return True

    def eval(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the sequence, batch by batch as the engine does."""
        for at in range(0, len(tokens), self.ubatch):
            step = tokens[at : at + self.ubatch]
            array = (ctypes.c_int32 * len(step))(*step)
            assert C.llama_decode(self.context, C.llama_batch_get_one(array, len(step))) == 0

    def truncate(self, n: int) -> None:
        """Keeps the first `n` tokens of the sequence."""
        assert C.llama_memory_seq_rm(self.memory, 0, n, -1)

    def go_on(self, tokens: Sequence[int], n: int) -> Run:
        """`n` greedy tokens after the sequence and `tokens`."""
        run, step = Run(routes=self.routes), list(tokens)
        for _ in range(n):
            self.eval(step)
            run.logits.append(self.logits())
            step = [int(np.argmax(run.logits[-1]))]
            run.tokens += step
        return run

    def logits(self) -> Logits:
        """A copy of the logits of the last token."""
        row = np.ctypeslib.as_array(C.llama_get_logits_ith(self.context, -1), (self.n_vocab,))
        return np.array(row, np.float32)

    def generate(self, prompt: Sequence[int], n: int) -> Run:
        """`n` greedy tokens from an empty sequence."""
        C.llama_memory_clear(self.memory, True)
        self.routes = []
        return self.go_on(prompt, n)

    def close(self) -> None:
        """Frees the model."""
        C.llama_free(self.context)
        C.llama_model_free(self.model)

    def __enter__(self) -> Resident:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def drive(engine: Any, prompt: Sequence[int], n: int) -> tuple[Run, Any]:
    """The same from a bmoe engine: `n` greedy tokens with their logits, and the generation's result."""
    run = Run()
    generation = engine.generate(list(prompt), max_tokens=n, stop_at_end=False)
    for token in generation:
        run.tokens.append(token.id)
        run.logits.append(engine.sequence.context.logits().copy())
    return run, generation.result


def differences(run: Run, expected: Run) -> list[str]:
    """Where two runs differ: in a token, or in a bit of a step's logits. Empty where they are the same."""
    found = [] if len(run.tokens) == len(expected.tokens) else [f"{len(run.tokens)} of {len(expected.tokens)} tokens"]
    for i, (a, b, x, y) in enumerate(zip(run.tokens, expected.tokens, run.logits, expected.logits, strict=False)):
        if a != b:
            found.append(f"step {i}: token {a}, expected {b}")
        if not np.array_equal(x, y):
            found.append(f"step {i}: {np.count_nonzero(x != y)} logits differ, by up to {np.abs(x - y).max():.2g}")
    return found


def distinct(routes: Iterable[Route]) -> int:
    """How many (layer, expert) pairs are routed at least once."""
    used: dict[int, set[int]] = defaultdict(set)
    for layer, tokens in routes:
        used[layer].update(e for token in tokens for e in token)
    return sum(map(len, used.values()))
