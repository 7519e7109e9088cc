"""Policies that replays compare the engine's with, in plain Python, by the rules of the shared curves.

A batch looks each of its experts up once, in the order of their last row; eviction runs after the batch and
spares what the batch touched. The budget is in bytes, for all experts alike: no slots, no size classes. Where it
is cut into equal shares of the layers, a layer whose share is smaller than what it routes holds more than its
share until it comes round again, since the batch is spared: `Replay.held_bytes` tells.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from bmoe.analysis.route_trace import RoutedBatch, RouteTrace

Key = tuple[int, int]
"""A layer and an expert."""


@dataclass
class Replay:
    """What a replay counted, by phase (prefill, decode); `read`, and `held_bytes`, resident at the end, in bytes."""

    looked: list[int]
    hits: list[int]
    read: int = 0
    held_bytes: int = 0

    @property
    def decode_pct(self) -> float:
        return 100 * self.hits[1] / self.looked[1] if self.looked[1] else 0.0

    @property
    def all_pct(self) -> float:
        return 100 * sum(self.hits) / sum(self.looked)


class Policy:
    """Who is given up: the resident expert with the least `rank`."""

    layered = False
    """True: the budget is cut into equal shares of the layers."""

    def __init__(self, batches: list[RoutedBatch]) -> None:
        self.clock = 0
        self.level = 0.0  # rank of the last that was given up

    def use(self, key: Key, batch: int) -> None:
        """An expert is used by the `batch`-th batch."""
        self.clock += 1

    def rank(self, key: Key, batch: int) -> tuple[float, float]:
        """Its rank from now on until it is used again."""
        raise NotImplementedError


class Lru(Policy):
    """Least recently used."""

    def rank(self, key: Key, batch: int) -> tuple[float, float]:
        return self.clock, 0


class Lfu(Policy):
    """Least often used since the start; of equals, the least recently used."""

    def __init__(self, batches: list[RoutedBatch]) -> None:
        super().__init__(batches)
        self.uses: dict[Key, int] = defaultdict(int)

    def use(self, key: Key, batch: int) -> None:
        super().use(key, batch)
        self.uses[key] += 1

    def rank(self, key: Key, batch: int) -> tuple[float, float]:
        return self.uses[key], self.clock


class Layer(Lru):
    """Least recently used within a share of each layer."""

    layered = True


class LayerLfu(Lfu):
    """Least often used within a share of each layer."""

    layered = True


class Random(Policy):
    """Any, by a fixed seed: where it comes in, it gets a place in a random order, and keeps it."""

    def __init__(self, batches: list[RoutedBatch]) -> None:
        super().__init__(batches)
        self.random = random.Random(0)

    def rank(self, key: Key, batch: int) -> tuple[float, float]:
        # Exponential lifetimes from the last one given up on have no memory: each is as likely as any other.
        return self.level + self.random.expovariate(1.0), 0


class Belady(Policy):
    """The one whose next use is farthest away, which no policy can know: the bound."""

    def __init__(self, batches: list[RoutedBatch]) -> None:
        super().__init__(batches)
        self.uses: dict[Key, list[int]] = defaultdict(list)
        for i, b in enumerate(batches):
            for e in b.distinct():
                self.uses[b.layer, e].append(i)

    def rank(self, key: Key, batch: int) -> tuple[float, float]:
        uses = self.uses[key]
        at = bisect_right(uses, batch)
        return (-uses[at] if at < len(uses) else float("-inf")), 0


POLICIES: dict[str, Callable[[list[RoutedBatch]], Policy]] = {
    "belady": Belady,
    "lru": Lru,
    "lfu": Lfu,
    "random": Random,
    "layer": Layer,
    "layerlfu": LayerLfu,
}


def replay(trace: RouteTrace, budget: int, name: str) -> Replay:
    """Replays `trace` through the policy of that name with `budget` bytes."""
    batches = list(trace.batches())
    policy = POLICIES[name](batches)
    share = budget // len(trace.expert_bytes) if policy.layered else budget
    # One heap for each share: (rank, key); entries of an older rank are passed over.
    heaps: dict[int, list[tuple[tuple[float, float], Key]]] = defaultdict(list)
    ranks: dict[Key, tuple[float, float]] = {}
    used: dict[int, int] = defaultdict(int)
    held = 0
    out = Replay([0, 0], [0, 0])
    for i, b in enumerate(batches):
        pool = b.layer if policy.layered else -1
        size = trace.expert_bytes[b.layer]
        # The order of the last row, the last row last.
        experts = list(dict.fromkeys(e for row in reversed(b.rows) for e in reversed(row)))[::-1]
        out.looked[b.phase] += len(experts)
        for e in experts:
            key = (b.layer, e)
            policy.use(key, i)
            if key in ranks:
                out.hits[b.phase] += 1
            else:
                out.read += size
                used[pool] += size
                held += size
            ranks[key] = policy.rank(key, i)
            heapq.heappush(heaps[pool], (ranks[key], key))
        spared = {(b.layer, e) for e in experts}
        put_back = []
        heap = heaps[pool]
        while used[pool] > share and heap:
            rank, key = heapq.heappop(heap)
            if ranks.get(key) != rank:
                continue
            if key in spared:
                put_back.append((rank, key))
                continue
            del ranks[key]
            policy.level = rank[0]
            used[pool] -= trace.expert_bytes[key[0]]
            held -= trace.expert_bytes[key[0]]
        for entry in put_back:
            heapq.heappush(heap, entry)
    out.held_bytes = held
    return out
