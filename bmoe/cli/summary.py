"""What a run prints at its end, and the metrics file: views of one result and the engine's counters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..accounting.counters import StreamCounters
from ..accounting.results import GenerationResult
from ..engine.config import Sampling
from ..engine.engine import Engine
from ..errors import BmoeError
from ..host import memory
from ..host.files import write_whole
from ..observe.diagnosis import Diagnosis
from ..version import __version__
from . import summary_table

MiB = 1 << 20


def opening_lines(engine: Engine) -> list[str]:
    """What was opened and what the engine decided, a line for each subject."""
    config = engine.config
    lines = [f"model: {engine.path.name}, {engine.arch}, opened in {engine.load_s:.2f} s"]
    if engine.decision is not None:
        lines.append(engine.decision.explain())
    lines += [f"note: {note}" for note in engine.notes]
    if config.n_expert_used is not None:
        lines.append(
            f"note: {config.n_expert_used} experts per token instead of the model's own number: output differs"
        )
    if config.drop_cold_experts is not None:
        where = "decode and prefill" if config.drop_in_prefill else "decode"
        lines.append(
            f"note: cold experts below {config.drop_cold_experts:g}/{engine.n_used} of the routing weight are dropped "
            f"in {where}: output differs, and depends on what is in the cache"
        )
    return lines


def closing_lines(engine: Engine, result: GenerationResult, found: Diagnosis, table: bool) -> list[str]:
    """The end of a run: what it did, as lines or as a `table` for a person, and what bounds it."""
    if not table:
        return [*summary_lines(engine, result), found.sentence]
    rows = summary_table.facts_table(engine, result)
    times = summary_table.time_table(result.decode_time, result.decoded)
    lines = [*summary_table.lay_out(rows), *summary_table.lay_out(times), *spec_lines(result)]
    if engine.cache is not None:
        lines += prefetch_lines(engine, result)
        lines += drop_lines(engine.config.drop_cold_experts, result.prefill, result.decode)
        lines += [split_line(result), *extra_lines(engine)]
    return [*lines, found.sentence]


def summary_lines(engine: Engine, result: GenerationResult) -> list[str]:
    """The end-of-run summary, a line for each subject."""
    lines = [
        f"generation: {len(result.token_ids)} tokens in {result.total_s:.2f} s, "
        f"{_rate(result.decode_tok_s)} ({_rate(result.effective_tok_s)} effective), stopped: {result.stop}",
        f"prefill: {result.prefill_tokens} tokens in {result.prefill_s:.2f} s ({_rate(result.prefill_tok_s)})"
        + (f", {result.reused_tokens} kept from before" if result.reused_tokens else "")
        + f", first token after {result.ttft_s:.2f} s, {result.prefill.bytes / MiB:.0f} MiB read",
        compute_line(engine, result),
        f"memory: {result.major_faults} major faults, "
        f"{memory.read_process_memory().peak_rss / MiB:.0f} MiB resident at most",
    ]
    lines += spec_lines(result)
    if engine.cache is None:
        return lines
    lines += prefetch_lines(engine, result)
    lines += drop_lines(engine.config.drop_cold_experts, result.prefill, result.decode)
    decode, steps = result.decode, result.decode_steps
    per_token = f"{decode.bytes / MiB / result.decoded:.1f} MiB/token" if steps else "no decode step"
    lines.append(f"moe-stream: {(result.prefill.bytes + decode.bytes) / MiB:.0f} MiB read, {per_token}")
    lines.append(split_line(result))
    rate = decode.hit_rate
    lines.append(
        f"moe-cache: {'-' if rate is None else f'{100 * rate:.1f} %'} hit in decode, {engine.cache.n_resident} of "
        f"{engine.cache.n_slots} slots full, {decode.evictions} evictions, {decode.rereads} re-reads"
    )
    if steps and result.decode_s:
        lines.append(_time_line(engine, decode, result))
    return lines + extra_lines(engine)


def compute_line(engine: Engine, result: GenerationResult) -> str:
    """How busy the processor was in decode, and where a token's time went."""
    t, n = result.decode_time, result.decoded
    if not n or t.wall <= 0:
        return "compute: no decode step"
    shares = ", ".join(f"{what} {100 * getattr(t, part) / t.wall:.1f} %" for part, what in summary_table.PARTS)
    return (
        f"compute: {result.decode_cpu_s / (t.wall / 1e9):.2f} cores busy with {engine.config.threads} threads, "
        f"{result.decode_faults / n:.1f} major faults/token; of {t.wall / 1e6 / n:.2f} ms/token: {shares}"
    )


def extra_lines(engine: Engine) -> list[str]:
    """What was read ahead and what was traced; nothing where neither was asked for."""
    return ([engine.preload.line()] if engine.preload is not None else []) + engine.traces.lines()


def warm_start(engine: Engine) -> dict[str, Any] | None:
    """The `warm_start` object of the metrics file, of the engine's whole life; None where nothing is read ahead."""
    if engine.preload is None:
        return None
    loader = engine.preload.loader
    return {
        "experts": loader.experts,
        "used": loader.used(),
        "bytes_read": loader.bytes + loader.bytes_unused,
        "bytes_too_late": loader.bytes_unused,
        "disk_bytes": engine.preload.lanes.counters()["disk_bytes"],
        "done": engine.preload.done,
    }


def spec_lines(result: GenerationResult) -> list[str]:
    """What speculation did: acceptance, drafting cost, coverage; nothing without speculation."""
    spec = result.spec
    if spec.type == "none":
        return []
    share = "-" if spec.acceptance is None else f"{100 * spec.acceptance:.1f} %"
    name, per_decode = spec.type, spec.tokens_per_decode
    lines = [
        f"{name}: {spec.accepted}/{spec.drafted} drafts accepted ({share}), "
        f"{'-' if per_decode is None else f'{per_decode:.2f}'} tokens per verify decode "
        f"({spec.decodes} decodes for {spec.confirmed} tokens)",
        f"{name}: drafting costs {spec.draft_s / max(1, spec.confirmed):.6f} s/token on top of decode -> "
        f"{_rate(result.effective_tok_s)} effective (vs {_rate(result.decode_tok_s)} reported)",
        f"{name}: drafted on {spec.drafted_steps} of {spec.decodes} steps "
        f"({100 * spec.drafted_steps / max(1, spec.decodes):.1f} %); the rest decoded plainly",
    ]
    if "mtp" in name.split(","):
        split = result.flash_split.bytes
        head, verify = split["draft_source"], split["base"] + split["accepted"] + split["rejected"]
        lines.append(
            f"{name}: of {(head + verify) / MiB:.1f} MiB streamed in decode, {head / MiB:.1f} MiB "
            f"({100 * head / max(1, head + verify):.1f} %) was the head's own routing, {verify / MiB:.1f} MiB "
            "the verify batches"
        )
    if spec.recoveries:
        lines.append(
            f"{name}: {spec.recoveries} rejected tails could not be taken back: {spec.recovery_s:.2f} s and "
            f"{spec.recovery_bytes / MiB:.1f} MiB to decode again"
        )
    return lines


def drop_lines(threshold: float | None, *phases: StreamCounters) -> list[str]:
    """What dropping cold experts left out, over all phases; nothing where it is off."""
    if threshold is None:
        return []
    routed, dropped = (sum(getattr(c, name) for c in phases) for name in ("drop_routed", "dropped"))
    mass, positions = (sum(getattr(c, name) for c in phases) for name in ("drop_mass", "drop_positions"))
    return [
        f"moe-drop: {dropped} of {routed} routed experts dropped ({100 * dropped / max(1, routed):.1f} %), "
        f"{100 * mass / max(1, positions):.2f} % of the routing weight, below {threshold:g}/top-k"
    ]


def prefetch_lines(engine: Engine, result: GenerationResult) -> list[str]:
    """What was read ahead, and how good the guesses were."""
    lines, c = [], result.decode
    if engine.config.prefetch != "off" and result.decode_steps:
        split = result.flash_split.bytes
        lines.append(
            f"moe-prefetch: {engine.config.prefetch}, {c.guessed} experts read ahead, {c.guess_hits} of {c.misses} "
            f"misses found among them, {c.guess_cancelled} taken back; {split['prefetch_used'] / MiB:.1f} MiB used, "
            f"{split['prefetch_wasted'] / MiB:.1f} wasted; {1e-6 * c.guess_ns / result.decode_steps:.2f} ms/token "
            "guessing"
        )
    scores = engine.streamer.scores() if engine.config.predict_log else []
    for kind in scores[0] if scores else ():
        right, every = (sum(layer[kind][i] for layer in scores) for i in (0, 1))
        if every:
            lines.append(f"predict: {kind} names {100 * right / every:.1f} % of {every} routed experts")
    blind = engine.streamer.unpredictable()
    if blind and (scores or engine.config.prefetch == "next-layer"):
        lines.append(
            f"predict: the routers of {len(blind)} of {len(engine.layers)} layers cannot be run again from the graph "
            "(from layer " + f"{blind[0]} on): nothing is guessed from or for them"
        )
    return lines


def split_line(result: GenerationResult) -> str:
    """Bytes read from disk by cause, and the share of them that the cache had held before."""
    split = result.flash_split
    parts = [f"{cause.replace('_', ' ')} {n / MiB:.1f}" for cause, n in split.bytes.items() if n]
    again = sum(split.rereads.values())
    return (
        f"flash split: of {split.total / MiB:.1f} MiB streamed: {', '.join(parts) or 'nothing'}; "
        f"{again / MiB:.1f} of it had been read before"
    )


def _time_line(engine: Engine, decode: StreamCounters, result: GenerationResult) -> str:
    stall = (decode.wait_ns + decode.draft_wait_ns) / 1e9
    plan = (decode.manage_ns + decode.draft_manage_ns) / 1e9
    name = "moe-overlap" if engine.config.overlap else "moe-serial"
    return (
        f"{name}: {1e3 * stall / result.decode_steps:.2f} ms/token stalled on reads "
        f"({100 * stall / result.decode_s:.0f} % of decode), {1e3 * plan / result.decode_steps:.3f} ms/token planning"
    )


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} tok/s"


def resolved_config(engine: Engine, sampling: Sampling) -> dict[str, Any]:
    """Every setting of a run, resolved."""
    return {
        **engine.config.as_dict(),
        "budget_bytes": engine.budget_bytes,
        "direct_io": engine.lanes.direct,
        "sampling": {
            "temp": sampling.temp,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        },
    }


def metrics(engine: Engine, result: GenerationResult, sampling: Sampling, found: Diagnosis) -> dict[str, Any]:
    """The metrics object. `expert` is of decode; `prefill.expert` the same for prefill. Bytes and seconds."""
    budget, resident = engine.budget_bytes, engine.resident_bytes
    dropping = engine.config.drop_cold_experts
    held = memory.read_process_memory()
    return {
        "version": __version__,
        "model": str(engine.path),
        "arch": engine.arch,
        "config": resolved_config(engine, sampling),
        "cache": engine.decision.explain() if engine.decision else None,
        "token_ids": result.token_ids,
        "tokens": len(result.token_ids),
        "stop": result.stop,
        "stop_string": result.stop_string,
        "prompt_tokens": result.prompt_tokens,
        "prefill_tokens": result.prefill_tokens,
        "load_s": engine.load_s,
        "ttft_s": result.ttft_s,
        "prefill_s": result.prefill_s,
        "decode_s": result.decode_s,
        "total_s": result.total_s,
        "prefill_tok_s": result.prefill_tok_s,
        "decode_tok_s": result.decode_tok_s,
        "effective_tok_s": result.effective_tok_s,
        "decode_steps": result.decode_steps,
        "time": {"first_token": result.first_time.as_dict(), "decode": result.decode_time.as_dict()},
        "bound": found.as_dict(),
        "stall_s": (result.decode.wait_ns + result.decode.draft_wait_ns) / 1e9,
        "plan_s": (result.decode.manage_ns + result.decode.draft_manage_ns) / 1e9,
        "expert_matmul_s": result.decode.moe_ns / 1e9,
        "disk_s": result.decode.disk_ns / 1e9,
        "lane_cpu_s": result.decode.lane_cpu_ns / 1e9,
        "major_faults": result.major_faults,
        "decode_faults": result.decode_faults,
        "decode_cpu_s": result.decode_cpu_s,
        "peak_rss_bytes": held.peak_rss,
        "rss_bytes": held.rss,
        "spec": {
            **result.spec.as_dict(),
            "effective_tok_s": result.effective_tok_s,
            "sources": engine.drafter.stats,
        },
        "flash_split": result.flash_split.as_dict(),
        "flash_split_rereads": dict(result.flash_split.rereads),
        "expert": expert_summary(result.decode, result.decoded, budget, resident, dropping),
        "prefill": {"expert": expert_summary(result.prefill, result.prefill_tokens, budget, resident, dropping)},
        "prefetch": {
            "guessed": result.decode.guessed,
            "used": result.decode.guess_hits,
            "cancelled": result.decode.guess_cancelled,
            "guess_s": result.decode.guess_ns / 1e9,
            "scores": engine.streamer.scores() if engine.config.predict_log else None,
            "unpredictable_layers": engine.streamer.unpredictable(),
        },
        "warm_start": warm_start(engine),
        "run": {"bytes_read": result.prefill.bytes + result.decode.bytes},
        "memory": {
            "dense_bytes": engine.weights.dense_bytes,
            "kv_bytes": engine.buffers.kv,
            "recurrent_bytes": engine.buffers.recurrent,
            "compute_bytes": engine.buffers.compute,
        },
    }


def write_json(path: Path, data: dict[str, Any], flag: str = "--metrics-json") -> None:
    """Writes `data` whole or not at all; a device or pipe is written to. Raises BmoeError."""
    try:
        write_whole(path, json.dumps(data, indent=1) + "\n")
    except OSError as e:
        raise BmoeError(f"{flag}: cannot write {path}: {e.strerror}") from None


def expert_summary(
    counters: StreamCounters, steps: int, budget: int, resident: int, drop_threshold: float | None = None
) -> dict[str, Any]:
    """The `expert` object of the metrics file for one phase."""
    return {
        "bytes_read": counters.bytes,
        "bytes_per_token": counters.bytes / steps if steps else None,
        "reads": counters.reads,
        "routed": counters.routed,
        "hits": counters.hits,
        "misses": counters.misses,
        "hit_rate": counters.hit_rate,
        "evictions": counters.evictions,
        "rereads": counters.rereads,
        "streamed": counters.streamed,
        "budget_bytes": budget,
        "resident_bytes": resident,
        "drop": {
            "threshold": drop_threshold,
            "routed": counters.drop_routed,
            "dropped": counters.dropped,
            "weight_mass_dropped": counters.dropped_weight,
        },
    }
