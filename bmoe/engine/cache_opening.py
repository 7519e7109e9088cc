"""How an engine gets its expert cache: a budget granted, cut into slots, served from, filled again after a start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..experts import warm_start
from ..experts.budget import CacheDecision, CacheRequest, ModelSizes, advice
from ..experts.pool import SlotPool
from ..experts.slots import SlotPlan, plan_slots
from ..gguf.file import ExpertLayer
from ..host import memory
from ..streamer import ExpertCache, Lanes, Streamer
from .config import EngineConfig
from .planning import ALLOWANCE, spare_bytes

FEW_EXPERTS = 4
"""Experts per token up to which dropping one is warned about: each carries a quarter of the weight or more."""
MAX_READ_AHEAD = 32
"""Spare slots of each size class for what is read ahead, at most: twice what a token routes in a layer."""

Grant = Callable[[CacheRequest, ModelSizes, memory.MemoryFacts, int], CacheDecision]
"""Decides what memory experts get, as `experts.budget.decide`."""


@dataclass(frozen=True)
class OpenCache:
    """An expert cache in service: the decision that granted it, the plan that cut it, the index of its slots."""

    decision: CacheDecision
    plan: SlotPlan
    index: ExpertCache


def open_cache(
    stack: ExitStack,
    config: EngineConfig,
    layers: Sequence[ExpertLayer],
    n_used: int,
    sizes: ModelSizes,
    *,
    resident: int,
    overhead: int,
    streamer: Streamer,
    lanes: Lanes,
    grant: Grant,
    note: Callable[[str], None],
) -> OpenCache:
    """Begins to serve the experts of `layers` from a cache of what `grant` gives.

    `resident`: bytes of `sizes` that this process holds already; `overhead`: what it holds besides. Raises
    MemoryBudgetError, UsageError.
    """
    spare = spare_bytes(overhead)
    excess = max(0, -spare)
    decision = grant(config.cache_request(), sizes, memory.read_memory_facts(), resident)
    if said := advice(decision, config.policy):
        note(said)
    ahead = min(2 * n_used, MAX_READ_AHEAD) if config.prefetch != "off" else 0
    plan = plan_slots(layers, max(0, decision.budget - excess), max(0, spare), ahead)
    if excess and decision.budget:
        note(
            f"{excess >> 20} MiB of the cache budget are for what the process itself holds "
            f"(libraries and vocabulary, beyond {ALLOWANCE >> 20} MiB)"
        )
    pool = SlotPool(plan)
    stack.callback(pool.close)
    # No read may be under way when the pool goes: the lanes are joined before it.
    stack.callback(lanes.close)
    index = ExpertCache(
        [la.n_expert for la in layers],
        list(plan.layer_class),
        list(plan.class_slots),
        config.policy,
        max(1, min(n_used, 255)),
    )
    streamer.start(
        index,
        pool.classes(),
        list(plan.layer_class),
        list(plan.quotas),
        plan.n_ring,
        pool.ring_address,
        plan.ring_stride,
    )
    opened = OpenCache(decision, plan, index)
    _read_ahead(config, layers, opened, streamer, note)
    return opened


def _read_ahead(
    config: EngineConfig,
    layers: Sequence[ExpertLayer],
    opened: OpenCache,
    streamer: Streamer,
    note: Callable[[str], None],
) -> None:
    """Starts to read ahead where that is asked for and there is room, or says why not."""
    plan = opened.plan
    streamer.read_ahead(config.prefetch if any(plan.class_spares) else "off", config.predict_log)
    if config.prefetch == "off":
        return
    _need_slots("--prefetch", opened)
    if not any(plan.class_spares):
        everything = all(
            n >= plan.layer_class.count(k) * layers[plan.layer_class.index(k)].n_expert
            for k, n in enumerate(plan.class_slots)
        )
        why = "every expert has a slot" if everything else "the cache is too small to spare room for it"
        note(f"--prefetch {config.prefetch}: nothing is read ahead, {why}")


def start_dropping(
    threshold: float, opened: OpenCache | None, n_used: int, streamer: Streamer, path: Path, note: Callable[[str], None]
) -> None:
    """Has cold experts below `threshold` dropped. Raises UsageError where none can be."""
    if opened is None:
        raise UsageError(f"--drop-cold-experts: {path} has no routed experts")
    _need_slots("--drop-cold-experts", opened)
    if n_used <= FEW_EXPERTS:
        note(
            f"--drop-cold-experts: the model routes {n_used} experts per token only, each carries much of "
            "the output: measure the loss (python -m bmoe perplexity)"
        )
    streamer.drop_cold(threshold)


def _need_slots(flag: str, opened: OpenCache) -> None:
    if not opened.index.n_slots:
        raise UsageError(
            f"{flag} needs a cache, and {opened.decision.budget >> 20} MiB hold no expert: give a larger --cache-mb"
        )


class CacheState:
    """The state file of a warm start: read when an engine opens, written again when it closes.

    `preloader` reads ahead what the file names, None where it names nothing.
    """

    def __init__(self, path: Path, model: dict[str, Any], streamer: Streamer, note: Callable[[str], None]) -> None:
        self._path, self._model, self._streamer = path, model, streamer
        self._old: warm_start.Counts | None = None
        self.preloader: warm_start.Preloader | None = None
        streamer.count_uses()
        try:
            self._old = warm_start.read_state(path, model)
        except warm_start.StateError as e:
            note(f"--cache-state: {e}: ignored, and replaced at exit")

    @property
    def known(self) -> bool:
        """Whether the file says which experts to read."""
        return self._old is not None

    def preload(self, stack: ExitStack, lanes: Lanes, plan: SlotPlan) -> None:
        """Begins to read ahead through `lanes`, which are its own."""
        assert self._old is not None
        order = warm_start.by_frequency(self._old)
        self.preloader = warm_start.Preloader(self._streamer, lanes, order, plan.layer_class)
        stack.callback(self.preloader.stop)
        self.preloader.start()

    def save(self) -> str:
        """Writes what this run has used beside what was known; why it could not, one line, or ""."""
        counts = self._streamer.uses()
        if not any(map(any, counts)):
            return ""  # nothing was learned
        try:
            warm_start.write_state(self._path, self._model, warm_start.merge(self._old, counts))
        except OSError as e:
            return f"--cache-state: cannot write {self._path}: {e.strerror}"
        return ""
