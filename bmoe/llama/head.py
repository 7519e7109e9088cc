"""llama.cpp's multi-token-prediction calls: hidden rows out of the target's context, and the context of the head.

The calls are exported by libllama but in no installed header: C++ symbols, bound here by their mangled names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import AbiError, BmoeError
from . import library
from .context import Context
from .model import Model

Rows = npt.NDArray[np.float32]

HEADS: dict[str, int] = {
    **dict.fromkeys(("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe"), 1),
    **dict.fromkeys(("nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"), 1),
    **dict.fromkeys(("hy_v3", "mimo2", "step35"), 16),
}
"""Architectures for which the pinned llama.cpp builds a head's graph, and how many heads it takes; for another
architecture or number its assertions end the process (src/models/*.cpp, graph_mtp)."""

SYMBOLS: dict[str, tuple[str, Any, list[Any]]] = {
    "set_rows": ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, [ctypes.c_bool, ctypes.c_bool]),
    "get_rows": ("_Z26llama_get_embeddings_nextnP13llama_context", ctypes.c_void_p, []),
    "get_row": ("_Z30llama_get_embeddings_nextn_ithP13llama_contexti", ctypes.c_void_p, [ctypes.c_int32]),
    "set_head": ("_Z28llama_set_nextn_layer_offsetP13llama_contexti", None, [ctypes.c_int32]),
}
"""The calls by their mangled names, with the types of their results and of what follows the context."""
_calls: dict[str, Any] = {}


def check() -> None:
    """Binds the calls; raises AbiError naming the one that the installed llama-cpp-python lacks."""
    if _calls:
        return
    library.check()
    found = {}
    for name, (symbol, result, args) in SYMBOLS.items():
        try:
            f = getattr(library.lib(), symbol)
        except AttributeError:
            raise AbiError(f"the installed llama-cpp-python has no function {symbol}: --mtp cannot work") from None
        f.restype, f.argtypes = result, [ctypes.c_void_p, *args]
        found[name] = f
    _calls.update(found)


def _row_size(context: Context) -> int:
    return int(library.C.llama_model_n_embd_out(context.model.handle))


def _floats(address: int | None, n_rows: int, size: int) -> Rows:
    if not address:
        raise BmoeError("llama.cpp gives no hidden rows for this model: it cannot be drafted with --mtp")
    rows = np.ctypeslib.as_array((ctypes.c_float * (n_rows * size)).from_address(address))
    return rows.reshape(n_rows, size)


class TargetRows:
    """The hidden rows of a target's context, one for each token of a batch.

    `nbytes`: what they take beyond the context's buffers as they were when it was made: the rows of a whole batch, once
    in the graph, once where llama.cpp copies them to, once where they wait for the head.
    """

    def __init__(self, context: Context) -> None:
        check()
        self._context = context
        self.size = _row_size(context)
        self.nbytes = 3 * 4 * self.size * context.n_batch
        # Not masked: the head is fed with every token, not only with those whose logits are wanted.
        _calls["set_rows"](context.handle, True, False)

    def last(self, n: int) -> Rows:
        """Rows of the last batch, of `n` tokens: float32 [n, size], a view that the next decode overwrites."""
        return _floats(_calls["get_rows"](self._context.handle), n, self.size)


class HeadContext(Context):
    """The context of a model's own heads: tokens with the hidden row before each in, logits and hidden rows out.

    Every output of a batch has a row, and a batch has either no outputs or only outputs: the graphs of some
    architectures give the rows of all tokens, of others those of the outputs.
    """

    def __init__(self, model: Model, *, n_heads: int = 1, **settings: Any) -> None:
        check()
        super().__init__(model, mtp=True, n_outputs=n_heads, **settings)
        self.n_heads = n_heads
        self.size = _row_size(self)
        _calls["set_rows"](self.handle, True, True)
        self._ext = library.C.llama_batch_ext_init(self.handle)
        self._embd = library.C.llama_embd(None, 1, self.size)

    def run(self, head: int, tokens: Sequence[int], rows: Rows, position: int, outputs: bool) -> int:
        """Appends `tokens` at `position` to the sequence of head `head`, `rows` float32 [n, size] beside them.

        `outputs`: logits and hidden rows of every token are kept. Returns llama_decode's code.
        """
        C, batch = library.C, self._ext
        assert rows.dtype == np.float32
        assert rows.flags.c_contiguous
        assert rows.shape == (len(tokens), self.size)
        C.llama_batch_ext_clear(batch)
        place = ctypes.c_int32()
        for i, token in enumerate(tokens):
            place.value = position + i
            self._embd.data = ctypes.cast(ctypes.c_void_p(rows.ctypes.data + i * rows.strides[0]), _FLOATS)
            at = C.llama_batch_ext_add_token(batch, 0, int(token))
            # Each says whether it did it: without its row a head still drafts, but badly.
            if not (
                at == i
                and C.llama_batch_ext_set_pos(batch, at, ctypes.byref(place))
                and C.llama_batch_ext_set_embd_token(batch, at, self._embd)
                and C.llama_batch_ext_set_output_logits(batch, at, outputs)
            ):
                raise BmoeError(f"llama.cpp does not take token {int(token)} with its hidden row into a batch")
        if self.n_heads > 1:
            _calls["set_head"](self.handle, head)
        return int(C.llama_process(self.handle, C.LLAMA_PROCESS_TYPE_DECODE, batch))

    def row(self, i: int) -> Rows:
        """Hidden row of output `i` of the last batch: float32 [1, size], a view that the next batch overwrites."""
        return _floats(_calls["get_row"](self.handle, i), 1, self.size)

    def output_logits(self, i: int) -> Rows:
        """Logits of output `i` of the last batch: float32 [n_vocab], a view that the next batch overwrites."""
        return _floats(library.lib().llama_get_logits_ith(self.handle, i), 1, self.n_vocab).reshape(-1)

    def close(self) -> None:
        if self.handle is not None:
            library.C.llama_batch_ext_free(self._ext)
        super().close()


_FLOATS = ctypes.POINTER(ctypes.c_float)
