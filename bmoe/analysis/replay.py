"""A route trace through the engine's own cache policy: the same compiled code, without weights.

With the slots of the run that wrote a trace the replay has exactly its hits and misses; with others it says what that
budget would have given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..experts.slots import share_out
from ..streamer import ExpertCache
from .route_trace import RoutedBatch, RouteTrace
from .table import TableError

POLICIES = ("votes", "lru")


@dataclass
class ReplayCounts:
    """What a replay counted, in experts of a layer's batch, each once; `read` in bytes.

    `hits` and `looked`: by turn and phase (0 prefill, 1 decode). `evictions`, `rereads` as the engine counts them.
    """

    hits: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    looked: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    read: int = 0
    evictions: int = 0
    rereads: int = 0

    def rate(self, phase: int | None = None, turn: int | None = None) -> float | None:
        """Share of lookups that hit, 0..1, of a phase and a turn or of all; None where there were none."""
        hits, looked = self.count(phase, turn)
        return hits / looked if looked else None

    def count(self, phase: int | None = None, turn: int | None = None) -> tuple[int, int]:
        """Hits and lookups of a phase and a turn, or of all."""
        keys = [k for k in self.looked if turn in (None, k[0]) and phase in (None, k[1])]
        return sum(self.hits[k] for k in keys), sum(self.looked[k] for k in keys)


class CacheReplay:
    """An engine's cache without weights, for the batches of one trace.

    `layer_class`, `slots`, `quotas` as in `slots.SlotPlan`, layers in ascending order. `n_used`: experts that a token
    routes in a layer.
    """

    def __init__(
        self,
        trace: RouteTrace,
        layer_class: Sequence[int],
        slots: Sequence[int],
        quotas: Sequence[int],
        policy: str,
        n_used: int,
        n_expert: Sequence[int],
    ) -> None:
        self.trace = trace
        self.layers = sorted(trace.expert_bytes)
        self.index = {layer: i for i, layer in enumerate(self.layers)}
        self.classes, self.quotas = list(layer_class), list(quotas)
        self.cache = ExpertCache(list(n_expert), self.classes, list(slots), policy, max(1, min(n_used, 255)))
        self.epoch = 0
        self.counts = ReplayCounts()
        self._held: dict[int, list[int]] = defaultdict(list)

    @classmethod
    def recorded(cls, trace: RouteTrace) -> CacheReplay:
        """The cache of the run that wrote the trace. Raises TableError where its preamble does not tell."""
        try:
            order = sorted(trace.expert_bytes)
            facts = [trace.layers[layer] for layer in order]
            slots = [int(n) for n in trace.header["slots"].split(",")]
            classes, quotas, experts = ([int(f[key]) for f in facts] for key in ("class", "quota", "n_expert"))
            policy, n_used = trace.header["policy"], int(trace.header["n_expert_used"])
            return cls(trace, classes, slots, quotas, policy, n_used, experts)
        except (KeyError, ValueError) as e:
            what = f"has no {e}" if isinstance(e, KeyError) else f"does not fit together: {e}"
            raise TableError(f"{trace.path}: the preamble {what}: the cache of its run is not known") from None

    @classmethod
    def of_budget(cls, trace: RouteTrace, budget: int, policy: str) -> CacheReplay:
        """Slots cut from `budget` bytes as the engine cuts them, by the bytes of the experts."""
        order = sorted(trace.expert_bytes)
        sizes = sorted(set(trace.expert_bytes.values()))
        classes = [sizes.index(trace.expert_bytes[layer]) for layer in order]
        members = [classes.count(k) for k in range(len(sizes))]
        slots = share_out([n * trace.n_expert for n in members], sizes, budget)
        used = max(len(row) for b in trace.batches() for row in b.rows)
        quotas = [slots[k] // members[k] for k in classes]
        return cls(trace, classes, slots, quotas, policy, used, [trace.n_expert] * len(order))

    def run(self) -> ReplayCounts:
        """Routes the whole trace through the cache."""
        told = self.trace.events is not None
        for batch in self.trace.batches():
            if not told:
                self.cache.prompt(0 if batch.prefill else -1)
            for event in batch.events:
                self._event(event)
            self._route(batch)
        _, _, self.counts.evictions, self.counts.rereads = self.cache.counters()
        return self.counts

    def _route(self, batch: RoutedBatch) -> None:
        layer = self.index[batch.layer]
        hits, misses = self.cache.route(layer, batch.rows, self.epoch, self.quotas[layer], batch.routed)
        self.epoch += 1
        key = batch.turn, batch.phase
        self.counts.hits[key] += len(hits)
        self.counts.looked[key] += len(hits) + len(misses)
        self.counts.read += len(misses) * self.trace.expert_bytes[batch.layer]

    def _event(self, event: str) -> None:
        try:
            name, *rest = event.split(":")
            numbers = [int(n) for n in rest]
            if name == "left":
                self.cache.prompt(numbers[0])
            elif name == "reject":
                self.cache.reject(numbers[0])
            elif name == "clear":
                self.cache.clear()
            else:
                self._expert_event(name, self.index[numbers[0]], *numbers[1:])
        except (IndexError, KeyError, TypeError, ValueError):
            raise TableError(f"{self.trace.path}: event {event[:40]!r} is not one that bmoe writes") from None

    def _expert_event(self, name: str, layer: int, expert: int = -1) -> None:
        held = self._held[self.classes[layer]]
        if name in ("forget", "load", "warm") and expert < 0:
            raise ValueError(name)
        if name == "forget":
            self.cache.forget(layer, expert)
            return
        if name in ("hold", "load"):
            # Without an empty slot, as another budget may have it, nothing is read ahead.
            slot = self.cache.hold(layer)
            if slot >= 0:
                held.append(slot)
            elif name == "load":
                return
        if name == "hold":
            return
        if name in ("warm", "load"):
            if held:
                self.cache.fill(layer, expert, held.pop())
        elif name == "release":
            if held:
                self.cache.release(layer, held.pop())
        else:
            raise ValueError(name)
