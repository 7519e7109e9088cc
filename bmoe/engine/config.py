"""What a user can ask of the engine: one dataclass, checked in one place."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from ..errors import UsageError
from ..experts.budget import DEFAULT_FLOOR_MB, CacheRequest, parse_cache_mb
from ..experts.weights import DENSE_MODES, DenseMode
from ..host.files import check_outputs
from ..speculation import DraftSpec

Prefetch = Literal["off", "next-layer"]
PREFETCHES: tuple[Prefetch, ...] = ("off", "next-layer")
MAX_LANES = 16
MAX_THREADS = 512  # ggml's own limit
MAX_CONTEXT = 1 << 24
MAX_SEED = (1 << 32) - 2  # the next one, LLAMA_DEFAULT_SEED, is llama.cpp's word for any
CachePolicy = Literal["default", "votes", "lru"]
CACHE_POLICIES: tuple[CachePolicy, ...] = ("default", "votes", "lru")
DEFAULT_POLICY: CachePolicy = "votes"
DEFAULT_LANES = 4
DEFAULT_CONTEXT = 4096
DEFAULT_UBATCH = 512
DEFAULT_SNAPSHOTS = 8
"""Recurrent-state snapshots kept for rollback: each is as large as the state itself."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine; the command line's flags of the same names. Sizes in MiB, counts in tokens.

    Raises UsageError for a value out of range, naming the flag.
    """

    cache_mb: str | int = "auto"
    cache_floor_mb: int = DEFAULT_FLOOR_MB
    cache_ceil_mb: int | None = None
    force_cache: bool = False
    cache_policy: CachePolicy = "default"
    overlap: bool = False
    io_threads: int = DEFAULT_LANES
    odirect: bool = True
    dense_weights: DenseMode = "anon"
    threads: int = 0
    ctx: int = 0
    ubatch: int = DEFAULT_UBATCH
    n_expert_used: int | None = None
    draft: DraftSpec = field(default_factory=DraftSpec)
    rs_snapshots: int = DEFAULT_SNAPSHOTS
    prefetch: Prefetch = "off"
    predict_log: bool = False
    drop_cold_experts: float | None = None
    drop_in_prefill: bool = False
    route_trace: str | None = None
    io_trace: str | None = None
    cache_state: str | None = None
    score_rows: int = 0
    """Tokens of one batch that `Engine.score` wants the logits of; fewer where they would take much memory."""

    def __post_init__(self) -> None:
        if not 1 <= self.io_threads <= MAX_LANES:
            raise UsageError(f"--io-threads: {self.io_threads} is out of range, give 1 to {MAX_LANES}")
        if not 0 <= self.threads <= MAX_THREADS:
            raise UsageError(
                f"--threads: {self.threads} is out of range, give 1 to {MAX_THREADS} (0: one for each core)"
            )
        if not 0 <= self.ctx <= MAX_CONTEXT:
            raise UsageError(
                f"--ctx-size: {self.ctx} is out of range, give 1 to {MAX_CONTEXT} tokens "
                f"(0: the model's, at most {DEFAULT_CONTEXT})"
            )
        if not 1 <= self.ubatch <= MAX_CONTEXT:
            raise UsageError(f"--ubatch: {self.ubatch} is out of range, give 1 to {MAX_CONTEXT} tokens")
        if self.n_expert_used is not None and self.n_expert_used < 1:
            raise UsageError(f"--n-expert-used: {self.n_expert_used} is out of range, give 1 or more")
        if self.dense_weights not in DENSE_MODES:
            raise UsageError(f"--dense-weights: {self.dense_weights!r} is none of {', '.join(DENSE_MODES)}")
        if self.cache_policy not in CACHE_POLICIES:
            raise UsageError(f"--cache-policy: {self.cache_policy!r} is none of {', '.join(CACHE_POLICIES)}")
        if not 0 <= self.rs_snapshots <= 1024:
            raise UsageError(f"--rs-snapshots: {self.rs_snapshots} is out of range, give 0 to 1024")
        if not 0 <= self.score_rows <= MAX_CONTEXT:
            raise UsageError(f"score_rows: {self.score_rows} is out of range, give 0 to {MAX_CONTEXT}")
        cache = self.cache_request()
        if self.prefetch not in PREFETCHES:
            raise UsageError(f"--prefetch: {self.prefetch!r} is none of {', '.join(PREFETCHES)}")
        if self.prefetch != "off" and not self.overlap:
            raise UsageError("--prefetch needs --overlap: without it nothing is computed while experts are read")
        if self.drop_cold_experts is None:
            if self.drop_in_prefill:
                raise UsageError("--drop-in-prefill goes with --drop-cold-experts")
        elif not 0.0 < self.drop_cold_experts <= 1.0:
            raise UsageError(
                f"--drop-cold-experts: {self.drop_cold_experts} is out of range, give above 0 up to 1 "
                "(a part of the mean routing weight)"
            )
        elif cache.mode == "off" or cache.mb == 0:
            raise UsageError("--drop-cold-experts needs a cache: without one every expert is cold; drop --cache-mb 0")

        if self.cache_state is not None and (cache.mode == "off" or cache.mb == 0):
            raise UsageError("--cache-state needs a cache: drop --cache-mb 0")
        check_outputs(
            {
                flag: Path(path) if path is not None else None
                for flag, path in (
                    ("--route-trace", self.route_trace),
                    ("--io-trace", self.io_trace),
                    ("--cache-state", self.cache_state),
                )
            }
        )

    def cache_request(self) -> CacheRequest:
        """The cache part of it, for `budget.decide`."""
        mode, mb = parse_cache_mb(str(self.cache_mb))
        return CacheRequest(mode, mb, self.cache_floor_mb, self.cache_ceil_mb, self.force_cache)

    @property
    def policy(self) -> CachePolicy:
        """The cache policy by its own name."""
        return DEFAULT_POLICY if self.cache_policy == "default" else self.cache_policy

    def n_threads(self) -> int:
        """Compute threads: as asked, or one for each physical core this process may run on."""
        if self.threads:
            return self.threads
        usable = len(psutil.Process().cpu_affinity())
        return max(1, min(psutil.cpu_count(logical=False) or usable, usable))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedy at `temp` 0, else top-k, top-p, temperature and a draw with `seed`.

    `seed`: None has one drawn for each generation (`with_seed`). Raises UsageError, naming the flag.
    """

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temp <= 100.0:
            raise UsageError(f"--temp: {self.temp} is out of range, give 0 (greedy) to 100")
        if not 0 <= self.top_k < 1 << 31:
            raise UsageError(f"--top-k: {self.top_k} is out of range, give 1 or more (0 keeps every token)")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"--top-p: {self.top_p} is out of range, give above 0 up to 1")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"--seed: {self.seed} is out of range, give 0 to {MAX_SEED}")

    @property
    def greedy(self) -> bool:
        return self.temp == 0.0

    def with_seed(self) -> Sampling:
        """The same, with a seed that is drawn where one is needed and none was given."""
        if self.greedy or self.seed is not None:
            return self
        # Not `secrets`: it loads megabytes of a library for this.
        return replace(self, seed=int.from_bytes(os.urandom(8), "little") % (MAX_SEED + 1))
