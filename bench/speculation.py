"""Speculation against plain decoding, on given texts and on free greedy text.

    python bench/speculation.py                                  # the demo model
    python bench/speculation.py MODEL --cap-mib 2500 --cache-mb 1000
    python bench/speculation.py MODEL --cap-mib 2500 --cache-mb 1000 --widths   # cost of a verify batch

In the scripted cells the target is made to choose the tokens of a given text, while every batch is decoded,
streamed and rolled back for real: acceptance is that of the text, and time and bytes are the engine's. A model
that loops under greedy decoding flatters every lookup drafter, so the free text is shown apart. The cells of a
text run in turn, several times; ratios are to the plain run of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from bench import cgroup, texts

MiB = 1 << 20

# Cells that do not say so draft with the default policy, adaptive.
CELLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram 3": {"types": ("ngram",), "ngram": {"n_max": 3}},
    "ngram 3, always": {"types": ("ngram",), "ngram": {"n_max": 3}, "policy": "always"},
    "ngram 64": {"types": ("ngram",), "ngram": {"n_max": 64}},
    "ngram 64, always": {"types": ("ngram",), "ngram": {"n_max": 64}, "policy": "always"},
    "ngram-simple": {"types": ("ngram-simple",)},
    "ngram-map-k": {"types": ("ngram-map-k",)},
    "ngram-map-k4v": {"types": ("ngram-map-k4v",), "ngram_map_k4v": {"size_n": 8, "size_m": 32, "min_hits": 2}},
    "ngram-mod": {"types": ("ngram-mod",)},
    **{f"mtp {n}": {"types": ("mtp",), "draft": n, "policy": "always"} for n in (1, 2, 3, 4)},
    **{
        f"mtp {n}, p {p}": {"types": ("mtp",), "draft": n, "mtp_p_min": p, "policy": "always"}
        for n in (3, 4, 8)
        for p in (0.4, 0.6)
    },
    "mod,mtp 3": {
        "types": ("ngram-mod", "mtp"),
        "draft": 3,
        "ngram_mod": {"n_match": 16, "n_min": 8, "n_max": 64},
        "policy": "always",
    },
    "mod,mtp 3, extend": {
        "types": ("ngram-mod", "mtp"),
        "draft": 3,
        "ngram_mod": {"n_match": 16, "n_min": 8, "n_max": 64},
        "extend": True,
        "policy": "always",
    },
    **{
        f"mtp {n}, p {p}, adaptive": {"types": ("mtp",), "draft": n, "mtp_p_min": p} for n in (3, 8) for p in (0.0, 0.6)
    },
    "ngram-mod 16/8/64": {"types": ("ngram-mod",), "ngram_mod": {"n_match": 16, "n_min": 8, "n_max": 64}},
}


def make_spec(cell: dict[str, Any]) -> Any:
    from bmoe.drafting import DraftSpec, MapConfig, ModConfig, NgramConfig

    kinds = {"ngram": NgramConfig, "ngram_mod": ModConfig}
    return DraftSpec(
        types=tuple(cell.get("types", ())),
        **{k: kinds.get(k, MapConfig)(**v) if isinstance(v, dict) else v for k, v in cell.items() if k != "types"},
    )


def child(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells of one model, in one process: each has an engine of its own, opened and closed."""
    import bmoe
    from bmoe.drafting import make_drafter
    from bmoe.pacing import make_pace

    rows: list[dict[str, Any]] = []
    with_head = any("mtp" in CELLS[name].get("types", ()) for name in args.cells)
    longest = make_spec({"types": ("ngram-mod", "mtp") if with_head else ("ngram-mod",)})
    # One engine: the cells differ in the drafter alone, and a verify batch of the widest fits. Where a cell uses the
    # model's head, all cells have its context beside them; those that do not use it neither feed nor ask it.
    with bmoe.Engine.open(
        args.model, overlap=True, cache_mb=args.cache_mb, ctx=args.ctx, threads=args.threads, draft=longest,
        force_cache=True, rs_snapshots=64,
    ) as engine:  # fmt: skip
        head = engine.head
        for text in (t for t in texts.all_texts(args.chars) if not args.texts or t.name in args.texts):
            prompt = engine.tokenize(text.prompt)
            script = engine.tokenize(text.answer)[: args.tokens]
            for kind, forced in (("scripted", script), ("free", None)):
                if kind == "free" and text.name not in args.free:
                    continue
                plain: list[int] | None = None
                for i in range(args.repeats):
                    for name in args.cells:
                        spec = make_spec(CELLS[name])
                        engine.head = head if "mtp" in spec.types else None
                        if engine.head is not None:
                            engine.head.n_max, engine.head.p_min = spec.draft, spec.mtp_p_min
                        engine.drafter = make_drafter(spec, engine.head)
                        engine.pace = make_pace(spec.policy)
                        engine.context.clear()
                        engine.cached_ids.clear()
                        g = engine.generate(prompt, max_tokens=len(script), script=forced, stop_at_end=False)
                        for _ in g:
                            pass
                        r = g.result
                        assert sum(r.flash_split.bytes.values()) == r.prefill.bytes + r.decode.bytes
                        plain = plain or r.token_ids
                        rows.append({
                            "text": text.name, "kind": kind, "cell": name, "round": i,
                            "tok_s": r.effective_tok_s, "acceptance": r.spec.acceptance,
                            "per_decode": r.spec.tokens_per_decode,
                            "coverage": r.spec.drafted_steps / max(1, r.spec.decodes),
                            "mib_per_token": r.decode.bytes / MiB / max(1, r.decoded), "hit": r.decode.hit_rate,
                            "draft_us": 1e6 * r.spec.draft_s / max(1, r.spec.decodes), "same": r.token_ids == plain,
                            "tokens": len(r.token_ids), "split": {k: v / MiB for k, v in r.flash_split.bytes.items()},
                        })  # fmt: skip
    return rows


def child_widths(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time and bytes of one verify batch of each width, after the cache has settled, tokens at random."""
    import bmoe

    rows = []
    rng = np.random.default_rng(1)
    widths = [1, 2, 4, 8, 16, 32, 64]
    with bmoe.Engine.open(
        args.model, overlap=True, cache_mb=args.cache_mb, ctx=args.ctx, threads=args.threads,
        draft=make_spec({"types": ("ngram-mod",)}), force_cache=True, rs_snapshots=64,
    ) as engine:  # fmt: skip
        n_vocab = engine.context.n_vocab
        g = engine.generate(rng.integers(0, n_vocab - 8, 64).tolist(), max_tokens=4, stop_at_end=False)
        for _ in g:
            pass
        for i in range(args.repeats):
            for width in widths:
                for _ in range(3):
                    tokens = rng.integers(0, n_vocab - 8, width).astype(np.int32)
                    before, t0 = engine.counters(), perf_counter()
                    assert engine.context.decode_each(tokens, len(engine.cached_ids)) == 0
                    took, d = perf_counter() - t0, engine.counters() - before
                    assert engine.context.truncate(len(engine.cached_ids))
                    rows.append(
                        {
                            "width": width,
                            "round": i,
                            "ms": 1e3 * took,
                            "mib": d.bytes / MiB,
                            "experts": d.hits + d.misses,
                        }
                    )
    return rows


def run_child(args: argparse.Namespace) -> list[dict[str, Any]]:
    cgroup.drop_page_cache()
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--child"]
    why = cgroup.can_cap() if args.cap_mib else "no --cap-mib"
    if args.cap_mib and why:
        print(f"skipped: capped memory ({why})")
    with nullcontext() if why else cgroup.capped(args.cap_mib) as procs:

        def enter() -> None:
            if procs is not None:
                Path(procs).write_text(str(os.getpid()))

        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
    if done.returncode:
        raise SystemExit(done.returncode)
    rows: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("| text | target | drafter | tok/s | of plain (min-max) | acceptance | tok/decode | coverage | MiB/token "
          "| draft us/step | output |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for key in dict.fromkeys((r["text"], r["kind"], r["cell"]) for r in rows):
        mine = [r for r in rows if (r["text"], r["kind"], r["cell"]) == key]
        base = {r["round"]: r for r in rows if (r["text"], r["kind"], r["cell"]) == (key[0], key[1], "plain")}
        ratios = [r["tok_s"] / base[r["round"]]["tok_s"] for r in mine]

        def median(name: str, mine: list[dict[str, Any]] = mine) -> float | None:
            values = [r[name] for r in mine if r[name] is not None]
            return statistics.median(values) if values else None

        acceptance, per = median("acceptance"), median("per_decode")
        print(f"| {key[0]} | {key[1]} | {key[2]} | {median('tok_s'):.1f} | {statistics.median(ratios):.2f} "
              f"({min(ratios):.2f}-{max(ratios):.2f}) | {'-' if acceptance is None else f'{100 * acceptance:.0f} %'} "
              f"| {per:.2f} | {100 * (median('coverage') or 0):.0f} % | {median('mib_per_token'):.1f} "
              f"| {median('draft_us'):.1f} | {'same' if all(r['same'] for r in mine) else 'differs'} |")  # fmt: skip


def show_widths(rows: list[dict[str, Any]]) -> None:
    print("| positions | ms (min-max) | of 1 position | MiB read | experts per batch |")
    print("|---|---|---|---|---|")
    one = statistics.median(r["ms"] for r in rows if r["width"] == 1)
    for width in dict.fromkeys(r["width"] for r in rows):
        mine = [r for r in rows if r["width"] == width]
        ms = [r["ms"] for r in mine]
        mib, experts = (statistics.median(r[key] for r in mine) for key in ("mib", "experts"))
        spread = f"{statistics.median(ms):.0f} ({min(ms):.0f}-{max(ms):.0f})"
        print(f"| {width} | {spread} | {statistics.median(ms) / one:.2f} | {mib:.0f} | {experts:.0f} |")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", help="a GGUF (the demo model)")
    p.add_argument("--cap-mib", type=int, help="memory limit, MiB")
    p.add_argument("--cache-mb", default="auto")
    p.add_argument("--tokens", type=int, default=300)
    p.add_argument("--chars", type=int, default=2400)
    p.add_argument("--ctx", type=int, default=2048)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--cells", type=lambda s: s.split(";"), default=list(CELLS), help="separated by ;")
    p.add_argument("--texts", nargs="*", help="only these texts")
    p.add_argument("--free", nargs="*", default=["copy", "prose"], help="texts also run as free greedy text")
    p.add_argument("--widths", action="store_true", help="the cost of a verify batch of 1 to 64 positions")
    p.add_argument("--json", type=Path)
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        print(json.dumps(child_widths(args) if args.widths else child(args)))
        return 0
    rows = run_child(args)
    (show_widths if args.widths else show)(rows)
    if args.json:
        args.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
