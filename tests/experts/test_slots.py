"""How a budget is cut into slots, on layers of any size."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bmoe.experts.slots import RING_AREAS, SlotPlan, all_experts_bytes, plan_slots, ring_stride, working_set_bytes
from bmoe.gguf.file import PAGE, ExpertLayer, ExpertTensor, Tensor, expert_layers

MiB = 1 << 20


def layer(block: int, n_expert: int, sizes: list[int], offset: int = 0) -> ExpertLayer:
    tensors = []
    for i, nbytes in enumerate(sizes):
        tensors.append(ExpertTensor(f"blk.{block}.ffn_{i}_exps.weight", 0, offset, nbytes, n_expert))
        offset += n_expert * nbytes
    return ExpertLayer(f"blk.{block}", n_expert, tuple(tensors))


@st.composite
def models(draw: st.DrawFn) -> list[ExpertLayer]:
    """Layers of up to three kinds, as a model mixes quantizations from layer to layer."""
    kinds = draw(
        st.lists(
            st.tuples(st.integers(1, 64), st.lists(st.integers(1, 3 * MiB), min_size=1, max_size=4)),
            min_size=1,
            max_size=3,
        )
    )
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12))
    offset = draw(st.sampled_from([0, 32, PAGE, PAGE + 64]))
    return [layer(i, n, sizes, offset) for i, (n, sizes) in enumerate(chosen)]


def members(plan: SlotPlan, k: int) -> list[int]:
    return [i for i, c in enumerate(plan.layer_class) if c == k]


def check_shape(layers: list[ExpertLayer], plan: SlotPlan) -> None:
    """What holds for every plan."""
    assert plan.n_ring >= 2
    assert plan.ring_stride == ring_stride(layers)
    assert plan.total_bytes == plan.slot_bytes + plan.n_ring * plan.ring_stride
    for i, x in enumerate(layers):
        k = plan.layer_class[i]
        assert plan.class_stride[k] == x.slot_bytes
        assert {layers[j].n_expert for j in members(plan, k)} == {x.n_expert}
        assert 0 <= plan.quotas[i] <= x.n_expert
    for k, n in enumerate(plan.class_slots):
        assert 0 <= n <= sum(layers[i].n_expert for i in members(plan, k))
        # What all its layers may admit at once is there.
        assert sum(plan.quotas[i] for i in members(plan, k)) <= n


@given(models(), st.integers(0, 200 * MiB), st.sampled_from([0, 4 * MiB, 32 * MiB]))
def test_a_plan_keeps_to_its_budget(layers: list[ExpertLayer], budget: int, spare: int) -> None:
    plan = plan_slots(layers, budget, spare)
    check_shape(layers, plan)
    stride = plan.ring_stride
    if budget < RING_AREAS * stride + min(plan.class_stride):
        # No cache: the ring takes what it needs.
        assert sum(plan.class_slots) == 0
        assert plan.total_bytes <= max(budget, spare, 2 * stride)
    else:
        assert plan.n_ring == RING_AREAS
        assert plan.total_bytes <= budget
        # Nothing that would hold another expert is left over.
        left = budget - plan.total_bytes
        for k, n in enumerate(plan.class_slots):
            full = n == sum(layers[i].n_expert for i in members(plan, k))
            assert full or left < plan.class_stride[k]


@given(models())
@example([layer(0, 2, [4096, 4096])])
def test_the_whole_is_what_holds_every_expert(layers: list[ExpertLayer]) -> None:
    budget = all_experts_bytes(layers)
    plan = plan_slots(layers, budget, 0)
    assert sum(plan.class_slots) == sum(x.n_expert for x in layers)
    assert list(plan.quotas) == [x.n_expert for x in layers]
    assert plan.total_bytes <= budget
    # And no byte of it is too many.
    assert sum(plan_slots(layers, budget - 1, 0).class_slots) < sum(plan.class_slots)


@given(models(), st.integers(1, 16))
@example([layer(0, 8, [4096, 4096])], 1)
def test_the_working_set_is_what_holds_one_token(layers: list[ExpertLayer], n_used: int) -> None:
    budget = working_set_bytes(layers, n_used)
    plan = plan_slots(layers, budget, 0)
    check_shape(layers, plan)
    for k, n in enumerate(plan.class_slots):
        assert n >= sum(min(n_used, layers[i].n_expert) for i in members(plan, k))
    assert all(q >= min(n_used, x.n_expert) for q, x in zip(plan.quotas, layers, strict=True))
    assert budget <= all_experts_bytes(layers)


@given(st.integers(0, 3 * PAGE), st.integers(1, 5 * PAGE), st.integers(1, 40))
def test_an_area_holds_any_slice_as_it_is_read(offset: int, nbytes: int, n_expert: int) -> None:
    """Reads start and end on pages; whatever a slice's place in the file, its window fits."""
    area = ExpertTensor("t", 0, offset, nbytes, n_expert).area
    assert area % PAGE == 0
    windows = []
    for e in range(n_expert):
        start = offset + e * nbytes
        first = start // PAGE * PAGE
        windows.append(-(-(start + nbytes - first) // PAGE) * PAGE)
    assert max(windows) <= area <= max(windows) + PAGE


def test_without_a_cache_the_ring_is_what_is_spare() -> None:
    layers = [layer(i, 128, [884_736, 884_736, 1_290_240]) for i in range(12)]
    stride = ring_stride(layers)
    plan = plan_slots(layers, 0)
    assert (sum(plan.class_slots), plan.quotas) == (0, (0,) * 12)
    assert plan.n_ring == 32 * MiB // stride
    assert plan_slots(layers, 0, 0).n_ring == 2
    assert plan_slots(layers, 0, 1 << 40).n_ring == 64


def test_sizes_share_in_proportion() -> None:
    """Half the layers are twice as large: each kind keeps the same part of its experts."""
    layers = [layer(i, 64, [(1 + i % 2) * 256 * 1024] * 3) for i in range(8)]
    plan = plan_slots(layers, 200 * MiB)
    parts = [n / (4 * 64) for n in plan.class_slots]
    assert parts[0] == pytest.approx(parts[1], abs=0.02)
    assert 0.3 < parts[0] < 0.6


def test_no_layers_need_nothing() -> None:
    assert plan_slots([], 1 << 30).total_bytes == 0
    assert (ring_stride([]), all_experts_bytes([]), working_set_bytes([], 8)) == (0, 0, 0)


def test_experts_are_found_by_name_and_shape() -> None:
    def tensor(name: str, shape: tuple[int, int, int, int], offset: int = 0, file: int = 0) -> Tensor:
        return Tensor(name, 0, shape, file, offset, 4 * shape[0] * shape[1] * shape[2] * shape[3])

    tensors = [
        tensor("blk.0.ffn_gate_exps.weight", (8, 4, 16, 1), 32),
        tensor("blk.0.ffn_down_exps.weight", (4, 8, 16, 1), 4096, 1),
        tensor("blk.0.ffn_gate_exps.bias", (4, 16, 1, 1)),
        tensor("blk.0.ffn_gate_shexp.weight", (8, 4, 1, 1)),
        tensor("blk.0.ffn_gate.weight", (8, 4, 16, 1)),
        tensor("blk.1.ffn_up_exps.weight", (8, 4, 1, 1)),
        tensor("blk.2.ffn_gate_up_exps.weight", (8, 8, 16, 1)),
        tensor("blk.3.ffn_gate_exps.weight", (8, 4, 16, 1)),
    ]
    loaded = [t.name for t in tensors if not t.name.startswith("blk.3")]
    found = expert_layers(tensors, loaded)
    assert [(x.block, x.n_expert, len(x.tensors)) for x in found] == [("blk.0", 16, 2), ("blk.2", 16, 1)]
    gate, down = found[0].tensors
    assert (gate.file, gate.offset, gate.nbytes) == (0, 32, 128)
    assert (down.file, down.offset, down.nbytes) == (1, 4096, 128)
    assert found[0].expert_bytes == 256
    assert Path(gate.name).suffix == ".weight"
