"""The metrics file: one JSON object of a run's result and the engine's counters (docs/telemetry.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..accounting.counters import StreamCounters
from ..accounting.results import GenerationResult
from ..engine.config import Sampling
from ..engine.engine import Engine
from ..host import memory
from ..host.files import write_output
from ..observe.diagnosis import Diagnosis
from ..version import __version__


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
            "sources": engine.drafting.drafter.stats,
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


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes `data` whole or not at all; a device or pipe is written to. Raises BmoeError."""
    write_output(path, json.dumps(data, indent=1) + "\n", "--metrics-json")
