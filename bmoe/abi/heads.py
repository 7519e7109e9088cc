"""Checks of a model's own head: its context beside the target's, and that it is fed without its experts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..llama.head import SYMBOLS
from ..speculation import DraftSpec
from .check import Files, check, expect
from .names import MTP_CALLS
from .stock import Logits, Stock, some_tokens
from .streaming import OPENS, _open

NEEDS = (OPENS, MTP_CALLS, "names: bindings of --mtp", "layout: llama_embd against llama.h")
TOKENS = 16


@dataclass
class Batch:
    """One graph of a head: what went in, and the logits of its outputs."""

    head: int
    tokens: list[int]
    rows: Any
    position: int
    logits: list[Logits]


class StockHead(Stock):
    """The head of a model that llama.cpp has loaded whole, with its experts computed in every graph."""

    def __init__(self, path: Any) -> None:
        super().__init__(path, head=True)
        self.address = ctypes.cast(self.context, ctypes.c_void_p)
        lib = ctypes.CDLL(self.c._lib._name)
        getattr(lib, SYMBOLS["set_rows"][0])(self.address, ctypes.c_bool(True), ctypes.c_bool(True))
        self.batch = self.c.llama_batch_ext_init(self.context)

    def replay(self, batch: Batch) -> list[Logits]:
        """The logits of the same graph, of each output."""
        c = self.c
        c.llama_memory_seq_rm(self.memory, 0, batch.position, -1)
        c.llama_batch_ext_clear(self.batch)
        for i, token in enumerate(batch.tokens):
            row = np.ascontiguousarray(batch.rows[i])
            embd = c.llama_embd(row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, len(row))
            done = (
                c.llama_batch_ext_add_token(self.batch, 0, token) == i
                and c.llama_batch_ext_set_pos(self.batch, i, ctypes.byref(ctypes.c_int32(batch.position + i)))
                and c.llama_batch_ext_set_embd_token(self.batch, i, embd)
                and c.llama_batch_ext_set_output_logits(self.batch, i, bool(batch.logits))
            )
            expect("a token with its hidden row is taken", bool(done), True)
        expect("llama_process", c.llama_process(self.context, c.LLAMA_PROCESS_TYPE_DECODE, self.batch), 0)
        return [self.logits(i) for i in range(len(batch.logits))]


@check(
    "heads: rows",
    "the target's hidden rows are there for each token of a batch, and depend on it",
    "bmoe/llama/head.py (TargetRows)",
    NEEDS,
)
def rows(files: Files) -> str:
    ids = np.array(some_tokens(6), np.int32)
    with _open(files.demo, draft=DraftSpec(types=("mtp",))) as engine:
        target_rows = engine.sequence.rows
        assert target_rows is not None
        engine.sequence.context.decode(ids)
        whole = target_rows.last(6).copy()
        engine.sequence.context.truncate(5)
        engine.sequence.context.decode(ids[5:])
        last = target_rows.last(1).copy()
    expect("rows of nothing", int((np.abs(whole).max(1) == 0).sum()), 0)
    # Another width of batch rounds otherwise; another token is far away.
    expect("the last row by itself is the same", bool(np.allclose(whole[5], last[0], atol=0.05, rtol=0.05)), True)
    expect("rows of two tokens differ", bool(np.allclose(whole[4], whole[5], atol=0.05)), False)
    return f"float32 [{', '.join(map(str, whole.shape))}]"


@check(
    "heads: keys and values before experts",
    "a head that was fed without its experts drafts what one that computed them does, bit for bit",
    "bmoe/speculation/mtp.py, ext/bmoe/streamer/kernel.pxi (skip)",
    (*NEEDS, "heads: rows"),
)
def fed(files: Files) -> str:
    batches: list[Batch] = []
    with _open(files.demo, cache_mb="auto", draft=DraftSpec(types=("mtp",), policy="always"), ubatch=64) as engine:
        assert engine.sequence.head is not None
        head: Any = engine.sequence.head.head
        run = head.run

        def recorded(n: int, tokens: Sequence[int], given: Any, position: int, outputs: bool) -> int:
            kept = given.copy()
            code = int(run(n, tokens, given, position, outputs))
            logits = [head.output_logits(i).copy() for i in range(len(tokens) if outputs else 0)]
            batches.append(Batch(n, list(tokens), kept, position, logits))
            return code

        head.run = recorded
        list(engine.generate(some_tokens(24), max_tokens=TOKENS, stop_at_end=False))
    fed_alone = sum(not b.logits for b in batches)
    drafted = sum(bool(b.logits) for b in batches)
    expect("graphs that feed and graphs that draft", (fed_alone > 0, drafted > 0), (True, True))
    stock = StockHead(files.demo)
    for i, batch in enumerate(batches):
        for mine, theirs in zip(batch.logits, stock.replay(batch), strict=True):
            n = int((mine != theirs).sum())
            expect(f"logits of graph {i} that differ from a head with experts", n, 0)
    return f"{fed_alone} graphs fed without experts, {drafted} drafted"
