"""The planning step: routed experts in; hits, misses, victims and reads out.

python -m pytest bench/gates/bench_plan.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.conftest import Compare, Exact
from bench.gates import native, scripts
from bench.gates.moe_graph import MoeGraph
from bench.gates.scripts import EXPERTS, LAYERS, SLOTS, USED
from bmoe.streamer import ExpertCache

ROUTES = scripts.routes(160, LAYERS, EXPERTS, USED)
ROWS = scripts.rows(ROUTES)
BATCHES = scripts.batches(ROWS)


def _cache(policy: str) -> ExpertCache:
    return ExpertCache([EXPERTS] * LAYERS, [0] * LAYERS, [SLOTS], policy, USED)


@pytest.mark.ratio
@pytest.mark.parametrize("policy", ["lru", "votes"])
def test_the_policy(policy: str, compare: Compare) -> None:
    """160 tokens of 8 layers, in C on both sides."""
    cache = _cache(policy)
    cache.time_tokens(BATCHES)
    if policy == "lru":
        assert cache.counters()[:3] == native.plain_policy(policy, ROWS, LAYERS, EXPERTS, SLOTS)[1]

    compare(
        f"plan/{policy}",
        lambda: cache.time_tokens(BATCHES),
        lambda: native.plain_policy(policy, ROWS, LAYERS, EXPERTS, SLOTS)[0],
    )


@pytest.mark.ratio
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("policy", ["lru", "votes"])
def test_in_the_graph(policy: str, compare: Compare, tmpfs: Path) -> None:
    """The whole plan of a layer as the engine makes it, reads queued afterwards: by its own clock, `plan_ns`."""
    tokens = ROUTES[:24, :, None, :]
    rows = ROWS[: 24 * LAYERS]
    with MoeGraph(
        tmpfs / "experts.bin",
        quant="Q8_0",
        n_layers=LAYERS,
        n_expert=EXPERTS,
        k=USED,
        n_embd=32,
        n_ff=32,
        n_slots=SLOTS,
        policy=policy,
        overlap=False,
        direct=False,
    ) as graph:

        def plan() -> int:
            before = graph.streamer.counters()["plan_ns"]
            for experts in tokens:
                graph.streamed(experts)
            return int(graph.streamer.counters()["plan_ns"] - before)

        # The plain LRU is over too soon to be timed once.
        times = 8 if policy == "lru" else 1

        def reference() -> int:
            return sum(native.plain_policy(policy, rows, LAYERS, EXPERTS, SLOTS)[0] for _ in range(times))

        compare(f"plan/{policy} in a graph", plan, reference)


@pytest.mark.exact
@pytest.mark.parametrize("policy", ["lru", "votes"])
def test_what_the_policy_decides(policy: str, exact: Exact, planted: frozenset[str]) -> None:
    """Batches of one token and wide ones with a quota."""
    cache = _cache(policy)
    wide = 0
    for epoch, token in enumerate(ROUTES):
        if epoch == 100 and "dropped-hit" in planted:
            cache.forget(3, int(token[3][0]))
        for layer, row in enumerate(token):
            if epoch % 16 == 0:
                rows = [r.tolist() for r in ROUTES[epoch : epoch + 8, layer]]
                wide += len(cache.route(layer, rows, epoch, quota=SLOTS // LAYERS)[0])
            else:
                cache.route(layer, [row.tolist()], epoch)
    hits, misses, evictions, rereads = cache.counters()
    resident = sum((i + 1) * sum(cache.resident(i)) for i in range(LAYERS))
    counts = {"hits": hits, "misses": misses, "evictions": evictions, "rereads": rereads, "hits of wide batches": wide}
    exact(f"plan/{policy}", {**counts, "resident experts, weighed": resident})
