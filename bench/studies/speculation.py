"""Speculation against plain decoding, on given texts and on free greedy text.

    python bench/studies/speculation.py                                  # the demo model
    python bench/studies/speculation.py MODEL --cap-mib 2500 --cache-mb 1000
    python bench/studies/speculation.py MODEL --cap-mib 2500 --cache-mb 1000 --widths   # cost of a verify batch
    python bench/studies/speculation.py MODEL --recorded --cells table   # drafts as the demo model's own head made them

In the scripted cells the target is made to choose the tokens of a given text, while every batch is decoded,
streamed and rolled back for real: acceptance is that of the text, and time and bytes are the engine's. A model
that loops under greedy decoding flatters every lookup drafter, so the free text is shown apart. With `--recorded` the
text is the free one of another model, and its head's drafts are replayed (bench/studies/recorded.py). The cells of a
text run in turn, several times; ratios are to the plain run of the same round, and a second plain run shows the noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from bench import harness
from bench.harness import MiB, grouped, ratios, spread
from bench.studies import recorded, texts

# Cells that do not say so draft with the default policy, adaptive.
CELLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain again": {},
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
        for n in (1, 2, 3, 4, 8)
        for p in (0.4, 0.6)
    },
    "mod,mtp 3": {
        "types": ("ngram-mod", "mtp"),
        "draft": 3,
        "ngram_mod": {"n_match": 16, "n_min": 8, "n_max": 64},
        "policy": "always",
    },
    **{
        f"mtp {n}, p {p}, adaptive": {"types": ("mtp",), "draft": n, "mtp_p_min": p} for n in (3, 8) for p in (0.0, 0.6)
    },
    "ngram-mod 16/8/64": {"types": ("ngram-mod",), "ngram_mod": {"n_match": 16, "n_min": 8, "n_max": 64}},
}
CELLS |= {f"{name}, always": {**CELLS[name], "policy": "always"} for name in ("ngram-mod 16/8/64", "ngram-map-k4v")}

TABLE = ["plain", "ngram 3, always", "ngram 64, always", "ngram-mod 16/8/64, always", "ngram-map-k4v, always"]
TABLE += [f"mtp {n}{p}" for n in (1, 2, 3, 4) for p in ("", ", p 0.4", ", p 0.6")]
TABLE += ["mtp 3, p 0.0, adaptive", "plain again"]
"""Every kind of source, each draft verified whole; plain first and last, so that the noise of a whole round shows."""


def cells_of(text: str) -> list[str]:
    """The cells that `--cells` names. Raises argparse.ArgumentTypeError."""
    names = TABLE if text == "table" else text.split(";")
    if unknown := [name for name in names if name not in CELLS]:
        raise argparse.ArgumentTypeError(f"no cell {unknown[0]!r}")
    return names


def make_spec(cell: dict[str, Any]) -> Any:
    from bmoe.speculation import DraftSpec, MapConfig, ModConfig, NgramConfig

    kinds = {"ngram": NgramConfig, "ngram_mod": ModConfig}
    return DraftSpec(
        types=tuple(cell.get("types", ())),
        **{k: kinds.get(k, MapConfig)(**v) if isinstance(v, dict) else v for k, v in cell.items() if k != "types"},
    )


@dataclass(frozen=True)
class Run:
    """A text that all cells run on. `forced`: what the target is made to choose; `record`: what a head drafts there."""

    text: str
    kind: str  # "scripted", "free" or "recorded"
    prompt: list[int]
    tokens: int
    forced: list[int] | None = None
    record: recorded.Record | None = None


def runs_of(engine: Any, args: argparse.Namespace) -> Iterator[Run]:
    """The texts of the command line; with `--recorded`, those whose record comes on standard input."""
    if args.recorded is not None:
        for record in recorded.load(sys.stdin.read()).values():
            if not recorded.fits(record, engine.sequence.context.n_vocab):
                n_vocab = engine.sequence.context.n_vocab
                raise SystemExit(f"{args.model}: {n_vocab} tokens: it has not all that were recorded")
            yield Run(record.name, "recorded", record.prompt, len(record.script), record.script, record)
        return
    for text in (t for t in texts.all_texts(args.chars) if not args.texts or t.name in args.texts):
        prompt, script = engine.tokenize(text.prompt), engine.tokenize(text.answer)[: args.tokens]
        if not args.only_free:
            yield Run(text.name, "scripted", prompt, len(script), script)
        if text.name in args.free:
            yield Run(text.name, "free", prompt, len(script))


def child(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells of one model, in one process: each has an engine of its own, opened and closed."""
    import bmoe

    rows: list[dict[str, Any]] = []
    with_head = any("mtp" in CELLS[name].get("types", ()) for name in args.cells)
    longest = make_spec({"types": ("ngram-mod", "mtp") if with_head else ("ngram-mod",)})
    # One engine: the cells differ in the drafter alone, and a verify batch of the widest fits. Where a cell uses the
    # model's head, all cells have its context beside them; those that do not use it neither feed nor ask it.
    with bmoe.Engine.open(
        args.model, overlap=True, cache_mb=args.cache_mb, ctx=args.ctx, threads=args.threads, draft=longest,
        force_cache=True, rs_snapshots=64,
    ) as engine:  # fmt: skip
        head = engine.sequence.head
        for run in runs_of(engine, args):
            # Not counted: it would find the cache cold, of the head's experts too.
            run_cell(engine, head, run, "mtp 1" if head is not None else "plain")
            plain: list[int] | None = None
            for i, name in harness.rounds(args.repeats, args.cells):
                r = run_cell(engine, head, run, name)
                plain = plain or r.token_ids
                rows.append({"text": run.text, "kind": run.kind, "cell": name, "round": i,
                             "same": r.token_ids == plain, **measures(r)})  # fmt: skip
    return rows


def run_cell(engine: Any, head: Any, run: Run, name: str) -> Any:
    """One generation from an empty sequence, drafted as the cell says: its result."""
    from bmoe.speculation import make_drafter
    from bmoe.speculation.draft_width import make_draft_width

    spec = make_spec(CELLS[name])
    engine.sequence.head = head if "mtp" in spec.types else None
    if engine.sequence.head is not None:
        if run.record is not None:
            engine.sequence.head = recorded.Replayed(head.head, run.record, spec.draft, spec.mtp_p_min)
        else:
            head.n_max, head.p_min = spec.draft, spec.mtp_p_min
    engine.drafting.drafter = make_drafter(spec, engine.sequence.head)
    engine.drafting.width = make_draft_width(spec.policy)
    engine.sequence.context.clear()
    engine.sequence.ids.clear()
    g = engine.generate(run.prompt, max_tokens=run.tokens, script=run.forced, stop_at_end=False)
    for _ in g:
        pass
    return g.result


def measures(r: Any) -> dict[str, Any]:
    """What a row shows of a result. `split`: MiB of each decoded token by cause, which add up to `mib_per_token`."""
    decoded, split = max(1, r.decoded), dict(r.flash_split.bytes)
    assert sum(split.values()) == r.prefill.bytes + r.decode.bytes
    # What was read ahead in prefill has causes of its own.
    assert split["prefill"] == r.prefill.bytes, "no reading ahead here"
    del split["prefill"]
    return {
        "tok_s": r.effective_tok_s, "acceptance": r.spec.acceptance, "per_decode": r.spec.tokens_per_decode,
        "coverage": r.spec.drafted_steps / max(1, r.spec.decodes),
        "mib_per_token": r.decode.bytes / MiB / decoded, "hit": r.decode.hit_rate,
        "draft_us": 1e6 * r.spec.draft_s / max(1, r.spec.decodes), "draft_s": r.spec.draft_s,
        "decode_s": r.decode_s, "decodes": r.spec.decodes, "drafted": r.spec.drafted, "accepted": r.spec.accepted,
        "tokens": len(r.token_ids), "split": {k: v / MiB / decoded for k, v in split.items()},
    }  # fmt: skip


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
        n_vocab = engine.sequence.context.n_vocab
        g = engine.generate(rng.integers(0, n_vocab - 8, 64).tolist(), max_tokens=4, stop_at_end=False)
        for _ in g:
            pass
        for i, width in harness.rounds(args.repeats, widths):
            for _ in range(3):
                tokens = rng.integers(0, n_vocab - 8, width).astype(np.int32)
                before, t0 = engine.counters(), perf_counter()
                assert engine.sequence.context.decode_each(tokens, len(engine.sequence.ids)) == 0
                took, d = perf_counter() - t0, engine.counters() - before
                assert engine.sequence.context.truncate(len(engine.sequence.ids))
                measured = {"ms": 1e3 * took, "mib": d.bytes / MiB, "experts": d.hits + d.misses}
                rows.append({"width": width, "round": i, **measured})
    return rows


def make_record(args: argparse.Namespace) -> str:
    """What the head of another model, `--recorded`, drafts along its own text: bench/studies/recorded.py's output."""
    command = [sys.executable, str(Path(recorded.__file__).resolve()), *([args.recorded] if args.recorded else [])]
    command += ["--texts", *args.free, "--threads", str(args.threads), "--ctx", str(args.ctx)]
    command += ["--tokens", str(args.tokens), "--chars", str(args.chars)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout.strip().splitlines()[-1]


def run_child(args: argparse.Namespace) -> list[dict[str, Any]]:
    record = make_record(args) if args.recorded is not None else ""
    cap = args.cap_mib if args.cap_mib and harness.may_cap() else None
    try:
        rows: list[dict[str, Any]] = harness.run_self(
            __file__, [*sys.argv[1:], "--child"], cap, stdin=record, show_errors=True
        )
    except harness.ChildFailed as e:
        raise SystemExit(e.code) from None
    return rows


SHOWN = ("base", "accepted", "rejected", "draft_source")
"""Causes of bytes that have a column; the others share one."""


def show(rows: list[dict[str, Any]]) -> None:
    print("| text | target | drafter | tok/s | of plain (min-max) | MiB/token | hit | acceptance | tok/decode "
          f"| coverage | {' | '.join(SHOWN)} | other | draft us/step | output |")  # fmt: skip
    print("|---" * (13 + len(SHOWN)) + "|")
    cells = grouped(rows, "text", "kind", "cell")
    for (text, kind, name), mine in cells.items():
        of_plain = spread(ratios(mine, cells[text, kind, "plain"], "tok_s"))

        def median(name: str, form: str = ".1f", mine: list[dict[str, Any]] = mine) -> str:
            value = harness.median_of(mine, name)
            return "-" if value is None else format(value, form)

        split = [statistics.median(r["split"][cause] for r in mine) for cause in SHOWN]
        other = statistics.median(sum(v for k, v in r["split"].items() if k not in SHOWN) for r in mine)
        print(f"| {text} | {kind} | {name} | {median('tok_s')} | {of_plain} "
              f"| {median('mib_per_token')} | {median('hit', '.0%')} "
              f"| {median('acceptance', '.0%')} | {median('per_decode', '.2f')} | {median('coverage', '.0%')} "
              f"| {' | '.join(f'{v:.1f}' for v in [*split, other])} "
              f"| {median('draft_us')} | {'same' if all(r['same'] for r in mine) else 'differs'} |")  # fmt: skip


def show_widths(rows: list[dict[str, Any]]) -> None:
    print("| positions | ms (min-max) | of 1 position | MiB read | experts per batch |")
    print("|---|---|---|---|---|")
    cells = grouped(rows, "width")
    one = statistics.median(r["ms"] for r in cells[(1,)])
    for (width,), mine in cells.items():
        ms = [r["ms"] for r in mine]
        mib, experts = (statistics.median(r[key] for r in mine) for key in ("mib", "experts"))
        print(f"| {width} | {spread(ms, '.0f')} | {statistics.median(ms) / one:.2f} | {mib:.0f} | {experts:.0f} |")


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
    p.add_argument("--cells", type=cells_of, default=list(CELLS), help="separated by ;, or table: those of docs/mtp.md")
    p.add_argument("--texts", nargs="*", help="only these texts")
    p.add_argument("--free", nargs="*", default=["copy", "prose"], help="texts also run as free greedy text")
    p.add_argument("--only-free", action="store_true", help="no scripted text")
    p.add_argument(
        "--recorded", nargs="?", const="", metavar="MODEL",
        help="the --free texts of this model (the demo model), with what its head drafted there",
    )  # fmt: skip
    p.add_argument("--widths", action="store_true", help="the cost of a verify batch of 1 to 64 positions")
    p.add_argument("--json", type=Path)
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if "plain" not in args.cells:
        p.error("--cells without plain: it is what the others are compared with")
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
