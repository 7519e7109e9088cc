"""Speed of the first tokens with a cache state from an earlier run, and without one.

    python bench/studies/warm_start.py MODEL --cache-mb 500 --cap-mib 1400 --repeats 5

The state is written by a run on another prompt. Then, interleaved: no state; the state, with the prompt at once; the
state, with the prompt when everything has been read ahead, as where a user types first. Each cell is a process of its
own, its memory capped by a cgroup, the page cache dropped first.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import harness
from bench.harness import MiB, median_of, spread

CELLS = ("cold", "warm", "warm, waited")


def child(args: argparse.Namespace) -> dict[str, Any]:
    """One run: opens, generates, and says what the first tokens took."""
    import bmoe

    settings = json.loads(args.settings)
    started = time.perf_counter()
    with bmoe.Engine.open(
        args.model, threads=args.threads, ctx=512, overlap=True, cache_mb=args.cache_mb, **settings
    ) as engine:
        waited = time.perf_counter()
        if args.wait and engine.preload is not None:
            engine.preload.wait()
        waited = time.perf_counter() - waited
        n_vocab = engine.sequence.context.n_vocab
        prompt = [(7919 * i + 13 + 1009 * args.seed) % (n_vocab - 8) for i in range(1, args.prompt_tokens + 1)]
        generation = engine.generate(prompt, max_tokens=args.tokens + 1, stop_at_end=False)
        tokens = list(generation)
        r, preload = generation.result, engine.preload
        return {
            "token_ids": r.token_ids,
            "first_s": time.perf_counter() - started - waited,
            "waited_s": waited,
            "ttft_s": r.ttft_s,
            "decode_s": sum(t.wall_s for t in tokens[1:]),
            "hit_rate": r.decode.hit_rate,
            "prefill_hit_rate": r.prefill.hit_rate,
            "mib": (r.prefill.bytes + r.decode.bytes) / MiB,
            "ahead_mib": preload.loader.bytes / MiB if preload else 0.0,
        }


def cell(args: argparse.Namespace, name: str, state: Path | None, seed: int, tokens: int, cap: bool) -> dict[str, Any]:
    """One run as a process of its own."""
    arguments = [
        args.model, "--child", "--seed", str(seed),
        "--tokens", str(tokens), "--prompt-tokens", str(args.prompt_tokens), "--threads", str(args.threads),
        "--cache-mb", str(args.cache_mb), "--settings", json.dumps({"cache_state": str(state)} if state else {}),
    ]  # fmt: skip
    if name == CELLS[2]:
        arguments.append("--wait")
    try:
        result: dict[str, Any] = harness.run_self(__file__, arguments, args.cap_mib if cap else None)
    except harness.ChildFailed as e:
        raise SystemExit(str(e)) from None
    return result


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--cache-mb", type=int, default=500)
    p.add_argument("--cap-mib", type=int, default=1400, help="memory limit of every cell")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--tokens", type=int, default=32)
    p.add_argument("--prompt-tokens", type=int, default=8)
    p.add_argument("--history", type=int, default=256, help="tokens of the run that writes the state")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--json", type=Path, help="write the runs here")
    for name in ("--child", "--wait"):
        p.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    p.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return 0
    cap = harness.may_cap()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CELLS}
    with tempfile.TemporaryDirectory() as place:
        history, state = Path(place) / "history.json", Path(place) / "state.json"
        cell(args, "history", history, 1, args.history, cap)
        for i, name in harness.rounds(args.repeats, CELLS):
            # Every cell starts from the same history; what it adds at its end is thrown away.
            shutil.copy(history, state)
            runs[name].append(cell(args, name, None if name == "cold" else state, 2 + i, args.tokens, cap))
    same = all(len({tuple(runs[name][i]["token_ids"]) for name in CELLS}) == 1 for i in range(args.repeats))
    head = ("tok/s", "min-max", "of cold", "ttft s", "hit %", "MiB", "ahead", "wait s")
    widths = (8, 16, 18, 8, 8, 8, 8, 8)
    print(f"{'cell':<14}" + "".join(f"{h:>{w}}" for h, w in zip(head, widths, strict=True)))
    for name, mine in runs.items():
        speed = [args.tokens / r["decode_s"] for r in mine]
        of_cold = [c["decode_s"] / r["decode_s"] for r, c in zip(mine, runs["cold"], strict=True)]
        middle = {key: median_of(mine, key) or 0.0 for key in ("ttft_s", "hit_rate", "mib", "ahead_mib", "waited_s")}
        print(
            f"{name:<14}{statistics.median(speed):>8.2f}{f'{min(speed):.2f}-{max(speed):.2f}':>16}"
            f"{spread(of_cold):>18}"
            f"{middle['ttft_s']:>8.2f}{100 * middle['hit_rate']:>8.1f}{middle['mib']:>8.0f}{middle['ahead_mib']:>8.0f}"
            f"{middle['waited_s']:>8.2f}"
        )
    print(f"output: {'the same tokens with and without' if same else 'CELLS DIFFER'}")
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
