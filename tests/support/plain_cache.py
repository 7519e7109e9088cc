"""The cache's policy in plain Python, which the compiled one is compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PlainCache:
    """The cache's policy in plain Python: least recently used within a class of slots.

    `layer_class`, `class_slots` as for ExpertCache; `quotas`: experts that a wide batch admits, per layer.
    """

    def __init__(
        self, layer_class: Sequence[int], class_slots: Sequence[int], quotas: Sequence[int] | None = None
    ) -> None:
        self.layer_class, self.class_slots, self.quotas = layer_class, class_slots, quotas
        # Least recently used first.
        self.slots: list[OrderedDict[tuple[int, int], None]] = [OrderedDict() for _ in class_slots]
        self.seen: set[tuple[int, int]] = set()
        self.hits = self.misses = self.evictions = self.rereads = self.streamed = 0

    def batch(self, layer: int, tokens: Iterable[Iterable[int]]) -> tuple[list[int], list[int]]:
        """One layer's routed experts, token by token; the hits and the misses, latest token's first."""
        rows = [list(token) for token in tokens]
        experts = list(dict.fromkeys(e for row in reversed(rows) for e in row))
        n_keep = len(experts)
        if self.quotas is not None and len(rows) > 1:
            n_keep = min(n_keep, self.quotas[layer])
        kind = self.layer_class[layer]
        slots = self.slots[kind]
        hits = [e for e in experts if (layer, e) in slots]
        misses = [e for e in experts if (layer, e) not in slots]
        pinned = {(layer, e) for e in hits}
        kept = experts[:n_keep]
        self._touch(slots, layer, [e for e in kept if e in hits])
        for e in misses:
            self.rereads += (layer, e) in self.seen
            self.seen.add((layer, e))
            if e in kept and self._make_room(slots, kind, pinned):
                slots[layer, e] = None
                pinned.add((layer, e))
            else:
                self.streamed += 1
        self._touch(slots, layer, [e for e in kept if (layer, e) in slots])
        self.hits += len(hits)
        self.misses += len(misses)
        return hits, misses

    def _touch(self, slots: OrderedDict[tuple[int, int], None], layer: int, experts: list[int]) -> None:
        for e in reversed(experts):
            slots.move_to_end((layer, e))

    def _make_room(self, slots: OrderedDict[tuple[int, int], None], kind: int, pinned: set[tuple[int, int]]) -> bool:
        if len(slots) < self.class_slots[kind]:
            return True
        victim = next((key for key in slots if key not in pinned), None)
        if victim is None:
            return False
        del slots[victim]
        self.evictions += 1
        return True

    def clear(self) -> None:
        """Forgets every resident expert; counters stay."""
        for slots in self.slots:
            slots.clear()

    def resident(self, layer: int) -> list[int]:
        """Experts of `layer` that have a slot, ascending."""
        return sorted(e for la, e in self.slots[self.layer_class[layer]] if la == layer)
