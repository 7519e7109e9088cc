"""What an engine will allocate, from its settings and the model's header: shared by the engine and `bmoe inspect`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from .. import llama
from ..errors import UsageError
from ..experts import slots
from ..experts.budget import ModelSizes
from ..gguf.file import ExpertLayer, ModelFile
from ..host import memory
from ..speculation import mtp
from .config import DEFAULT_CONTEXT, EngineConfig

ALLOWANCE = 64 << 20
"""What the process may hold beyond weights, KV cache, compute buffers and the cache budget, bytes."""
RESERVE = 28 << 20
"""Of the allowance: kept for what grows later (ggml's work buffer, activations, heap)."""
LOGITS_BYTES = 64 << 20
"""At most this much for the logits of one batch, where a text is scored."""


@dataclass(frozen=True)
class ContextPlan:
    """The shape of the target's context, in tokens: see `llama.Context`. `longest`: of a draft."""

    n_ctx: int
    n_ubatch: int
    longest: int
    score_rows: int
    n_snapshots: int
    n_each: int

    @property
    def n_outputs(self) -> int:
        """Rows of logits that a batch may keep."""
        return max(self.longest + 1, self.score_rows)

    @property
    def head_ubatch(self) -> int:
        """Tokens of a batch of the model's own heads, with --mtp."""
        return min(mtp.WIDTH, self.n_ubatch)


def context_plan(config: EngineConfig, file: ModelFile, n_vocab: int) -> ContextPlan:
    """The context that `config` asks for on this model."""
    n_ctx = config.ctx or min(file.number("context_length", DEFAULT_CONTEXT), DEFAULT_CONTEXT)
    n_ubatch = min(config.ubatch, n_ctx)
    longest = min(config.draft.longest(), n_ubatch - 1)
    fit = max(1, LOGITS_BYTES // (4 * n_vocab))
    return ContextPlan(
        n_ctx,
        n_ubatch,
        longest,
        score_rows=max(1, min(config.score_rows, n_ubatch, fit)),
        n_snapshots=min(longest, config.rs_snapshots),
        n_each=n_ubatch if config.score_rows else 0,
    )


def expert_override(config: EngineConfig, file: ModelFile) -> dict[str, int]:
    """The key that --n-expert-used replaces, empty without it. Raises UsageError where the model has no such key."""
    if config.n_expert_used is None:
        return {}
    path, n_expert = file.paths[0], file.number("expert_count")
    if not n_expert:
        raise UsageError(f"--n-expert-used: {path} has no routed experts")
    if config.n_expert_used > n_expert:
        raise UsageError(f"--n-expert-used: {config.n_expert_used} is more than the model's {n_expert} experts")
    key = f"{file.arch}.expert_used_count"
    if isinstance(file.keys.get(key), tuple):
        raise UsageError(f"--n-expert-used: {path} routes its own number of experts in each layer")
    return {key: config.n_expert_used}


def experts_used(file: ModelFile, override: dict[str, int]) -> int:
    """Experts that a token routes in a layer, the most of any layer."""
    return override.get(f"{file.arch}.expert_used_count") or file.largest("expert_used_count")


def spare_bytes(overhead: int) -> int:
    """What of the allowance a process that holds `overhead` bytes leaves; negative: beyond it."""
    return ALLOWANCE - RESERVE - overhead


def cache_sizes(
    layers: Sequence[ExpertLayer], n_used: int, dense_bytes: int, buffers: llama.BufferSizes, overhead: int
) -> ModelSizes:
    """What `budget.decide` is told of a model. `overhead`: what the process holds besides, bytes."""
    # What it holds beyond the allowance is charged to the budget: the sum is what is promised.
    excess = max(0, -spare_bytes(overhead))
    return ModelSizes(
        dense=dense_bytes,
        kv=buffers.kv,
        compute=buffers.compute,
        recurrent=buffers.recurrent,
        experts=slots.all_experts_bytes(layers) + excess,
        working_set=slots.working_set_bytes(layers, n_used) + excess,
        smallest=slots.smallest_bytes(layers, n_used) + excess,
        ring=slots.RING_AREAS * slots.ring_stride(layers) + excess,
    )


@functools.cache
def base_rss() -> int:
    """Resident bytes of the interpreter and its libraries, taken when the first model is looked at."""
    return memory.read_process_memory().rss
