"""How good `bmoe inspect` is: predicted against measured decode speed, and predicted against recorded hit rates.

    python bench/studies/inspect_accuracy.py speed [MODEL...] --rounds 5
    python bench/studies/inspect_accuracy.py traces ../shared/data/route-traces/*.route.csv.gz

`speed`: MODEL is a GGUF, or `zipf`, `uniform` (made with bench/models/make_model.py for the time of the run:
4.62 GiB each, 30 s) or `demo`, the bundled one; all three without any. In each round every budget is measured right
after an inspect of its own, each a process of its own with the page cache dropped and memory capped, so that a slow
minute of the machine falls on both. The ratio is taken round by round. The tokens are those of a text, since what a
made model would say is noise that repeats nothing; their time is that of their graphs.

`traces`: the first 16 decoded tokens of a recorded run are what an inspect sees; the whole trace, through the engine's
own cache policy, is what comes of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import harness
from bench.harness import MiB

NAMES = ("none", "20 %", "35 %", "50 %", "100 %")
BESIDE_MIB = 1400  # what a run needs beside its cache
WITHIN = 0.25
SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75)
PROMPT = '''import csv
import json
from pathlib import Path


class Table:
    """Rows of a file, by the names of its columns.

    A table is read once and kept. Changes are written when it is closed, whole or not at all.
    """

    def __init__(self, path, encoding="utf-8"):
        self.path = Path(path)
        self.encoding = encoding
        self.rows = []
        self.changed = False

    def load(self):
        with open(self.path, newline="", encoding=self.encoding) as f:
            for row in csv.DictReader(f):
                self.rows.append(row)
        return len(self.rows)

    def find(self, column, value, default=None):
        """The first row that has a value in a column, or the default where there is none."""
        for number, row in enumerate(self.rows):
            if row.get(column) == value:
                return number, dict(row)
        return default

    def close(self):
        if not self.changed:
            return False
        temporary = self.path.with_suffix(".new")
        with open(temporary, "w", newline="", encoding=self.encoding) as f:
            writer = csv.DictWriter(f, fieldnames=sorted(self.rows[0]), extrasaction="raise")
            writer.writeheader()
            writer.writerows(self.rows)
        temporary.replace(self.path)
        return True
'''


# ---- speed ------------------------------------------------------------------------------------------


def child(args: argparse.Namespace) -> dict[str, Any]:
    """One measured generation."""
    import bmoe

    settings = {"overlap": True, "ctx": 1024, "cache_mb": args.cache_mb, "cache_ceil_mb": None}
    with bmoe.Engine.open(args.models[0], **settings) as engine:
        text = engine.tokenize(PROMPT)
        prompt, script = text[: args.prompt_tokens], text[args.prompt_tokens :][: args.tokens + 1]
        tokens = list(engine.generate(prompt, max_tokens=len(script), script=script, stop_at_end=False))[1:]
        hits, misses = (sum(getattr(t.stream, name) for t in tokens) for name in ("hits", "misses"))
        assert engine.plan is not None
        return {
            "tok_s": 1 / statistics.median(t.decode_s for t in tokens),
            "mean_tok_s": len(tokens) / sum(t.decode_s for t in tokens),
            "hit": hits / (hits + misses),
            "prompt_tokens": len(prompt),
            "share": sum(engine.plan.class_slots) / sum(layer.n_expert for layer in engine.layers),
        }


def run(command: list[str], cap_mib: int | None) -> dict[str, Any]:
    """A process with memory capped and the page cache dropped; its JSON object."""
    try:
        result: dict[str, Any] = json.loads(harness.run_child(command, cap_mib))
    except harness.ChildFailed as e:
        raise SystemExit(f"{' '.join(command)}: {e.errors or e.code}") from None
    return result


def inspect_command(model: str) -> list[str]:
    return [sys.executable, "-m", "bmoe", "inspect", model, "--overlap", "-c", "1024", "--json"]


def measure(model: str, name: str, base: dict[str, Any], args: argparse.Namespace, cap: bool) -> dict[str, Any]:
    """One inspect and one generation with the budget that its row `name` has. `base`: an inspect without measuring."""
    budget = next(row["budget"] for row in base["predictions"] if row["name"] == name)
    cap_mib = budget // MiB + base["bytes"]["dense"] // MiB + BESIDE_MIB if cap else None
    seen = run(inspect_command(model), cap_mib)
    row = next(row for row in seen["predictions"] if row["name"] == name)
    command = [
        sys.executable, str(Path(__file__).resolve()), "speed", model, "--child", "--tokens", str(args.tokens),
        "--prompt-tokens", str(args.prompt_tokens), "--cache-mb", str(-(-budget // MiB)),
    ]  # fmt: skip
    got = run(command, cap_mib)
    return {"budget": budget, "predicted": row, "inspect": seen["measured"], "disk": seen["disk"], "measured": got}


def speed(args: argparse.Namespace) -> int:
    """Rounds over all models and budgets; 1 where a cell's median is off by more than `--within`."""
    cap = harness.may_cap()
    off = 0
    collected: dict[str, Any] = {}
    with ExitStack() as stack:
        for wanted in args.models or ["zipf", "uniform", "demo"]:
            path = _model(stack, wanted, args)
            base = run([*inspect_command(path), "--no-measure"], None)
            cells: dict[str, list[dict[str, Any]]] = {name: [] for name in args.budgets}
            for number, (name, runs) in harness.rounds(args.rounds, cells.items()):
                runs.append(measure(path, name, base, args, cap))
                last = runs[-1]
                print(
                    f"round {number + 1}/{args.rounds} {wanted} {name}: predicted "
                    f"{last['predicted']['tok_s']['mid']:.2f}, measured {last['measured']['tok_s']:.2f} tok/s",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            off += show(wanted, cells, args.within)
            collected[wanted] = cells
            if wanted in ("zipf", "uniform"):
                Path(path).unlink()
    if args.out:
        args.out.write_text(json.dumps(collected, indent=1))
    return 1 if off else 0


def show(model: str, cells: dict[str, list[dict[str, Any]]], within: float) -> int:
    """One table; how many cells are off."""
    print(f"\n{model}: {next(iter(cells.values()))[0]['measured']['prompt_tokens']} tokens of prompt")
    heads = ("MiB", "predicted", "range", "measured", "ratio", "min-max", "in range", "hit % p/m")
    widths = (8, 11, 16, 11, 8, 13, 10, 13)
    print(f"{'cache':<8}" + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True)))
    off = 0
    for name, runs in cells.items():
        ratios = [r["predicted"]["tok_s"]["mid"] / r["measured"]["tok_s"] for r in runs]
        middle = statistics.median(ratios)
        off += abs(middle - 1) > within
        predicted, low, high = (
            statistics.median(r["predicted"]["tok_s"][k] for r in runs) for k in ("mid", "low", "high")
        )
        inside = sum(
            r["predicted"]["tok_s"]["low"] <= r["measured"]["tok_s"] <= r["predicted"]["tok_s"]["high"] for r in runs
        )
        hit = (statistics.median(100 * r["predicted"]["hit_rate"]["mid"] for r in runs),
               statistics.median(100 * r["measured"]["hit"] for r in runs))  # fmt: skip
        values = (
            f"{runs[0]['budget'] / MiB:.0f}", f"{predicted:.2f}", f"{low:.2f}-{high:.2f}",
            f"{statistics.median(r['measured']['tok_s'] for r in runs):.2f}", f"{middle:.2f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}", f"{inside}/{len(runs)}", f"{hit[0]:.1f}/{hit[1]:.1f}",
        )  # fmt: skip
        mark = "" if abs(middle - 1) <= within else f"  more than {100 * within:.0f} % off"
        print(f"{name:<8}" + "".join(f"{v:>{w}}" for v, w in zip(values, widths, strict=True)) + mark)
    return off


def _model(stack: ExitStack, wanted: str, args: argparse.Namespace) -> str:
    if wanted == "demo":
        from bmoe.engine import demo

        return str(demo.model_path())
    if wanted not in ("zipf", "uniform"):
        return wanted
    from bench.models.make_model import (
        make_model,  # not in the children: what a process holds comes out of small budgets
    )

    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bmoe-inspect-", dir=args.dir)))
    path = place / f"{wanted}.gguf"
    zipf_s = 1.3 if wanted == "zipf" else 1.0
    make_model(path, "qwen3-30b-a3b", layers=12, router=wanted, zipf_s=zipf_s, scale=args.scale)
    return str(path)


# ---- traces -----------------------------------------------------------------------------------------


def traces(args: argparse.Namespace) -> int:
    """Hit rates from 16 tokens of each trace, from several places of it, against those of the whole trace."""
    import numpy as np

    from bmoe.analysis.replay import CacheReplay
    from bmoe.analysis.route_trace import read_trace
    from bmoe.inspect import hit_model

    errors: list[float] = []
    inside = rows = 0
    limits: list[list[float]] = [[] for _ in SHARES]
    for path in args.models:
        trace = read_trace(Path(path))
        layers = sorted(trace.expert_bytes)
        decoded: dict[int, list[list[int]]] = {layer: [] for layer in layers}
        for batch in trace.batches():
            if not batch.prefill:
                decoded[batch.layer] += [list(row) for row in batch.rows]
        n = min(map(len, decoded.values()))
        n_used = max(len(row) for row in decoded[layers[0]])
        routes = np.zeros((n, len(layers), trace.n_expert), np.bool_)
        for i, layer in enumerate(layers):
            for t in range(n):
                routes[t, i, decoded[layer][t]] = True
        whole = sum(trace.expert_bytes.values()) * trace.n_expert
        truth = [CacheReplay.of_budget(trace, int(share * whole), "votes").run().rate(1) or 0.0 for share in SHARES]
        for column, value in zip(limits, truth, strict=True):
            column.append(100 * value)
        print(f"{trace.name}: {len(layers)} layers, {n_used} of {trace.n_expert}, {n} decoded tokens")
        print(f"{'from token':<14}" + "".join(f"{f'{100 * share:g} %':>22}" for share in SHARES))
        print(f"{'recorded':<14}" + "".join(f"{100 * value:>22.1f}" for value in truth))
        for at in range(0, n - 16, 16):
            seen = hit_model.observe(routes[at : at + 16])
            assert seen is not None
            laws = hit_model.fit(seen, trace.n_expert, n_used)
            found = hit_model.hit_rates(laws, len(layers), trace.n_expert, n_used, SHARES, "votes")
            print(
                f"{at:<14}"
                + "".join(f"{f'{100 * h.mid:.1f} ({100 * h.low:.0f}-{100 * h.high:.0f})':>22}" for h in found)
            )
            errors += [100 * (h.mid - value) for h, value in zip(found, truth, strict=True)]
            inside += sum(h.low <= value <= h.high for h, value in zip(found, truth, strict=True))
            rows += len(SHARES)
    size = sorted(map(abs, errors))
    print(
        f"points off: median {statistics.median(size):.1f}, nine of ten within {size[int(0.9 * len(size))]:.1f}, mean "
        f"{statistics.fmean(errors):+.1f}; {inside} of {rows} inside the range"
    )
    pairs = ", ".join(f"{s:g}: {min(f):.1f}-{max(f):.1f}" for s, f in zip(SHARES, limits, strict=True))
    print(f"recorded, lowest and highest by share: {pairs}")
    return 0


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["speed", "traces"])
    p.add_argument("models", nargs="*", metavar="MODEL|TRACE")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument(
        "--budgets",
        type=lambda s: s.split(","),
        default=list(NAMES),
        help=f"of the table ({','.join(NAMES)})".replace("%", "%%"),
    )
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--prompt-tokens", type=int, default=128)
    p.add_argument("--within", type=float, default=WITHIN, help="how far off a median may be, as a part (%(default)s)")
    p.add_argument("--scale", type=int, default=1, help="divide the sizes of made models, for tests")
    p.add_argument("--dir", type=Path, help="where models are made (the system's temporary directory)")
    p.add_argument("--out", type=Path, help="write every run here, as JSON")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--cache-mb", type=int, default=0, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return 0
    return speed(args) if args.what == "speed" else traces(args)


if __name__ == "__main__":
    sys.exit(main())
