"""Contexts: batches of tokens in, logits out, and what their buffers take."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import BmoeError
from . import _ggml, library
from .log import assertions_caught, last_complaint
from .model import Model
from .vocabulary import piece

ABORTED = 2
"""What llama_decode returns where the abort callback stopped it."""

_BUFFER_LINE = re.compile(r"(\S+)\s+(KV|RS|compute|output)\s+buffer size\s*=\s*([\d.]+) MiB")
# A dry model's context says that its KV buffers have no size; what they would have is only here.
_DRY_KV_LINE = re.compile(r"llama_kv_cache\w*: size\s*=\s*([\d.]+) MiB")


@dataclass(frozen=True)
class BufferSizes:
    """What a context has allocated, bytes: KV cache, recurrent state, compute and output buffers."""

    kv: int
    recurrent: int
    compute: int

    def __add__(self, other: BufferSizes) -> BufferSizes:
        return BufferSizes(self.kv + other.kv, self.recurrent + other.recurrent, self.compute + other.compute)


class Context:
    """A llama.cpp context: token batches in, logits out. One thread at a time, except for the stop flag."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_ubatch: int,
        n_threads: int,
        n_outputs: int = 1,
        n_each: int = 0,
        n_snapshots: int = 0,
        mtp: bool = False,
        eval_callback: int = 0,
        abort_callback: int = 0,
        userdata: int = 0,
    ) -> None:
        C = library.C
        params = C.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_ubatch
        params.n_ubatch = n_ubatch
        params.n_seq_max = 1
        # Logits are wanted for few rows; the default reserves vocabulary x batch floats.
        params.n_outputs_max = n_outputs
        params.n_rs_seq = n_snapshots
        params.ctx_type = C.LLAMA_CONTEXT_TYPE_MTP if mtp else C.LLAMA_CONTEXT_TYPE_DEFAULT
        params.n_threads = n_threads
        params.n_threads_batch = n_threads
        params.offload_kqv = False
        params.op_offload = False
        params.no_perf = True
        if eval_callback:
            params.cb_eval = C.ggml_backend_sched_eval_callback(eval_callback)
            params.cb_eval_user_data = ctypes.c_void_p(userdata)
        if abort_callback:
            params.abort_callback = ctypes.cast(ctypes.c_void_p(abort_callback), C.ggml_abort_callback)
            params.abort_callback_data = ctypes.c_void_p(userdata)
        with assertions_caught() as log:
            self.handle = C.llama_init_from_model(model.handle, params)
        if not self.handle:
            why = last_complaint(log)
            raise BmoeError(f"llama.cpp cannot make a context of {n_ctx} tokens ({why}): use a smaller -c or --ubatch")
        self.model = model
        self.buffers = self._sizes(log, model.dry)
        self.n_ctx = int(C.llama_n_ctx(self.handle))
        self.n_batch = int(C.llama_n_batch(self.handle))
        self.n_vocab = model.n_vocab
        self._memory = C.llama_get_memory(self.handle)
        self.recurrent = bool(C.llama_model_is_recurrent(model.handle) or C.llama_model_is_hybrid(model.handle))
        self.n_snapshots = int(C.llama_n_rs_seq(self.handle))
        self._batch = C.llama_batch_init(n_each or n_outputs, 0, 1)
        self._address = int(ctypes.cast(self.handle, ctypes.c_void_p).value or 0)
        self._vocab_address = int(ctypes.cast(model.vocab, ctypes.c_void_p).value or 0)
        self._logits_at = 0
        self._logits: npt.NDArray[np.float32] = np.empty(0, np.float32)

    @staticmethod
    def _sizes(log: list[str], dry: bool) -> BufferSizes:
        found = {"KV": 0.0, "RS": 0.0, "compute": 0.0, "output": 0.0}
        for line in log:
            if m := _BUFFER_LINE.search(line):
                found[m[2]] += float(m[3])
            elif dry and (m := _DRY_KV_LINE.search(line)):
                found["KV"] += float(m[1])
        mib = 1 << 20
        return BufferSizes(
            int(found["KV"] * mib), int(found["RS"] * mib), int((found["compute"] + found["output"]) * mib)
        )

    def decode(self, tokens: npt.NDArray[np.int32]) -> int:
        """Appends `tokens` (int32, at most one batch) to the sequence; logits of the last are kept.

        Returns llama_decode's code: 0 done, 1 no room, ABORTED, negative for errors.
        """
        batch = library.C.llama_batch_get_one(tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), len(tokens))
        return int(library.C.llama_decode(self.handle, batch))

    def decode_each(self, tokens: npt.NDArray[np.int32], position: int, skip: int = 0) -> int:
        """As `decode`, at `position` (how many tokens the sequence holds), with logits of all but the first `skip`.

        At most `n_outputs` of them, in a batch of at most `n_each` tokens.
        """
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = int(token)
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= skip
        return int(library.C.llama_decode(self.handle, batch))

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits of the last decoded token, float32 [n_vocab]: a view, valid until the next decode."""
        address = library.lib().llama_get_logits_ith(self.handle, -1)
        if address != self._logits_at:  # the buffer stays where it is: one view serves every step
            floats = (ctypes.c_float * self.n_vocab).from_address(address)
            self._logits_at, self._logits = address, np.ctypeslib.as_array(floats)
        return self._logits

    def logits_of(self, row: int) -> npt.NDArray[np.float32]:
        """As `logits`, of the token at place `row` of the last batch, where they were kept."""
        floats = (ctypes.c_float * self.n_vocab).from_address(library.lib().llama_get_logits_ith(self.handle, row))
        return np.ctypeslib.as_array(floats)

    def greedy(self, row: int = -1) -> tuple[int, bool, bytes]:
        """The likeliest token after the last decoded one: its id, whether it ends a generation, its bytes.

        `row`: after the token at that place of the batch instead, where its logits were kept.
        """
        token, end, text = _ggml.greedy_token(self._address, self._vocab_address, self.n_vocab, row)
        return token, end, piece(self.model, token) if text is None else text

    def truncate(self, n: int) -> bool:
        """Keeps the first `n` tokens of the sequence. False where this kind of memory cannot."""
        return bool(library.C.llama_memory_seq_rm(self._memory, 0, n, -1))

    def first_kept(self) -> int:
        """Position of the oldest token still held: above 0 where a sliding window has dropped some."""
        return int(library.C.llama_memory_seq_pos_min(self._memory, 0))

    def clear(self) -> None:
        """Empties the sequence."""
        library.C.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        if self.handle is not None:
            library.C.llama_batch_free(self._batch)
            library.C.llama_free(self.handle)
            self.handle = None
