"""What a model is and what it would take, from its header alone: nothing of it is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .. import llama
from ..engine.config import EngineConfig
from ..engine.opening import Overhead, open_contexts, part_tensors, read_source
from ..engine.planning import ContextPlan, cache_sizes, context_plan, spare_bytes
from ..errors import MemoryBudgetError
from ..experts import slots
from ..experts.budget import CacheDecision, CacheRequest, MiB, ModelSizes, advice, decide
from ..gguf.file import ExpertLayer, ModelFile, Tensor, expert_layers
from ..host import memory


@dataclass(frozen=True)
class Head:
    """The model's own multi-token-prediction heads: bytes of their weights, `token` of the experts one pass routes."""

    n: int
    dense: int
    experts: int
    token: int
    loaded: bool


@dataclass(frozen=True)
class Inspection:
    """Facts of one model file under one configuration. Sizes in bytes.

    `n_layers`: without heads; `file_bytes`: of all files; `dense`: the weights that stay in memory; `expert_bytes`: the
    routed experts as the file stores them; `token_bytes`: what one token routes of them; `quants`: bytes by type, the
    largest first.
    `decision`: the cache that a run would get; None for a dense model, and where a run would be `refused`, in its
    own words. `advice`: what a run would say about it. `overhead`: what the process holds besides.
    """

    file: ModelFile
    config: EngineConfig
    n_layers: int
    layers: tuple[ExpertLayer, ...]
    n_used: int
    n_shared: int
    file_bytes: int
    dense: int
    expert_bytes: int
    token_bytes: int
    quants: dict[str, int]
    shape: ContextPlan
    buffers: llama.BufferSizes
    sizes: ModelSizes
    overhead: int
    facts: memory.MemoryFacts
    head: Head | None
    decision: CacheDecision | None
    refused: str = ""
    advice: str = ""

    @property
    def n_expert(self) -> int:
        """Routed experts of a layer, the most of any."""
        return max((layer.n_expert for layer in self.layers), default=0)

    @property
    def expert_range(self) -> tuple[int, int]:
        """Bytes of the smallest and the largest expert."""
        sizes = [layer.expert_bytes for layer in self.layers] or [0]
        return min(sizes), max(sizes)

    def share(self, budget: int) -> float:
        """The part of all experts that has a slot with `budget` bytes."""
        spare = spare_bytes(self.overhead)
        plan = slots.plan_slots(self.layers, max(0, budget - max(0, -spare)), max(0, spare))
        return sum(plan.class_slots) / sum(layer.n_expert for layer in self.layers)

    def budget_of(self, share: float) -> int:
        """The budget with which `share` of the experts has a slot, in whole MiB."""
        return -(-(self.sizes.ring + int(share * (self.sizes.experts - self.sizes.ring))) // MiB) * MiB

    def fits(self, budget: int) -> bool:
        """Whether --cache-mb would grant `budget` bytes here."""
        try:
            decide(CacheRequest("fixed", -(-budget // MiB), force=True), self.sizes, self.facts)
        except MemoryBudgetError:
            return False
        return True


def inspect_model(path: Path, config: EngineConfig) -> Inspection:
    """Reads the header at `path` and asks llama.cpp what a context of it takes, without allocating that.

    Raises ModelError for a file that cannot be run, UsageError for settings that do not go with it.
    """
    llama.check()
    source, held = read_source(path, config), Overhead()
    file, n_used = source.file, source.n_used
    with ExitStack() as stack:
        model = source.load()
        names = set(model.tensors)
        model.close()
        model = source.load(dry=True)
        stack.callback(model.close)
        overhead = held.measure()
        shape = context_plan(config, file, model.n_vocab)
        settings = {"n_threads": config.n_threads()}
        buffers = open_contexts(stack, model, shape, source.n_heads, settings, guarded=False).buffers
    parts = part_tensors(source, names)
    layers, dense = parts.layers, parts.dense_bytes
    sizes = cache_sizes(layers, n_used, dense, buffers, overhead)
    decision, refused, facts = None, "", memory.read_memory_facts()
    if layers:
        try:
            decision = decide(config.cache_request(), sizes, facts)
        except MemoryBudgetError as e:
            refused = str(e)
    return Inspection(
        file=file,
        config=config,
        n_layers=file.number("block_count") - file.number("nextn_predict_layers"),
        layers=layers,
        n_used=n_used,
        n_shared=_shared(file),
        file_bytes=sum(p.stat().st_size for p in file.paths),
        dense=dense,
        expert_bytes=sum(layer.n_expert * layer.expert_bytes for layer in layers),
        token_bytes=routed_bytes(layers, n_used),
        quants=quantizations(file.tensors),
        shape=shape,
        buffers=buffers,
        sizes=sizes,
        overhead=overhead,
        facts=facts,
        head=_head(file, n_used, source.n_heads > 0),
        decision=decision,
        refused=refused,
        advice=advice(decision, config.policy) if decision is not None else "",
    )


def routed_bytes(layers: Iterable[ExpertLayer], n_used: int) -> int:
    """Bytes of the experts that one token routes, `n_used` in each layer."""
    return sum(min(n_used, layer.n_expert) * layer.expert_bytes for layer in layers)


def quantizations(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes by the name of the type, the largest first."""
    found: dict[str, int] = {}
    for t in tensors:
        name = llama.type_name(t.type)
        found[name] = found.get(name, 0) + t.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _shared(file: ModelFile) -> int:
    """Experts that every token uses, which are dense weights: by the key, or by a tensor that is one."""
    count = file.number("expert_shared_count")
    return count or int(any("_shexp.weight" in t.name for t in file.tensors))


def _head(file: ModelFile, n_used: int, loaded: bool) -> Head | None:
    """The heads in the file, loaded or not."""
    n = file.number("nextn_predict_layers")
    first = file.number("block_count") - n
    blocks = tuple(f"blk.{first + i}." for i in range(n))
    tensors = [t for t in file.tensors if blocks and t.name.startswith(blocks)]
    if not tensors:
        return None
    layers = expert_layers(tensors, [t.name for t in tensors])
    experts = sum(layer.n_expert * layer.expert_bytes for layer in layers)
    return Head(n, sum(t.nbytes for t in tensors) - experts, experts, routed_bytes(layers, n_used), loaded)
