"""A model run by llama.cpp alone, whole and mapped: what streamed runs are compared with, and where graphs are watched.

Only the bindings are used, and nothing of `bmoe.llama`: this must run wherever they load.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .check import BrokenError
from .names import bindings

Logits = npt.NDArray[np.float32]


class Stock:
    """A context of a model loaded whole; closed by the end of the process. `head`: the context of its own heads.

    `callback`, `abort`: functions of Python for `cb_eval` and `abort_callback`.
    """

    def __init__(
        self,
        path: Path,
        *,
        threads: int = 2,
        ubatch: int = 64,
        ctx: int = 256,
        head: bool = False,
        callback: Any = None,
        abort: Any = None,
    ) -> None:
        c = self.c = bindings()
        c.llama_backend_init()
        c.llama_log_set(_SILENT, None)
        params = c.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = False
        if head:
            params.load_mtp = True
        self.model = c.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise BrokenError(f"llama.cpp does not load {path.name}")
        context = c.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = ctx, ubatch, ubatch
        context.n_threads = context.n_threads_batch = threads
        if head:
            context.ctx_type = c.LLAMA_CONTEXT_TYPE_MTP
        self._keep: list[Any] = []
        if callback is not None:
            hook = c.ggml_backend_sched_eval_callback(callback)
            context.cb_eval = hook
            self._keep.append(hook)
        if abort is not None:
            stop = c.ggml_abort_callback(abort)
            context.abort_callback = stop
            self._keep.append(stop)
        self.context = c.llama_init_from_model(self.model, context)
        if not self.context:
            raise BrokenError(f"llama.cpp makes no context for {path.name}")
        self.memory = c.llama_get_memory(self.context)
        self.n_vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))

    def decode(self, tokens: Sequence[int]) -> int:
        """Appends one batch of tokens, logits of the last kept; llama_decode's code."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        return int(self.c.llama_decode(self.context, self.c.llama_batch_get_one(array, len(tokens))))

    def decode_each(self, tokens: Sequence[int], position: int) -> list[Logits]:
        """Appends one batch of tokens at `position`; logits of each."""
        batch = self.c.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position + i, 1, True
            batch.seq_id[i][0] = 0
        if self.c.llama_decode(self.context, batch):
            raise BrokenError(f"llama_decode refuses {len(tokens)} tokens with logits of each")
        return [self.logits(i) for i in range(len(tokens))]

    def logits(self, row: int = -1) -> Logits:
        """A copy of the logits of a row, float32 [n_vocab]."""
        return np.array(np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, row), (self.n_vocab,)))

    def generate(self, prompt: Sequence[int], n: int, ubatch: int) -> tuple[list[int], list[Logits]]:
        """`n` greedy tokens after a prompt that is given in batches, and the logits that each was chosen from."""
        tokens, logits, step = [], [], list(prompt)
        for _ in range(n):
            for at in range(0, len(step), ubatch):
                if code := self.decode(step[at : at + ubatch]):
                    raise BrokenError(f"llama_decode returns {code}")
            logits.append(self.logits())
            step = [int(np.argmax(logits[-1]))]
            tokens += step
        return tokens, logits


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


def some_tokens(n: int, seed: int = 0) -> list[int]:
    """A prompt: ids that every vocabulary has as ordinary tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(20, 250, n)]
