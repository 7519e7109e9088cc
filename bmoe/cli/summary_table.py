"""The end of a run on a terminal: rates, bytes and where the time went, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..accounting.results import GenerationResult
from ..accounting.timing import TimeSplit
from ..host import memory

if TYPE_CHECKING:
    from ..engine.engine import Engine

MiB = 1 << 20
PARTS = (
    ("compute", "computing"),
    ("stall", "waiting for reads"),
    ("manage", "cache management"),
    ("build", "building graphs"),
    ("draft", "drafting"),
    ("loop", "loop around them"),
    ("output", "text out"),
    ("rest", "rest of the graphs (not measured itself)"),
)
"""The parts of a `TimeSplit`, and what people call them."""


def time_table(time: TimeSplit, tokens: int) -> list[tuple[str, str, str]]:
    """Rows of what, milliseconds per token, share of the wall time; parts of nothing are left out."""
    if not tokens or time.wall <= 0:
        return []
    rows = [("a token after the first takes", f"{time.wall / 1e6 / tokens:.2f} ms", "100 %")]
    for name, what in PARTS:
        part = getattr(time, name)
        if part:
            rows.append((f"  {what}", f"{part / 1e6 / tokens:.2f} ms", f"{100 * part / time.wall:.1f} %"))
    return rows


def facts_table(engine: Engine, result: GenerationResult) -> list[tuple[str, str, str]]:
    """Rows of what, value and a remark: rates, bytes, memory."""
    decode, n = result.decode, result.decoded
    rows = [
        ("generated", f"{len(result.token_ids)} tokens", f"{result.total_s:.2f} s, stopped: {result.stop}"),
        ("prefill", rate(result.prefill_tok_s), f"{result.prefill_tokens} tokens in {result.prefill_s:.2f} s"),
        ("decode", rate(result.decode_tok_s), f"{rate(result.effective_tok_s)} with all around it"),
    ]
    if engine.cache is not None and n:
        hit = "-" if decode.hit_rate is None else f"{100 * decode.hit_rate:.1f} % hit"
        speed = f", {decode.bytes / MiB / (decode.disk_ns / 1e9):.0f} MiB/s while reading" if decode.disk_ns else ""
        rows += [
            ("read", f"{decode.bytes / MiB / n:.1f} MiB/token", f"{decode.bytes / MiB:.0f} MiB{speed}"),
            ("cache", hit, f"{engine.cache.n_resident} of {engine.cache.n_slots} slots full"),
        ]
    if n:
        cpu = result.decode_cpu_s / (result.decode_time.wall / 1e9) if result.decode_time.wall else 0.0
        faults = f"{result.decode_faults / n:.1f} major faults/token"
        rows.append(("processor", f"{cpu:.1f} cores", f"{engine.config.threads} compute threads, {faults}"))
    facts = memory.read_memory_facts()
    peak = memory.read_process_memory().peak_rss
    rows.append(
        ("memory", f"{peak / MiB:.0f} MiB at most", f"{facts.available() / MiB:.0f} MiB free, by {facts.binding()}")
    )
    return rows


def lay_out(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Rows of three columns as lines: the first to the left, numbers to the right, remarks behind them."""
    if not rows:
        return []
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"{a:<{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows]


def rate(value: float | None) -> str:
    """Tokens per second."""
    return "-" if value is None else f"{value:.2f} tok/s"
