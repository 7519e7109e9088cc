"""`python -m bmoe abi`: what bmoe assumes about llama.cpp, checked against the llama-cpp-python that is installed."""

from __future__ import annotations

import argparse
import os
import tempfile
from importlib import metadata
from pathlib import Path

from ...abi import graph, heads, layout, names, streaming  # noqa: F401 - each enters its checks
from ...abi.check import BROKEN, CHECKS, OK, SKIPPED, Check, Files, run_all
from ...abi.tiny import EXPERTS, write_tiny
from ...engine import demo
from ...errors import AbiError, UsageError
from ...llama.library import PINNED
from ..flags import Parser
from ..terminal import say, write


def build_parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="bmoe abi",
        description="Checks everything that bmoe assumes about llama.cpp against the installed llama-cpp-python, the "
        "pinned release or another: one line for each assumption, with what was found and which file to change. Exit "
        "code 1 where one is broken. Each check is a process of its own.",
    )
    g = p.add_argument_group("what is checked")
    g.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="FILE",
        help="a model that is compared with its resident run too, and so must fit into memory; repeatable",
    )
    g.add_argument("--only", metavar="TEXT", help="checks with TEXT in their name, and what they need")
    return p


def run(args: argparse.Namespace) -> int:
    """Makes the checks; 1 where one is broken. Raises UsageError, AbiError where there is no llama-cpp-python."""
    models = tuple(Path(m) for m in args.model)
    for path in models:
        if not path.is_file():
            raise UsageError(f"--model: {path}: no such file")
    chosen = choose(args.only)
    # Before llama.cpp is loaded: threads that wait sleep, others may need the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        installed = metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        raise AbiError(f"llama-cpp-python is not installed: pip install llama-cpp-python=={PINNED}") from None
    counts = {OK: 0, BROKEN: 0, SKIPPED: 0}
    with tempfile.TemporaryDirectory(prefix="bmoe-abi-") as folder:
        place = Path(folder)
        files = Files(
            demo.model_path(),
            write_tiny(place / "tiny.gguf"),
            write_tiny(place / "shards.gguf", shards=2),
            write_tiny(place / "spoiled.gguf", used=EXPERTS + 1),
            models,
        )
        for result in run_all(chosen, files, installed):
            counts[result.state] += 1
            write(line(result.check, result.state, result.said) + "\n")
    pin = "as pinned" if installed == PINNED else f"bmoe is pinned to {PINNED}"
    say(f"llama-cpp-python {installed} ({pin}): " + ", ".join(f"{n} {state}" for state, n in counts.items()))
    return 1 if counts[BROKEN] else 0


def choose(text: str | None) -> list[Check]:
    """The checks with `text` in their name and what they need, in order. Raises UsageError where there is none."""
    if text is None:
        return CHECKS
    wanted = {c.name for c in CHECKS if text in c.name}
    if not wanted:
        raise UsageError(f"--only: no check has {text!r} in its name: python -m bmoe abi shows them all")
    while more := {n for c in CHECKS if c.name in wanted for n in c.needs} - wanted:
        wanted |= more
    return [c for c in CHECKS if c.name in wanted]


def line(check: Check, state: str, said: str) -> str:
    """One line of the report."""
    if state == BROKEN:
        said = f"{said}: {check.assumes}; see {check.mend}"
    return f"{state:<11} {check.name}: {said}"
