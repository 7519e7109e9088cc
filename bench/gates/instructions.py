"""Runs the drafters and the planning step between marks for callgrind; bench_instructions.py starts it under valgrind.

    valgrind --tool=callgrind --instr-atstart=no --collect-atstart=no python bench/gates/instructions.py NATIVE_LIBRARY

No llama.cpp is loaded: valgrind does not know all instructions that it may be compiled to. A second argument plants
work of no use: a tenth of a drafter's text, drafted twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gates import native, scripts
from bench.gates.scripts import EXPERTS, LAYERS, SLOTS, USED
from bmoe import drafting
from bmoe.speculation._drafters import replay
from bmoe.streamer import ExpertCache

PROMPT = 2048


def sections() -> dict[str, Callable[[], object]]:
    """What is counted, by name: each is one call into compiled code."""
    text = np.concatenate([scripts.edited_copy(6144), scripts.loops(2048), scripts.noise(1024)])
    rows = scripts.rows(scripts.routes(80, LAYERS, EXPERTS, USED))
    batches = scripts.batches(rows)
    found: dict[str, Callable[[], object]] = {"plain drafter": partial(native.plain_drafter, text, PROMPT, 12, 48)}
    for name in drafting.TYPES:
        settings: dict[str, Any] = {"table_size": 1 << 14} if name == "ngram-mod" else {}
        found[f"drafters/{name}"] = partial(replay, drafting.make(name, **settings), text, PROMPT)
    for policy in ("lru", "votes"):
        cache = ExpertCache([EXPERTS] * LAYERS, [0] * LAYERS, [SLOTS], policy, USED)
        found[f"plain {policy}"] = partial(native.plain_policy, policy, rows, LAYERS, EXPERTS, SLOTS)
        found[f"plan/{policy}"] = partial(cache.time_tokens, batches)
    return found


def main() -> int:
    marks = native.library(Path(sys.argv[1]))
    if not marks.marks_work():
        print("not under valgrind, or native.c was compiled without valgrind/callgrind.h", file=sys.stderr)
        return 3
    extra = len(sys.argv) > 2
    text = scripts.edited_copy(6144)
    for name, work in sections().items():
        again = partial(replay, drafting.make("ngram"), text[:2000], 1000)
        marks.marks_begin()
        work()
        if extra and name == "drafters/ngram":
            again()
        marks.marks_end(name.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
