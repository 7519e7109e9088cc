"""Hit rates of cache policies on recorded routes, by budget.

    python bench/studies/replay.py TRACE... --budgets 500,2000 --policies lru,belady,default --json OUT

`default`, `votes` and `engine-lru` are the engine's own compiled policy on slots cut as the engine cuts them; the
others are those of replay_policies.py, by bytes. A budget is memory for experts; the engine's ring of staging areas
(12 of the largest slice) would come out of --cache-mb on top. One row for each trace, budget and policy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.studies import replay_policies
from bench.studies.replay_policies import Replay
from bmoe.analysis.route_trace import RouteTrace, read_trace
from bmoe.engine.config import DEFAULT_POLICY
from bmoe.errors import BmoeError
from bmoe.experts.slots import share_out
from bmoe.streamer import ExpertCache

MiB = 1 << 20
ENGINE = {"default": str(DEFAULT_POLICY), "votes": "votes", "engine-lru": "lru"}
"""Policies of the engine's compiled code, by the name of the row."""
CURVE = (250, 500, 750, 1000, 1500, 2000, 2500, 3000, 4000, 6000, 8000)
"""Budgets of the shared curves, MiB."""


class EngineCache:
    """An ExpertCache for a trace, its slots cut from a budget in bytes as the engine does, and what it counts."""

    def __init__(self, trace: RouteTrace, budget: int, policy: str) -> None:
        self.trace = trace
        self.layers = sorted(trace.expert_bytes)
        self.index = {layer: i for i, layer in enumerate(self.layers)}
        sizes = sorted(set(trace.expert_bytes.values()))
        classes = [sizes.index(trace.expert_bytes[layer]) for layer in self.layers]
        members = [classes.count(k) for k in range(len(sizes))]
        slots = share_out([n * trace.n_expert for n in members], sizes, budget)
        self.quotas = [slots[k] // members[k] for k in classes]
        used = max(len(row) for b in trace.batches() for row in b.rows)
        self.cache = ExpertCache([trace.n_expert] * len(classes), classes, slots, policy, used)

    def replay(self) -> Replay:
        """Routes the whole trace through the cache, as the engine would."""
        trace, cache = self.trace, self.cache
        out = Replay([0, 0], [0, 0])
        for epoch, b in enumerate(trace.batches()):
            layer = self.index[b.layer]
            cache.prompt(0 if b.prefill else -1)
            hits, misses = cache.route(layer, b.rows, epoch, self.quotas[layer])
            out.looked[b.phase] += len(hits) + len(misses)
            out.hits[b.phase] += len(hits)
            out.read += len(misses) * trace.expert_bytes[b.layer]
        out.held_bytes = sum(len(cache.resident(i)) * trace.expert_bytes[la] for i, la in enumerate(self.layers))
        return out


def replay(trace: RouteTrace, budget: int, policy: str) -> Replay:
    """Replays `trace` with `budget` bytes through the policy of that name."""
    if policy in ENGINE:
        return EngineCache(trace, budget, ENGINE[policy]).replay()
    return replay_policies.replay(trace, budget, policy)


def row(trace: RouteTrace, mib: int, policy: str) -> dict[str, Any]:
    """One row of the result; `held_mib` is what is resident at the end."""
    got = replay(trace, mib * MiB, policy)
    return {
        "trace": trace.name,
        "budget_mib": mib,
        "policy": policy,
        "hit_pct_decode": round(got.decode_pct, 3),
        "hit_pct_cum": round(got.all_pct, 3),
        "read_mib": round(got.read / MiB, 1),
        "held_mib": round(got.held_bytes / MiB, 1),
    }


def show(rows: Sequence[dict[str, Any]], policies: Sequence[str]) -> str:
    """A table for each trace: decode hit rate, percent, by budget and policy."""
    lines = []
    for name in dict.fromkeys(r["trace"] for r in rows):
        lines.append(f"{name}: decode hit rate, %")
        lines.append(f"{'MiB':>8}" + "".join(f"{p:>12}" for p in policies))
        for mib in dict.fromkeys(r["budget_mib"] for r in rows):
            cells = {r["policy"]: r["hit_pct_decode"] for r in rows if r["trace"] == name and r["budget_mib"] == mib}
            lines.append(f"{mib:>8}" + "".join(f"{cells[p]:>12.2f}" for p in policies))
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    """A list of budgets. Raises argparse's error for anything else."""
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1 << 32 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of MiB such as 500,2000")
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """A list of policies. Raises argparse's error for one that is not known."""
    known = [*ENGINE, *replay_policies.POLICIES]
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return text.split(",")


def main(argv: Sequence[str] | None = None) -> int:
    """Replays, prints a table and writes the rows; 1 where a trace cannot be read."""
    parser = argparse.ArgumentParser(description="Hit rates of cache policies on recorded routes.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="route trace, gzipped or not")
    parser.add_argument("--budgets", type=numbers, default=list(CURVE), metavar="MIB,...", help="memory for experts")
    parser.add_argument(
        "--policies", type=names, default=["lru", "belady", "default"], metavar="NAME,...",
        help=f"of {', '.join([*ENGINE, *replay_policies.POLICIES])}",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows as a JSON list")
    args = parser.parse_args(argv)
    try:
        traces = [read_trace(path) for path in args.traces]
        rows = [row(t, mib, policy) for t in traces for mib in args.budgets for policy in args.policies]
        print(show(rows, args.policies))
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    except BmoeError as e:
        print(f"replay: {e}", file=sys.stderr)
        return e.exit_code
    except OSError as e:
        print(f"replay: --json: cannot write {args.json}: {e.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
