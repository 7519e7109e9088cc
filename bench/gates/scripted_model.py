"""A tiny model whose routes follow from its tokens, and an engine with a number of slots to it.

What is routed, read and evicted along a script of tokens is the same on every machine, whatever its kernels round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bmoe
from bench.gates import scripts
from bench.models.tiny import write_tiny
from bmoe.experts import slots
from bmoe.experts.budget import CacheDecision, ModelSizes
from bmoe.gguf import file as gguf_file

LAYERS, EXPERTS, USED = 4, 16, 4
# Printable ASCII: 95 tokens, whose numbers and texts Python keeps anyway.
PROMPT = (32 + scripts.noise(48, seed=11, below=95)).tolist()
SCRIPT = (32 + scripts.loops(512, seed=12, below=95)).tolist()


def write_model(directory: Path, quant: str = "Q8_0", n_embd: int = 128) -> Path:
    """The scripted model."""
    return write_tiny(
        directory / "scripted.gguf",
        "qwen3moe",
        quant,
        n_layer=LAYERS,
        n_expert=EXPERTS,
        n_used=USED,
        n_embd=n_embd,
        n_ff=n_embd,
        scripted=True,
    )


@contextmanager
def open_engine(path: Path, n_slots: int | None, **settings: Any) -> Iterator[bmoe.Engine]:
    """An engine with `n_slots` slots for experts (None: one for each), whatever memory the machine has."""
    file = gguf_file.open_model_file(path)
    layers = gguf_file.expert_layers(file.tensors, [t.name for t in file.tensors])
    everything = slots.all_experts_bytes(layers)
    ring = slots.RING_AREAS * slots.ring_stride(layers)
    wanted = everything if n_slots is None else ring + n_slots * max(layer.slot_bytes for layer in layers)

    def decide(request: object, sizes: ModelSizes, *_: object) -> CacheDecision:
        # What the process itself holds is charged to the budget.
        return CacheDecision("fixed", wanted + sizes.experts - everything, sizes)

    settings = {"threads": 1, "ctx": 1024, "odirect": False, **settings}
    with bmoe.Engine.open(path, grant=decide, **settings) as engine:
        yield engine
