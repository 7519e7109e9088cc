"""The expert matmul from slots against ggml's own over the same tensors, and its reads counted.

python -m pytest bench/gates/bench_kernel.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bench.conftest import Compare, Exact
from bench.gates import scripts
from bench.gates.moe_graph import TYPES, MoeGraph
from bmoe.streamer import IO_ROW

LAYERS, EXPERTS, USED = 2, 16, 4


def _batches(n: int, n_tok: int) -> list[npt.NDArray[np.int32]]:
    """`n` batches of `n_tok` tokens: int32 [layers, tokens, k]."""
    routes = scripts.routes(n * n_tok, LAYERS, EXPERTS, USED)
    return [np.ascontiguousarray(routes[i * n_tok : (i + 1) * n_tok].transpose(1, 0, 2)) for i in range(n)]


@pytest.mark.ratio
@pytest.mark.parametrize("n_tok", [1, 16])
@pytest.mark.parametrize("quant", list(TYPES))
def test_against_ggml(quant: str, n_tok: int, compare: Compare, tmp_path: Path) -> None:
    """All experts in slots, one thread, decode and a prompt's batch: bit for bit the same, in the same time."""
    batches = _batches(12 if n_tok == 1 else 2, n_tok)
    with MoeGraph(
        tmp_path / "experts.bin",
        quant=quant,
        n_layers=LAYERS,
        n_expert=EXPERTS,
        k=USED,
        n_tok=n_tok,
        n_slots=LAYERS * EXPERTS,
    ) as graph:
        graph.fill()
        reads = graph.streamer.counters()["reads"]
        graph.resident(batches[0])
        graph.streamed(batches[0])
        for ours, theirs in zip(*graph.outputs(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        compare(
            f"kernel/{quant} x {n_tok}",
            lambda: sum(map(graph.streamed, batches)),
            lambda: sum(map(graph.resident, batches)),
        )
        assert graph.streamer.counters()["reads"] == reads


@pytest.mark.exact
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n_tok", [1, 16])
def test_what_is_read(n_tok: int, overlap: bool, exact: Exact, planted: frozenset[str], tmp_path: Path) -> None:
    """The engine's plan and its lanes over scripted routes: every counter, and every read that a lane has done."""
    batches = _batches(60, n_tok)
    with MoeGraph(
        tmp_path / "experts.bin",
        quant="Q8_0",
        n_layers=LAYERS,
        n_expert=EXPERTS,
        k=USED,
        n_tok=n_tok,
        n_embd=64,
        n_ff=96,
        n_slots=12,
        policy="votes",
        overlap=overlap,
        direct=False,
    ) as graph:
        graph.lanes.record(1 << 16)
        per_position = np.zeros(n_tok, np.int64)
        for i, experts in enumerate(batches):
            if i == 30 and "dropped-hit" in planted:
                _drop_a_hit(graph, experts)
            if i == 30 and "extra-read" in planted:
                graph.lanes.read_windows([(0, 0, 4096, 4096, graph.memory.address)])
            graph.streamed(experts)
            per_position += np.array(graph.streamer.take_positions(n_tok)[0])
        c = graph.streamer.counters()
        raw, lost = graph.lanes.take_reads()
        rows = np.frombuffer(raw, np.dtype(IO_ROW))
    counts = {
        **{name: c[name] for name in ("plans", "routed", "hits", "misses", "evictions", "rereads", "streamed")},
        "reads queued": c["reads"],
        "bytes queued": c["bytes"],
        "bytes by position, weighed": int((per_position * np.arange(1, n_tok + 1)).sum()),
        "reads of lanes": len(rows) + lost,
        "bytes wanted of lanes": int(rows["need"].sum()),
    }
    exact(f"graph/{n_tok} tokens{', overlapped' if overlap else ''}", counts)


def _drop_a_hit(graph: MoeGraph, experts: npt.NDArray[np.int32]) -> None:
    """Forgets an expert that the next batch would have found."""
    for layer, routed in enumerate(experts):
        for expert in routed.ravel().tolist():
            if expert in graph.cache.resident(layer):
                graph.cache.forget(layer, expert)
                return
    raise AssertionError("nothing that is routed next is resident")
