"""Reading ahead against reading on demand: stall, speed and bytes, interleaved.

    python bench/models/make_model.py qwen3-30b-a3b --layers 12 --router zipf --zipf-s 1.3 --out zipf.gguf
    python bench/studies/prefetch.py zipf.gguf --cap-mib 2600 --budgets 950,1500

Every cell is an engine of its own on the same prompt, in turn, round after round; ratios are to the cell without
reading ahead of the same round and budget. The file's skewed router makes adjacent layers' routers agree as they do
in real models: the guesses' accuracy is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import cgroup, harness
from bench.harness import MiB, grouped, ratios, spread

PROMPT = "Once upon a time there was a machine with less memory than its model, and it read what it needed. " * 2


def child(args: argparse.Namespace) -> list[dict[str, Any]]:
    import bmoe

    rows = []
    for budget in args.budgets:
        tokens: list[int] | None = None
        for how in args.cells:
            cgroup.drop_page_cache()
            with bmoe.Engine.open(
                args.model, overlap=True, cache_mb=budget, ctx=1024, threads=args.threads, io_threads=args.lanes,
                prefetch=how, predict_log=args.predict_log, force_cache=True,
            ) as engine:  # fmt: skip
                g = engine.generate(PROMPT, max_tokens=args.tokens, stop_at_end=False)
                for _ in g:
                    pass
                r = g.result
                assert r.flash_split.total == r.prefill.bytes + r.decode.bytes
                tokens = tokens or r.token_ids
                assert tokens == r.token_ids, "reading ahead must not change the output"
                scores = engine.streamer.scores() if args.predict_log else []
                split, n = r.flash_split.bytes, r.decode_steps
                rows.append({
                    "budget": budget, "cell": how, "tok_s": r.decode_tok_s,
                    "stall_ms": r.decode.stall_ns / engine.config.threads / 1e6 / n, "hit": r.decode.hit_rate,
                    "mib": r.decode.bytes / MiB / n, "used_mib": split["prefetch_used"] / MiB / n,
                    "wasted_mib": split["prefetch_wasted"] / MiB / n, "guess_ms": r.decode.guess_ns / 1e6 / n,
                    "misses": r.decode.misses / n, "found": r.decode.guess_hits / n,
                    "right": [[sum(s[k][i] for s in scores) for i in (0, 1)] for k in (scores[0] if scores else ())],
                })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("| budget, MiB | reading ahead | tok/s | of off (min-max) | stall, ms/token | of off (min-max) | misses "
          "| found ahead | MiB/token (used, wasted ahead) | guessing, ms/token |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    cells = grouped(rows, "budget", "cell")
    for (budget, how), mine in cells.items():
        speed, stall = (spread(ratios(mine, cells[budget, "off"], name)) for name in ("tok_s", "stall_ms"))

        def m(name: str, mine: list[dict[str, Any]] = mine) -> float:
            return harness.median_of(mine, name) or 0.0

        print(f"| {budget} | {how} | {m('tok_s'):.2f} | {speed} | {m('stall_ms'):.1f} | {stall} "
              f"| {m('misses'):.1f} | {m('found'):.1f} | {m('mib'):.1f} ({m('used_mib'):.1f}, "
              f"{m('wasted_mib'):.1f}) | {m('guess_ms'):.2f} |")  # fmt: skip
    for i, kind in enumerate(("control", "next-layer")):
        right, every = (sum(r["right"][i][k] for r in rows if r["right"]) for k in (0, 1))
        if every:
            print(f"{kind}: {100 * right / every:.1f} % of {every} routed experts named")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--cap-mib", type=int, help="memory limit, MiB")
    p.add_argument("--budgets", type=lambda s: [int(n) for n in s.split(",")], default=[1500])
    p.add_argument("--cells", type=lambda s: s.split(","), default=["off", "next-layer"])
    p.add_argument("--tokens", type=int, default=96)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--lanes", type=int, default=4)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--predict-log", action="store_true", help="score the guesses too (costs time)")
    p.add_argument("--json", type=Path)
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        import bmoe

        try:
            print(json.dumps(child(args)))
        except bmoe.BmoeError as e:
            print(f"{args.model}: {e}", file=sys.stderr)
            return 1
        return 0
    cap = args.cap_mib if args.cap_mib and harness.may_cap() else None
    rows: list[dict[str, Any]] = []
    for i in range(args.repeats):
        try:
            found = harness.run_self(__file__, [*sys.argv[1:], "--child"], cap, show_errors=True)
        except harness.ChildFailed as e:
            return e.code
        rows += [{**row, "round": i} for row in found]
    show(rows)
    if args.json:
        args.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
