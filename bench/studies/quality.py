"""What dropping cold experts, or routing fewer, costs in perplexity and saves in bytes.

    python bench/studies/quality.py

Every cell scores the same tokens one by one, as decode runs, with the experts streamed, and starts with an empty
cache. The text is the source of the pinned llama-cpp-python: Python that is in no standard library, and the same for
everyone. `delta` is the mean over tokens of the difference to the lossless run, in nats, with the standard error of
that mean: the tokens are the same, so it is far smaller than the error of a perplexity.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Compute threads sleep while they wait: nothing here depends on time, and others may need the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import numpy.typing as npt

import bmoe
from bmoe import llama
from bmoe.accounting.counters import StreamCounters
from bmoe.engine.scoring import text_bytes, windows
from bmoe.experts import slots

MiB = 1 << 20
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """One run: surprises of the scored tokens in nats, what decode counted, slots and experts there are."""

    nll: Floats
    decode: StreamCounters
    n_slots: int
    n_experts: int
    n_bytes: int


def default_text() -> Path:
    """A file of the pinned llama-cpp-python."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "llama.py"


def measure(args: argparse.Namespace, text: str, **settings: Any) -> Cell:
    """Scores the text once."""
    common = {"threads": args.threads, "ctx": args.window, "odirect": False, "overlap": True}
    with bmoe.Engine.open(args.model, **common, **settings) as engine:
        assert engine.cache is not None
        ids = engine.tokenize(text, special=False)
        bos = llama.bos_token(engine.model) if engine.adds_bos else -1
        nll: list[float] = []
        decode, n_bytes = StreamCounters(), 0
        for w in windows(len(ids), args.window)[: args.chunks]:
            part = ids[w.begin : w.end]
            part[0] = bos if bos >= 0 else part[0]
            scoring = engine.score(part, w.first - w.begin, one_by_one=True)
            n_bytes += text_bytes(engine.model, [t.id for t in scoring])
            nll += scoring.nll
            decode = decode.plus(scoring.result.decode)
        experts = sum(layer.n_expert for layer in engine.layers)
        return Cell(np.array(nll), decode, engine.cache.n_slots, experts, n_bytes)


def budgets(args: argparse.Namespace) -> list[int]:
    """MiB of cache for the asked parts of all experts, with what the process itself holds on top."""
    bmoe.Engine.open(args.model, threads=args.threads, ctx=args.window).close()  # the heap grows once
    with bmoe.Engine.open(args.model, threads=args.threads, ctx=args.window) as engine:
        assert engine.decision is not None
        whole = slots.all_experts_bytes(engine.layers)
        held = engine.decision.sizes.experts - whole
        ring = slots.RING_AREAS * slots.ring_stride(engine.layers)
        return [math.ceil((held + ring + part * (whole - ring)) / MiB) for part in args.parts]


def row(name: str, cell: Cell, lossless: Floats) -> str:
    """A line of the table."""
    d, n = cell.nll - lossless, len(cell.nll)
    c = cell.decode
    bits = cell.nll.sum() / math.log(2) / cell.n_bytes
    share = c.dropped / c.drop_routed if c.drop_routed else 0.0
    error = d.std(ddof=1) / math.sqrt(n)
    cells = [
        name,
        f"{cell.n_slots} of {cell.n_experts}",
        f"{math.exp(cell.nll.mean()):.3f}",
        f"{bits:.4f}",
        f"{d.mean():+.4f} +/- {error:.4f}",
        f"{c.bytes / MiB / n:.3f}",
        f"{100 * (c.hit_rate or 0):.1f} %",
        f"{100 * share:.1f} %",
        f"{100 * c.dropped_weight:.2f} %",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = """| {} | slots | perplexity | bits/byte | delta, nats/token | MiB/token | hits | dropped | of the weight |
|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", help="GGUF (the demo model)")
    p.add_argument("--text", type=Path, default=default_text(), help="a text that the model has not seen")
    p.add_argument("--window", type=int, default=512, help="tokens of a window; the second half is scored")
    p.add_argument("--chunks", type=int, default=8, help="windows")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--parts", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="parts of the experts cached")
    p.add_argument("--thresholds", type=float, nargs="+", default=[0.5, 0.75, 1.0])
    p.add_argument("--used", type=int, nargs="+", default=[1, 2, 3, 4], help="for --n-expert-used")
    args = p.parse_args()
    text = args.text.read_text(encoding="utf-8")
    sizes = budgets(args)

    lossless = [measure(args, text, cache_mb=mb) for mb in sizes]
    base = lossless[0].nll
    if any(not np.array_equal(cell.nll, base) for cell in lossless):
        raise SystemExit("lossless runs differ between budgets")
    print(f"{args.text.name}: {len(base)} tokens scored, {lossless[0].n_bytes} bytes\n")
    print(HEAD.format("F"))
    for mb, cell in zip(sizes, lossless, strict=True):
        print(row("0", cell, base))
        for f in args.thresholds:
            print(row(f"{f:g}", measure(args, text, cache_mb=mb, drop_cold_experts=f), base), flush=True)
    print()
    print(HEAD.format("`--n-expert-used`"))
    for mb in sizes:
        for n in args.used:
            print(row(str(n), measure(args, text, cache_mb=mb, n_expert_used=n), base), flush=True)


if __name__ == "__main__":
    main()
