"""Counts what the hot path allocates and calls; bench_allocations.py starts it with the counter of mallocs.c preloaded.

    LD_PRELOAD=MALLOCS_LIBRARY python bench/gates/allocations.py MALLOCS_LIBRARY [FAULT...]

Prints one JSON object, scenario -> counts. FAULT: "allocation" or "call", planted in each token of the generation.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import bmoe
from bench.gates import scripts
from bench.gates.moe_graph import MoeGraph
from bench.gates.scripted_model import PROMPT, SCRIPT, open_engine, write_model
from bmoe import drafting
from bmoe.host import _memory
from bmoe.host._memory import Region
from bmoe.llama import _ggml
from bmoe.speculation import _drafters
from bmoe.streamer import _admission, _cache, _reads, _route_log, _router, _streamer

MODULES = (_cache, _drafters, _ggml, _reads, _memory, _streamer, _router, _route_log, _admission)
TOKENS = 100


class Tally:
    """The preloaded counter: allocations by compiled module, and requests of CPython's allocators."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        self.lib.bench_add_range.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
        self.lib.bench_counted.restype = self.lib.bench_python_requests.restype = ctypes.c_int64
        self.names = [m.__name__.rpartition(".")[2] for m in MODULES]
        paths = {str(Path(m.__file__ or "").resolve()): i for i, m in enumerate(MODULES)}
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] in paths and "x" in fields[1]:
                low, high = (int(n, 16) for n in fields[0].split("-"))
                if self.lib.bench_add_range(low, high, paths[fields[5]]):
                    raise RuntimeError("mallocs.c has no room for another range")
        self._allocators = [self._wrap(domain) for domain in range(3)]

    def _wrap(self, domain: int) -> tuple[Any, Any]:
        original, wrapper = (ctypes.c_void_p * 5)(), (ctypes.c_void_p * 5)()
        ctypes.pythonapi.PyMem_GetAllocator(domain, original)
        self.lib.bench_wrap(original, wrapper)
        ctypes.pythonapi.PyMem_SetAllocator(domain, wrapper)
        return original, wrapper

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """What is allocated inside the block, in the dict after it."""
        found: dict[str, int] = {}
        self._take()
        self.lib.bench_count(1)
        try:
            yield found
        finally:
            self.lib.bench_count(0)
            found.update(self._take())

    def _take(self) -> dict[str, int]:
        counts = {name: int(self.lib.bench_counted(i)) for i, name in enumerate(self.names)}
        return {**counts, "python": int(self.lib.bench_python_requests())}


def of_drafters(counter: Tally) -> dict[str, int]:
    """Allocations of each drafter's index over a stream."""
    text = np.concatenate([scripts.edited_copy(12288), scripts.loops(8192), scripts.noise(4096)])
    found = {}
    for name in drafting.TYPES:
        with counter.counting() as counts:
            _drafters.replay(drafting.make(name), text, 4096)
        found[name] = counts["_drafters"]
    return found


def of_the_graph(counter: Tally, directory: Path) -> dict[str, int]:
    """Allocations of plans, reads and matmuls once every buffer has its size."""
    routes = scripts.routes(120, 2, 16, 4)[:, :, None, :]
    with MoeGraph(directory / "experts.bin", quant="Q8_0", n_embd=64, n_ff=96, n_slots=12, policy="votes") as graph:
        for experts in routes[:20]:
            graph.streamed(experts)
        with counter.counting() as counts:
            for experts in routes[20:]:
                graph.streamed(experts)
    return {f"{TOKENS} tokens, {name}": counts[name] for name in ("_streamer", "_cache", "_reads", "_admission")}


def of_a_generation(counter: Tally, directory: Path, faults: list[str]) -> dict[str, dict[str, int]]:
    """Allocations and calls of decode steps, and what stays allocated after them."""
    path = write_model(directory)
    calls: Counter[str] = Counter()
    with open_engine(path, 21, overlap=True) as engine:
        spare = Region(4096)
        kept: list[bytes] = []

        def fault() -> None:
            if "allocation" in faults:
                kept.append(bytes(4096))
                engine.lanes.read_windows([(0, 0, 4096, 4096, spare.address)])
            if "call" in faults:
                engine.sequence.graphs.counters()

        def steps(n: int) -> None:
            for _ in range(n):
                next(generation)
                fault()

        # Twice the same: the second time every cache is warm and every buffer large enough.
        for _ in range(2):
            generation = engine.generate(PROMPT, max_tokens=3 * TOKENS + 1, stop_at_end=False, script=SCRIPT)
            next(generation)
            steps(TOKENS)
            gc.collect()
            gc.disable()
            before = sys.getallocatedblocks()
            with counter.counting() as counts:
                steps(TOKENS)
            cycles = gc.collect()
            blocks = sys.getallocatedblocks() - before
            sys.setprofile(_profiler(calls))
            steps(TOKENS)
            sys.setprofile(None)
            gc.enable()
            once, calls = calls, Counter()
        spare.close()
    modules = {f"{TOKENS} tokens, {name}": n for name, n in counts.items() if name != "python"}
    python = f"{sys.version_info.major}.{sys.version_info.minor}, numpy {np.__version__}"
    return {
        "allocations/generation": modules,
        f"allocations/python@python {python}": {
            f"{TOKENS} tokens, requests": counts["python"],
            f"{TOKENS} tokens, objects left to the cycle collector": cycles,
            # Clocks and byte counts are numbers of more or less than a block: a few, given or taken, not one for each
            # token; not //, which makes -1 of a few that were given back.
            "blocks kept by each token": int(blocks / TOKENS),
        },
        f"calls/{TOKENS} decode steps": dict(once),
    }


def _profiler(calls: Counter[str]) -> Callable[[FrameType, str, Any], None]:
    """Counts the calls of bmoe's Python functions; a generator that goes on counts too."""
    home = str(Path(bmoe.__file__).parent)

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        # <listcomp> and its like are functions in some releases of Python only.
        if event == "call" and code.co_filename.startswith(home) and not code.co_name.startswith("<"):
            calls[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1

    return profile


def main() -> int:
    counter = Tally(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="bmoe-bench-") as name:
        found = {
            "allocations/drafters": of_drafters(counter),
            "allocations/graph": of_the_graph(counter, Path(name)),
            **of_a_generation(counter, Path(name), sys.argv[2:]),
        }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
