"""What a run that has ended shows of what bounds it: the engine's side of `bmoe.observe.diagnosis`."""

from __future__ import annotations

import psutil

from ..accounting.results import GenerationResult
from ..engine.engine import Engine
from ..host import memory
from ..observe.diagnosis import Evidence


def evidence(engine: Engine, result: GenerationResult, greedy: bool) -> Evidence:
    """What `diagnose` asks for."""
    config, flash, decode = engine.config, result.flash_split.bytes, result.decode
    return Evidence(
        tokens=result.decoded,
        time=result.decode_time,
        cpu_s=result.decode_cpu_s,
        read_bytes=decode.bytes,
        unused_bytes=flash["rejected"] + flash["draft_source"],
        disk_ns=decode.disk_ns,
        hits=decode.hits,
        misses=decode.misses,
        rereads=decode.rereads,
        faults=result.decode_faults,
        drafted=result.spec.drafted,
        accepted=result.spec.accepted,
        slots=engine.cache.n_slots if engine.cache is not None else 0,
        experts=sum(layer.n_expert for layer in engine.layers),
        budget=engine.budget_bytes,
        room=memory.read_memory_facts().available(),
        threads=config.threads,
        cores=_cores(),
        overlap=config.overlap or not engine.layers,
        drafter=result.spec.type,
        greedy=greedy,
        dropping=config.drop_cold_experts is not None,
        cache_state=config.cache_state is not None,
        dense_weights=config.dense_weights,
    )


def _cores() -> int:
    """Physical cores that this process may run on."""
    usable = len(psutil.Process().cpu_affinity())
    return max(1, min(psutil.cpu_count(logical=False) or usable, usable))
