"""The steps of the recipe, each from what the one before has left in `--work`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

STEPS = ("prepare", "train", "export", "check", "evaluate")
COPIES = 7000
# By the type of matrix products, for two cores and less than 90 minutes (docs/demo-model.md): the first is what the
# bundled model was trained on; the second was measured before the plan had its last part.
TOKENS = {"bfloat16": 28_800_000, "float32": 7_400_000}
CHECKED, EVERY = 100, 6  # tokens that `check` compares, of each of so many held-out files
FILE = "bmoe-demo-26m-a5m-q8_0.gguf"
DESCRIPTION = "A small MoE model to show and test a streaming engine with; good at nothing else."
VOCAB = 4096


def build_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench.models.demo_model", description=__doc__)
    p.add_argument("step", choices=(*STEPS, "all"), help="one step, or all in this order")
    p.add_argument("--work", type=Path, default=Path("build/demo_model"), metavar="DIR", help="(%(default)s)")
    p.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), metavar="DIR",
                   help="the standard library to read (this Python's)")  # fmt: skip
    p.add_argument("--docs", type=Path, metavar="DIR", help="its documentation's sources (Debian's python3.N-doc)")
    p.add_argument("--tokens", type=int, metavar="N",
                   help="tokens to train on; another number is another model (28800000 where the processor multiplies "
                   "bfloat16, else 7400000)")  # fmt: skip
    p.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="(%(default)s)")
    p.add_argument("--out", type=Path, metavar="FILE", help="the GGUF (DIR/bmoe-demo-26m-a5m-q8_0.gguf)")
    p.add_argument("--unseen", type=Path, nargs="+", default=[], metavar="DIR",
                   help="evaluate: packages whose code is predicted as well, which no training text has")  # fmt: skip
    return p


def find_docs(given: Path | None) -> Path:
    from .corpus import DOCS

    found = [Path(d.format(minor=sys.version_info.minor)) for d in DOCS] if given is None else [given]
    for path in found:
        if path.is_dir():
            return path
    raise FileNotFoundError(
        f"no documentation sources in {', '.join(map(str, found))}: install python3-doc or give --docs"
    )


def main() -> int:
    args = build_parser().parse_args()
    if args.step in ("train", "all") and sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        # Large pages for large tensors: read by the C library when a process starts, so this one starts again.
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, "-m", str(__package__), *sys.argv[1:]])
    try:
        return max(globals()[step](args) or 0 for step in (STEPS if args.step == "all" else (args.step,)))
    except (FileNotFoundError, ValueError) as e:
        print(f"demo_model: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo_model: stopped; `train` goes on from its last checkpoint", file=sys.stderr)
        return 130


def prepare(args: argparse.Namespace) -> None:
    from . import text
    from .shape import Plan

    facts = text.prepare(args.work, args.stdlib, find_docs(args.docs), VOCAB, COPIES, Plan().seed)
    print(json.dumps(facts))


def train(args: argparse.Namespace) -> None:
    import torch

    from .shape import Plan, Shape
    from .train import keep_memory, product_type, run

    keep_memory()
    torch.set_num_threads(args.threads)
    plan = replace(Plan(), tokens=args.tokens or TOKENS[str(product_type()).removeprefix("torch.")])
    with (args.work / "train.jsonl").open("a") as log:
        for report in run(args.work, Shape(vocab=VOCAB), plan):
            log.write(json.dumps({**report, "time": time.time()}) + "\n")
            log.flush()
            print(
                "step {step}/{of}  loss {loss:.3f}  head {mtp:.3f}  {tok_s:.0f} tok/s  load {load:.1f}  "
                "{minutes:.1f} min, {left:.1f} to go".format(**report),
                file=sys.stderr,
            )
    torch.compiler.set_stance("force_eager")  # the steps after it have sequences of every length


def target(args: argparse.Namespace) -> Path:
    path: Path = args.out or args.work / FILE
    return path


def export(args: argparse.Namespace) -> None:
    import torch
    from tokenizers import Tokenizer

    from . import calibrate
    from . import export as gguf_file
    from .corpus import LICENSE
    from .model import Network
    from .shape import Shape
    from .text import held_out
    from .train import product_type

    torch.set_num_threads(args.threads)
    shape = Shape(vocab=VOCAB)
    params = torch.load(args.work / "model.pt", weights_only=True)["params"]
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    texts = [[0, *tokenizer.encode(f["text"]).ids] for f in held_out(args.work)[::2]]
    trunk, head = calibrate.temperatures(Network(shape, params, product_type()), texts)
    print(f"logits divided by {trunk:.2f} (head {head:.2f}), best for half of the held-out files")
    params = calibrate.apply(params, shape.layers, trunk, head)
    card = {"description": DESCRIPTION, "license": LICENSE}
    for path, q8 in ((target(args), True), (args.work / "exact-f32.gguf", False)):
        gguf_file.write(path, shape, params, args.work / "tokenizer.json", q8=q8, card=card)
        print(f"{path}: {path.stat().st_size} bytes")


def check(args: argparse.Namespace) -> int:
    """1 where trainer and llama.cpp do not agree."""
    import torch
    from tokenizers import Tokenizer

    from . import check as checks
    from .text import held_out

    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    texts = [[0, *tokenizer.encode(f["text"]).ids[:CHECKED]] for f in held_out(args.work)[::EVERY]]
    wrong = []
    for path, exact in ((args.work / "exact-f32.gguf", True), (target(args), False)):
        found = checks.compare(path, texts, exact)
        for name, a in found.items():
            print(
                f"{path.name}, {name}: {a.tokens} tokens, largest difference of a logit {a.worst:.4f} (median over "
                f"tokens {a.median:.4f}, {100 * a.beyond:.1f} % beyond {checks.TOLERANCE[exact]}), same choice "
                f"{100 * a.same_choice:.1f} %, nats/token {a.nats[0]:.4f} and {a.nats[1]:.4f}"
            )
        wrong += [f"{path.name}, {line}" for line in checks.verdict(found, exact)]
    for line in wrong:
        print(f"demo_model: {line}", file=sys.stderr)
    return 1 if wrong else 0


def evaluate(args: argparse.Namespace) -> None:
    import torch

    from . import evaluate as evaluation

    torch.set_num_threads(args.threads)
    found = evaluation.run(target(args), args.work, unseen=args.unseen)
    (args.work / "evaluation.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
