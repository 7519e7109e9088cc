"""Decode speed of a model larger than memory, against the same model resident and against stock mmap.

    python bench/studies/streaming.py MODEL --cap-mib 2500 --budgets 1500,1000 --repeats 3

Each cell is a process of its own: memory capped by a cgroup (except the resident one), page cache dropped
first. Cells are interleaved, so that a slow minute of the machine falls on all of them; what counts are the
ratios to the resident run of the same round. The limit shown is max(resident time per token, bytes missed per
token / disk bandwidth), with the bandwidth measured at the same file, slice sizes and lanes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import cgroup, harness
from bench.harness import MiB, median_of

PROMPT = "The quick brown fox jumps over the lazy dog, and the reader of this sentence goes on to the next one."


# ---- children: one cell, one process, one JSON line on stdout ---------------------------------------


def child_stock(args: argparse.Namespace) -> dict[str, Any]:
    """Stock llama-cpp-python, mmap, no repacking, the same batches as bmoe."""
    import numpy as np
    from llama_cpp import llama_cpp as c

    log = c.llama_log_callback(lambda level, text, data: None)
    c.llama_log_set(log, ctypes.c_void_p(0))
    started = time.perf_counter()
    mp = c.llama_model_default_params()
    mp.use_extra_bufts, mp.n_gpu_layers = False, 0
    model = c.llama_model_load_from_file(args.model.encode(), mp)
    cp = c.llama_context_default_params()
    cp.n_ctx, cp.n_batch, cp.n_ubatch = args.ctx, 512, 512
    cp.n_threads = cp.n_threads_batch = args.threads
    context = c.llama_init_from_model(model, cp)
    load_s = time.perf_counter() - started
    vocab = c.llama_model_get_vocab(model)
    n_vocab = c.llama_vocab_n_tokens(vocab)

    def decode(ids: list[int]) -> None:
        a = np.array(ids, np.int32)
        if c.llama_decode(context, c.llama_batch_get_one(a.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), len(a))):
            raise SystemExit("llama_decode failed")

    prompt = prompt_ids(args, n_vocab)
    t0 = time.perf_counter()
    for at in range(0, len(prompt), 512):
        decode(prompt[at : at + 512])
    prefill_s = time.perf_counter() - t0
    token_ids, steps = [], []
    for _ in range(args.tokens):
        t0 = time.perf_counter()
        token = int(np.argmax(np.ctypeslib.as_array(c.llama_get_logits_ith(context, -1), shape=(n_vocab,))))
        token_ids.append(token)
        decode([token])
        steps.append(time.perf_counter() - t0)
    return {
        "load_s": load_s, "prefill_tok_s": len(prompt) / prefill_s, "steps": steps, "token_ids": token_ids,
    }  # fmt: skip


def child_bmoe(args: argparse.Namespace) -> dict[str, Any]:
    """bmoe with the settings of the cell."""
    import bmoe

    before = resource.getrusage(resource.RUSAGE_SELF)
    with bmoe.Engine.open(args.model, threads=args.threads, ctx=args.ctx, **json.loads(args.settings)) as engine:
        opened = engine.counters()
        prompt = prompt_ids(args, engine.sequence.context.n_vocab)
        generation = engine.generate(prompt, max_tokens=args.tokens + 1, stop_at_end=False)
        cpu: list[float] = []
        tokens = []
        for token in generation:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            cpu.append(usage.ru_utime + usage.ru_stime)
            tokens.append(token)
        r, d = generation.result, generation.result.decode
        return {
            "load_s": engine.load_s,
            "open_disk_mib": opened.disk_bytes / MiB,
            "dense_mib": engine.weights.dense_bytes / MiB,
            "budget_mib": engine.budget_bytes / MiB,
            "prefill_tok_s": r.prefill_tok_s,
            "prefill_mib": r.prefill.bytes / MiB,
            "steps": [t.wall_s for t in tokens[1:]],
            "token_ids": r.token_ids[:-1],
            "mib_per_token": d.bytes / MiB / r.decode_steps,
            "hit_rate": d.hit_rate,
            "stall_ms": d.stall_ns / 1e6 / engine.config.threads / r.decode_steps,
            "plan_ms": d.plan_ns / 1e6 / r.decode_steps,
            "moe_ms": d.moe_ns / 1e6 / r.decode_steps,
            "disk_mib_s": d.disk_bytes / MiB / (d.disk_ns / 1e9) if d.disk_ns else None,
            "cpu_us_per_mib": d.lane_cpu_ns / 1e3 / (d.disk_bytes / MiB) if d.disk_bytes else None,
            "python_ms": 1e3 * statistics.median(t.wall_s - t.decode_s for t in tokens[1:]),
            "cpu_ms": 1e3 * (cpu[-1] - cpu[0]) / r.decode_steps,
            "major_faults": usage.ru_majflt - before.ru_majflt,
        }


def prompt_ids(args: argparse.Namespace, n_vocab: int) -> list[int]:
    """`--prompt-tokens` ids spread over the vocabulary: the same for every engine."""
    return [(7919 * i + 13) % (n_vocab - 8) for i in range(1, args.prompt_tokens + 1)]


# ---- the parent -------------------------------------------------------------------------------------


@dataclass
class Cell:
    """One way to run the model, and what its runs gave."""

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    capped: bool = True
    runs: list[dict[str, Any]] = field(default_factory=list)

    def speed(self) -> list[float]:
        """Tokens per second of each run (median step: a stray interrupt is not the engine's)."""
        return [1 / statistics.median(r["steps"]) for r in self.runs]


def run_cell(cell: Cell, args: argparse.Namespace, cap: bool) -> dict[str, Any]:
    arguments = [
        args.model, "--child", cell.kind,
        "--settings", json.dumps(cell.settings), "--tokens", str(args.tokens), "--threads", str(args.threads),
        "--ctx", str(args.ctx), "--prompt-tokens", str(args.prompt_tokens),
    ]  # fmt: skip
    try:
        result: dict[str, Any] = harness.run_self(__file__, arguments, args.cap_mib if cap and cell.capped else None)
    except harness.ChildFailed as e:
        return {"error": str(e)}
    return result


def disk_mib_s(model: str, slice_bytes: int, lanes: int) -> tuple[float, str]:
    """Random reads of one slice's size past the page cache, MiB/s, and who measured."""
    cgroup.drop_page_cache()
    if shutil.which("fio"):
        command = [
            "fio", "--name=bmoe", f"--filename={model}", "--readonly", "--rw=randread", f"--bs={slice_bytes}",
            f"--numjobs={lanes}", "--direct=1", "--ioengine=psync", "--runtime=3", "--time_based", "--thread",
            "--group_reporting", "--output-format=json", "--norandommap", "--blockalign=4096",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            text = done.stdout[done.stdout.index("{") :]
            return json.loads(text)["jobs"][0]["read"]["bw_bytes"] / MiB, "fio"
    import mmap
    import random
    import threading

    fd, size, stop, total = os.open(model, os.O_RDONLY | os.O_DIRECT), os.path.getsize(model), time.time() + 3, [0]

    def lane() -> None:
        buffer = mmap.mmap(-1, -(-slice_bytes // 4096) * 4096)
        while time.time() < stop:
            total[0] += os.preadv(fd, [buffer], random.randrange((size - len(buffer)) // 4096) * 4096)

    threads = [threading.Thread(target=lane) for _ in range(lanes)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    os.close(fd)
    return total[0] / MiB / 3, "a loop of preads (fio is not installed)"


def slice_size(model: str) -> int:
    """The commonest slice of the model, bytes, whole pages."""
    from bmoe.gguf.file import expert_layers, open_model_file

    file = open_model_file(model)
    sizes = [t.nbytes for la in expert_layers(file.tensors, [t.name for t in file.tensors]) for t in la.tensors]
    return -(-statistics.mode(sizes) // 4096) * 4096


def cells(args: argparse.Namespace) -> list[Cell]:
    """The resident run first; then what is compared with it."""
    found = [Cell("stock, resident", "stock", capped=False), Cell("stock, mmap", "stock")]
    for mb in args.budgets:
        found.append(Cell(f"bmoe serial {mb}", "bmoe", {"cache_mb": mb, **args.extra}))
        found.append(Cell(f"bmoe overlap {mb}", "bmoe", {"cache_mb": mb, "overlap": True, **args.extra}))
    return [c for c in found if not args.only or any(word in c.name for word in args.only)]


def report(found: list[Cell], bandwidth: float) -> list[dict[str, Any]]:
    resident = next(c for c in found if not c.capped)
    rows = []
    head = ("tok/s", "min-max", "of resident", "limit", "MiB/tok", "hit %", "stall ms", "disk/fio", "us/MiB", "py ms",
            "prefill", "load s")  # fmt: skip
    print(f"\n{'cell':<22}" + "".join(f"{h:>12}" for h in head))
    for cell in found:
        ok = [(r, base) for r, base in zip(cell.runs, resident.runs, strict=True) if "error" not in r]
        if not ok:
            print(f"{cell.name:<22}{cell.runs[0]['error'] if cell.runs else 'not run'}")
            continue
        speeds = [1 / statistics.median(r["steps"]) for r, _ in ok]
        ratios = [s * statistics.median(base["steps"]) for s, (_, base) in zip(speeds, ok, strict=True)]
        prefill = statistics.median(r["prefill_tok_s"] / base["prefill_tok_s"] for r, base in ok)
        row: dict[str, Any] = {
            "cell": cell.name, "tok_s": statistics.median(speeds), "min": min(speeds), "max": max(speeds),
            "of_resident": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
            "prefill_of_resident": prefill, "load_s": statistics.median(r["load_s"] for r, _ in ok),
        }  # fmt: skip
        for key in ("mib_per_token", "hit_rate", "stall_ms", "plan_ms", "cpu_ms", "python_ms", "disk_mib_s",
                    "cpu_us_per_mib", "open_disk_mib", "dense_mib", "prefill_mib", "budget_mib"):  # fmt: skip
            row[key] = median_of((r for r, _ in ok), key)
        base_s = 1 / statistics.median(resident.speed())
        if row["mib_per_token"] is not None:
            row["limit"] = base_s / max(base_s, row["mib_per_token"] / bandwidth)
        rows.append(row)
        if row["disk_mib_s"] is not None:
            row["disk_of_fio"] = row["disk_mib_s"] / bandwidth
        numbers = [
            f"{row['tok_s']:.2f}", f"{row['min']:.2f}-{row['max']:.2f}", f"{row['of_resident']:.3f}",
            _show(row.get("limit")), _show(row["mib_per_token"]), _show(row["hit_rate"], 100), _show(row["stall_ms"]),
            _show(row.get("disk_of_fio")), _show(row["cpu_us_per_mib"]), _show(row["python_ms"]), f"{prefill:.2f}",
            f"{row['load_s']:.2f}",
        ]  # fmt: skip
        print(f"{cell.name:<22}" + "".join(f"{n:>12}" for n in numbers))
    return rows


def _show(value: float | None, factor: float = 1) -> str:
    return "-" if value is None else f"{factor * value:.2f}"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--cap-mib", type=int, default=2500, help="memory limit of the capped cells")
    p.add_argument("--budgets", type=lambda s: [int(x) for x in s.split(",")], default=[1500, 1000])
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--tokens", type=int, default=48)
    p.add_argument("--prompt-tokens", type=int, default=16)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--ctx", type=int, default=1024)
    p.add_argument("--lanes", type=int, default=4)
    p.add_argument("--only", nargs="*", help="cells whose name contains one of these words (resident always runs)")
    p.add_argument("--extra", type=json.loads, default={}, help="more engine settings, as JSON")
    p.add_argument("--json", type=Path, help="write rows and runs here")
    p.add_argument("--child", choices=["stock", "bmoe"], help=argparse.SUPPRESS)
    p.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        print(json.dumps(child_stock(args) if args.child == "stock" else child_bmoe(args)))
        return 0
    if args.only:
        args.only.append("resident")
    cap = harness.may_cap("; the cells run uncapped, so reads may be served from the page cache")
    if not cgroup.drop_page_cache():
        print("skipped: dropping the page cache (not root); first reads of a cell may be warm")
    bandwidth, who = disk_mib_s(args.model, slice_size(args.model), args.lanes)
    print(f"disk: {bandwidth:.0f} MiB/s for slices of {slice_size(args.model)} bytes, {args.lanes} lanes ({who})")
    found = cells(args)
    for i, cell in harness.rounds(args.repeats, found):
        cell.runs.append(run_cell(cell, args, cap))
        last = cell.runs[-1]
        speed = last.get("error") or f"{1 / statistics.median(last['steps']):.2f} tok/s"
        print(f"round {i + 1}/{args.repeats} {cell.name}: {speed}", file=sys.stderr, flush=True)
    outputs = {tuple(r["token_ids"]) for c in found for r in c.runs if "token_ids" in r}
    rows = report(found, bandwidth)
    print(f"\noutput: {'the same tokens in every cell' if len(outputs) == 1 else 'CELLS DIFFER'}")
    if args.json:
        args.json.write_text(json.dumps({"bandwidth_mib_s": bandwidth, "rows": rows,
                                         "runs": {c.name: c.runs for c in found}}, indent=1))  # fmt: skip
    return 0 if len(outputs) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
