"""Checks of how llama.cpp shows and runs its graphs, watched from outside: no code of the engine takes part."""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from .. import llama
from ..llama import _ggml
from . import tiny
from .check import BrokenError, Files, check, expect
from .layout import LAYOUTS
from .names import libllama
from .stock import Stock, some_tokens

NEEDS = ("names: llama_cpp", *LAYOUTS)
ORDER, REWRITE, REUSE = "graph: shown before it runs", "graph: rewritten nodes", "graph: reuse"
_EXPERTS = re.compile(rb"^blk\.\d+\..*_exps\.weight$")
_Custom = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)


class Watcher:
    """Sees a graph through `cb_eval`; with `rewrite`, turns expert matmuls into ops that write zeros.

    `asked`: `(node, sources)` in order; `answers`: calls that ask nothing; `ran`: `(node, ith, nth, userdata)`;
    `shown`: for each expert matmul that was shown, its node and whether it was one of ours already.
    """

    def __init__(self, rewrite: bool) -> None:
        self.rewrite = rewrite
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self.answers = 0
        self.ran: list[tuple[int, int, int, int]] = []
        self.shown: list[tuple[int, bool]] = []
        self.early = 0
        self.weights: set[bytes] = set()
        self._lock = threading.Lock()
        self._at = {name: at for name, (at, _) in _ggml.layout()["ggml_tensor"][1].items()}
        self._fun = _Custom(self._run)
        self._address = ctypes.cast(self._fun, ctypes.c_void_p).value or 0
        lib = libllama()
        lib.ggml_op_name.restype = ctypes.c_char_p
        names = [lib.ggml_op_name(i) for i in range(64)]
        self._matmul = names.index(b"MUL_MAT_ID")
        # Not among the first 64 of every release.
        self._custom = names.index(b"CUSTOM") if b"CUSTOM" in names else self._find(lib, b"CUSTOM")

    @staticmethod
    def _find(lib: Any, name: bytes) -> int:
        return next(i for i in range(64, 256) if lib.ggml_op_name(i) == name)

    def _int(self, node: int, name: str, size: int = 4) -> int:
        return int.from_bytes(ctypes.string_at(node + self._at[name], size), "little")

    def _sources(self, node: int) -> tuple[int, ...]:
        raw = struct.unpack("<10Q", ctypes.string_at(node + self._at["src"], 80))
        return tuple(s for s in raw if s)

    def __call__(self, address: Any, ask: bool, _: Any) -> bool:
        if not ask:
            self.answers += 1
            return True
        node = ctypes.cast(address, ctypes.c_void_p).value or 0
        self.asked.append((node, self._sources(node)))
        op = self._int(node, "op")
        ours = op == self._custom and self._int(node, "op_params", 8) == self._address
        if ours or op == self._matmul:
            weight = self._sources(node)[0]
            name = ctypes.string_at(weight + self._at["name"], 64).split(b"\0")[0]
            if _EXPERTS.match(name):
                self.weights.add(name)
                self.shown.append((node, ours))
                if self.rewrite and not ours:
                    params = struct.pack("<Qi4xQ", self._address, -1, 0x5EA)
                    ctypes.memmove(node + self._at["op_params"], params, len(params))
                    ctypes.memmove(node + self._at["op"], struct.pack("<i", self._custom), 4)
        return False

    def _run(self, node: int, ith: int, nth: int, userdata: int | None) -> None:
        with self._lock:
            self.ran.append((node, ith, nth, userdata or 0))
            self.early += not any(node == n for n, _ in self.shown)
        if ith == 0:
            n = 4 * int(np.prod(struct.unpack("<4q", ctypes.string_at(node + self._at["ne"], 32))))
            ctypes.memset(self._int(node, "data", 8), 0, n)


N_EXPERT_TENSORS = 3 * tiny.LAYERS
"""Of the tiny model: gate, up and down of each layer."""


@check(
    ORDER,
    "cb_eval is asked about every node, sources first, and not called again where it answers False",
    "ext/bmoe/streamer/graph.pxi (_on_node)",
    NEEDS,
)
def order(files: Files) -> str:
    watcher = Watcher(rewrite=False)
    stock = Stock(files.tiny, callback=watcher)
    expect("llama_decode", stock.decode(some_tokens(4)), 0)
    places = {node: i for i, (node, _) in enumerate(watcher.asked)}
    expect("calls that ask nothing", watcher.answers, 0)
    late = sum(places.get(s, -1) > i for i, (_, sources) in enumerate(watcher.asked) for s in sources)
    expect("nodes shown before one of their sources", late, 0)
    expect("expert matmuls", len(watcher.shown), N_EXPERT_TENSORS)
    expect("expert weights", len(watcher.weights), N_EXPERT_TENSORS)
    return f"{len(watcher.asked)} nodes, {len(watcher.shown)} of them expert matmuls over *_exps.weight"


@check(
    REWRITE,
    "a node that is turned into GGML_OP_CUSTOM when it is shown runs as fn(dst, ith, nth, userdata) on every thread",
    "ext/bmoe/streamer/graph.pxi (_on_node)",
    (*NEEDS, ORDER),
)
def rewritten(files: Files) -> str:
    watcher = Watcher(rewrite=True)
    stock = Stock(files.tiny, callback=watcher, threads=2)
    expect("llama_decode", stock.decode(some_tokens(4)), 0)
    expect("nodes that ran before they were shown", watcher.early, 0)
    nodes = Counter(node for node, *_ in watcher.ran)
    expect("rewritten nodes that ran", set(nodes), {node for node, _ in watcher.shown})
    expect("threads of a node", {(ith, nth) for _, ith, nth, _ in watcher.ran}, {(0, 2), (1, 2)})
    expect("calls of a node", set(nodes.values()), {2})
    expect("userdata", {hex(u) for *_, u in watcher.ran}, {"0x5ea"})
    if np.array_equal(stock.logits(), _plain_logits(files.tiny)):
        raise BrokenError("the results of rewritten nodes are not used: logits are as without them")
    return f"{len(nodes)} nodes on 2 threads"


def _plain_logits(path: Path) -> Any:
    stock = Stock(path)
    stock.decode(some_tokens(4))
    return stock.logits()


@check(
    REUSE,
    "a graph that is used again shows the same nodes, rewritten ones as they were left",
    "ext/bmoe/streamer/graph.pxi (_on_node)",
    (*NEEDS, REWRITE),
)
def reuse(files: Files) -> str:
    watcher = Watcher(rewrite=True)
    stock = Stock(files.tiny, callback=watcher, threads=1)
    stock.decode(some_tokens(4))
    kept = 0
    for token in some_tokens(6, seed=1):
        watcher.shown.clear()
        watcher.ran.clear()
        expect("llama_decode", stock.decode([token]), 0)
        expect("expert matmuls shown", len(watcher.shown), N_EXPERT_TENSORS)
        expect("expert matmuls that ran as rewritten", len(watcher.ran), N_EXPERT_TENSORS)
        kept += all(ours for _, ours in watcher.shown)
    return f"{kept} of 6 steps used the graph of the step before"


@check(
    "graph: abort",
    f"abort_callback is called while a graph runs; llama_decode then returns {llama.ABORTED}",
    "bmoe/llama/context.py (ABORTED)",
    NEEDS,
)
def abort(files: Files) -> str:
    calls, stop = [0], [10]

    def wanted(_: Any) -> bool:
        calls[0] += 1
        return calls[0] > stop[0]

    stock = Stock(files.tiny, abort=wanted)
    expect("llama_decode", stock.decode(some_tokens(4)), llama.ABORTED)
    expect("calls until it stopped", calls[0] <= stop[0] + 4, True)
    stop[0] = 1 << 30
    calls[0] = 0
    stock.c.llama_memory_clear(stock.memory, True)
    expect("llama_decode after it", stock.decode(some_tokens(4)), 0)
    expect("the same logits after it", bool(np.array_equal(stock.logits(), _plain_logits(files.tiny))), True)
    return f"called {calls[0]} times in a graph"


@check(
    "graph: full context",
    "llama_decode returns 1 where there is no room",
    "bmoe/engine/generation.py (_give_up)",
    NEEDS,
)
def full(files: Files) -> str:
    stock = Stock(files.tiny, ctx=256, ubatch=256)
    expect("llama_decode", stock.decode(some_tokens(stock.c.llama_n_ctx(stock.context))), 0)
    expect("llama_decode past the context", stock.decode([20]), 1)
    return f"after {stock.c.llama_n_ctx(stock.context)} tokens"


@check(
    "memory: taken back",
    "llama_memory_seq_rm(0, n, -1) keeps the first n tokens",
    "bmoe/llama/context.py (Context)",
    NEEDS,
)
def taken_back(files: Files) -> str:
    stock, ids = Stock(files.tiny), some_tokens(12)
    for token in ids:
        stock.decode([token])
    expected = stock.logits()
    expect("llama_memory_seq_rm", bool(stock.c.llama_memory_seq_rm(stock.memory, 0, 6, -1)), True)
    expect("llama_memory_seq_pos_min", stock.c.llama_memory_seq_pos_min(stock.memory, 0), 0)
    for token in ids[6:]:
        stock.decode([token])
    expect("the same logits afterwards", bool(np.array_equal(stock.logits(), expected)), True)
    return "6 of 12 tokens"


@check(
    "text: tokens",
    "llama_tokenize and llama_token_to_piece return -n for a short buffer",
    "bmoe/llama/vocabulary.py",
    NEEDS,
)
def text(files: Files) -> str:
    stock = Stock(files.demo)
    c, vocab, raw = stock.c, stock.c.llama_model_get_vocab(stock.model), b"def read_config(path):"
    few, many = (ctypes.c_int32 * 1)(), (ctypes.c_int32 * 64)()
    n = c.llama_tokenize(vocab, raw, len(raw), many, 64, False, True)
    expect("llama_tokenize with room for 1", c.llama_tokenize(vocab, raw, len(raw), few, 1, False, True), -n)
    buffer, found = ctypes.create_string_buffer(64), b""
    for token in many[:n]:
        size = c.llama_token_to_piece(vocab, token, buffer, 64, 0, False)
        expect("llama_token_to_piece without room", c.llama_token_to_piece(vocab, token, buffer, 0, 0, False), -size)
        c.llama_token_to_piece(vocab, token, buffer, 64, 0, False)
        found += buffer.raw[:size]
    expect("the text of the tokens", found.lstrip(), raw)
    return f"{n} tokens"
