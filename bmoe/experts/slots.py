"""How a cache budget is cut into slots: pure policy, no I/O, no model.

Experts of one size share a class of slots. The budget is split over the classes in proportion to their
bytes, so that no layer starves another of a different size; a part of it is the ring of staging areas
through which batches stream the experts that they do not keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..gguf.file import ExpertLayer

RING_AREAS = 12
"""Staging areas beside a cache: three for each of four lanes, enough to keep the disk busy while one computes."""
RING_BYTES_NO_CACHE = 32 << 20
"""Staging without a cache: about what the reads of one layer of a 30B-A3B model take (8 experts x 3 slices)."""


@dataclass(frozen=True)
class SlotPlan:
    """Slots and ring for a budget. All sizes in bytes.

    `layer_class`: class of each layer. `class_slots`, `class_stride`: slots of each class and bytes of one.
    `quotas`: experts that one wide batch may admit, per layer. `class_spares`: slots of each class that the cache does
    not know, for what is read ahead.
    """

    layer_class: tuple[int, ...]
    class_slots: tuple[int, ...]
    class_stride: tuple[int, ...]
    quotas: tuple[int, ...]
    n_ring: int
    ring_stride: int
    class_spares: tuple[int, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """Memory of slots and spares."""
        per_class = zip(self.class_slots, self.class_spares, self.class_stride, strict=True)
        return sum((n + spares) * size for n, spares, size in per_class)

    @property
    def total_bytes(self) -> int:
        """Memory that the plan takes: slots and ring."""
        return self.slot_bytes + self.n_ring * self.ring_stride


def ring_stride(layers: Sequence[ExpertLayer]) -> int:
    """Bytes of a staging area: the largest slice of any layer as an aligned read brings it in."""
    return max((t.area for layer in layers for t in layer.tensors), default=0)


def all_experts_bytes(layers: Sequence[ExpertLayer]) -> int:
    """The budget with which every expert has a slot (and no more would be used)."""
    return sum(layer.n_expert * layer.slot_bytes for layer in layers) + RING_AREAS * ring_stride(layers)


def working_set_bytes(layers: Sequence[ExpertLayer], n_used: int) -> int:
    """The smallest budget that holds the routed experts of one token, `n_used` in each layer, and the ring."""
    classes = _classes(layers)
    need = sum(len(members) * min(n_used, layers[members[0]].n_expert) * size for size, members in classes)
    # Classes get shares in proportion to all their experts, so the tightest share decides.
    whole = sum(len(members) * layers[members[0]].n_expert * size for size, members in classes)
    for size, members in classes:
        share = len(members) * layers[members[0]].n_expert * size
        want = len(members) * min(n_used, layers[members[0]].n_expert) * size
        need = max(need, -(-want * whole // share)) if share else need
    return need + RING_AREAS * ring_stride(layers)


def smallest_bytes(layers: Sequence[ExpertLayer], n_used: int) -> int:
    """The smallest budget worth calling a cache: the ring and the `n_used` experts that a token routes in one layer."""
    one = max((min(n_used, layer.n_expert) * layer.slot_bytes for layer in layers), default=0)
    return min(one + RING_AREAS * ring_stride(layers), working_set_bytes(layers, n_used))


def _classes(layers: Sequence[ExpertLayer]) -> list[tuple[int, list[int]]]:
    by_size: dict[tuple[int, int], list[int]] = {}
    for i, layer in enumerate(layers):
        by_size.setdefault((layer.slot_bytes, layer.n_expert), []).append(i)
    return [(size, members) for (size, _), members in sorted(by_size.items())]


def plan_slots(
    layers: Sequence[ExpertLayer], budget: int, spare: int = RING_BYTES_NO_CACHE, read_ahead: int = 0
) -> SlotPlan:
    """Cuts `budget` bytes (0: no cache) into slots, a ring, and `read_ahead` spares of each class.

    There are no spares where all experts have a slot, or where they would leave less than they take themselves. Never
    plans more than the budget, except that without a cache the ring is what streaming needs: `spare` bytes, at least
    two areas.
    """
    stride = ring_stride(layers)
    classes = _classes(layers)
    layer_class = [0] * len(layers)
    for k, (_, members) in enumerate(classes):
        for i in members:
            layer_class[i] = k
    if not layers:
        return SlotPlan((), (), (), (), 0, 0)
    n_ring = RING_AREAS
    if budget < n_ring * stride + min(layer.slot_bytes for layer in layers):
        n_ring = max(2, min(max(budget, spare) // stride, 64))  # no slot fits beside the ring
        budget = 0
    else:
        budget -= n_ring * stride
    experts = [len(members) * layers[members[0]].n_expert for _, members in classes]
    sizes = [size for size, _ in classes]
    ahead = read_ahead * sum(sizes)
    spares = 0
    if budget < sum(n * size for n, size in zip(experts, sizes, strict=True)) and budget >= 2 * ahead:
        spares, budget = read_ahead, budget - ahead
    slots = share_out(experts, sizes, budget)
    quotas = [slots[k] // len(classes[k][1]) for k in layer_class]
    return SlotPlan(
        tuple(layer_class), tuple(slots), tuple(sizes), tuple(quotas), n_ring, stride, (spares,) * len(sizes)
    )


def share_out(experts: Sequence[int], sizes: Sequence[int], budget: int) -> list[int]:
    """Slots of each class for `budget` bytes, by its number of experts and the bytes of one.

    In proportion to the bytes of a class; what rounding leaves goes to the class that has got the least of its share.
    """
    whole = sum(n * size for n, size in zip(experts, sizes, strict=True))
    slots = [min(n, budget * n * size // whole // size) for n, size in zip(experts, sizes, strict=True)]
    left = budget - sum(n * size for n, size in zip(slots, sizes, strict=True))
    for k in sorted(range(len(slots)), key=lambda k: slots[k] / experts[k]):
        more = min(experts[k] - slots[k], left // sizes[k])
        slots[k] += more
        left -= more * sizes[k]
    return slots
