"""Where the eviction policy's constants come from, and what it costs.

python bench/studies/eviction.py constants TRACE...     # leave one trace out: choose on the others, judge on it
python bench/studies/eviction.py cost TRACE...          # nanoseconds per routed expert, against lru
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.studies import replay_policies
from bench.studies.replay import EngineCache
from bmoe.analysis.route_trace import RouteTrace, read_trace
from bmoe.errors import BmoeError

MiB = 1 << 20
BUDGETS = (500, 1000, 2000, 4000, 8000)
GRID = {"sharpness": (6.0, 8.0, 10.0, 12.0), "recency": (0.05, 0.1, 0.15, 0.2), "second": (0.0, 0.5, 1.0)}
Constants = tuple[float, float, float]
ENGINE: Constants = (10.0, 0.15, 0.5)
"""Those of ext/bmoe/streamer/_cache.pyx."""


def judge(trace: RouteTrace, constants: Constants, bounds: Sequence[float]) -> float:
    """Decode hits as a share of what the bound `bounds` has at each of BUDGETS, the mean in percent."""
    shares = []
    for mib, bound in zip(BUDGETS, bounds, strict=True):
        engine = EngineCache(trace, mib * MiB, "votes")
        engine.cache.constants(*constants)
        shares.append(engine.replay().decode_pct / bound)
    return 100 * statistics.mean(shares)


def choose_constants(traces: Sequence[RouteTrace]) -> None:
    """Prints, for each trace, the constants that are best on all others, and what they and others do on it."""
    every = [(a, b, c) for a, b, c in itertools.product(*GRID.values())]
    score: dict[str, dict[Constants, float]] = {}
    for trace in traces:
        bounds = [replay_policies.replay(trace, mib * MiB, "belady").decode_pct for mib in BUDGETS]
        score[trace.name] = {constants: judge(trace, constants, bounds) for constants in every}
    print(f"decode hits as a share of belady's, mean over {', '.join(map(str, BUDGETS))} MiB; {', '.join(GRID)}")
    for held, own in score.items():
        others = [s for name, s in score.items() if name != held]
        best = max(every, key=lambda k: sum(s[k] for s in others))
        top = max(own, key=lambda k: own[k])
        print(
            f"{held}: chosen on the others {best}: {own[best]:.2f} %; best on itself {top}: {own[top]:.2f} %; "
            f"worst of {len(every)}: {min(own.values()):.2f} %"
        )
    best = max(every, key=lambda k: sum(s[k] for s in score.values()))
    for name, constants in (("best on all", best), ("the engine's", ENGINE)):
        print(f"{name} {constants}: " + ", ".join(f"{trace} {s[constants]:.2f} %" for trace, s in score.items()))


def cost(traces: Sequence[RouteTrace], rounds: int = 15) -> None:
    """Prints nanoseconds per routed expert of decode, the policies in turn, the median of the rounds."""
    for trace in traces:
        for mib in BUDGETS:
            taken: dict[str, list[float]] = {"lru": [], "votes": []}
            for _, policy in itertools.product(range(rounds), taken):
                engine = EngineCache(trace, mib * MiB, policy)
                tokens = [(engine.index[b.layer], list(b.rows[0])) for b in trace.batches() if not b.prefill]
                n = sum(len(experts) for _, experts in tokens)
                engine.cache.time_tokens(tokens)  # fills it
                taken[policy].append(engine.cache.time_tokens(tokens) / n)
            lru, votes = (statistics.median(taken[p]) for p in ("lru", "votes"))
            print(
                f"{trace.name} {mib} MiB: lru {lru:.0f} ns, votes {votes:.0f} ns (least {min(taken['votes']):.0f}), "
                f"{votes / lru:.1f} times"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is asked for; 1 where a trace cannot be read."""
    parser = argparse.ArgumentParser(description="Constants and cost of the eviction policy.")
    parser.add_argument("what", choices=("constants", "cost"))
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    args = parser.parse_args(argv)
    try:
        traces = [read_trace(path) for path in args.traces]
        (choose_constants if args.what == "constants" else cost)(traces)
    except BmoeError as e:
        print(f"eviction: {e}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
