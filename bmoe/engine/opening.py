"""How a model is opened, part by part: for an engine, and for `inspect`, which asks what it would take.

Each part closes what it has made through the caller's ExitStack, in the reverse order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import llama
from ..errors import ModelError
from ..experts.weights import dense_runs
from ..gguf.file import ExpertLayer, ModelFile, Tensor, expert_layers, open_model_file
from ..host import _memory, memory
from ..llama.head import HeadContext, TargetRows
from ..speculation import mtp
from ..streamer import Lanes
from .config import EngineConfig
from .planning import ContextPlan, base_rss, expert_override, experts_used

# ---- the file -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A model file and what the settings make of it. `overrides`: keys that they replace; `n_heads`: the model's own
    heads that draft."""

    path: Path
    file: ModelFile
    overrides: dict[str, int]
    n_heads: int

    @property
    def n_used(self) -> int:
        """Experts that a token routes in a layer, the most of any layer."""
        return experts_used(self.file, self.overrides)

    def load(self, *, dry: bool = False) -> llama.Model:
        """Loads the model from its header alone. `dry`: its contexts only say what they would allocate."""
        file = self.file
        return llama.load_model(
            file.header, file.virtual_size, str(self.path), self.overrides, load_mtp=self.n_heads > 0, dry=dry
        )


def read_source(path: Path, config: EngineConfig) -> Source:
    """Reads the header at `path`. Raises ModelError, UsageError where settings do not go with the model."""
    file = open_model_file(path)
    overrides = expert_override(config, file)
    return Source(path, file, overrides, mtp.count_heads(file) if "mtp" in config.draft.types else 0)


class Overhead:
    """What this process holds for a model beside weights, context and cache, bytes: the interpreter, its libraries
    and the vocabulary. Made before the model is loaded, read after."""

    def __init__(self) -> None:
        self._base, self._before = base_rss(), memory.read_process_memory().rss

    def measure(self) -> int:
        _memory.trim_heap()
        return self._base + max(0, memory.read_process_memory().rss - self._before)


# ---- the tensors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """The tensors of a model, parted: the routed experts by layer, and all others."""

    layers: tuple[ExpertLayer, ...]
    dense: tuple[Tensor, ...]
    experts: tuple[Tensor, ...]

    @property
    def dense_bytes(self) -> int:
        """Memory that the dense ones take."""
        return sum(run.nbytes for run in dense_runs(self.dense))


def part_tensors(source: Source, loaded: Iterable[str]) -> Parts:
    """Parts the tensors that llama.cpp has `loaded`. Raises ModelError where the file does not have all of these."""
    names, file = set(loaded), source.file
    layers = expert_layers(file.tensors, names)
    in_layers = {t.name for layer in layers for t in layer.tensors}
    tensors = [t for t in file.tensors if t.name in names]
    if len(tensors) != len(names):
        odd = next(iter(names - {t.name for t in tensors}), "none")
        raise ModelError(f"{source.path}: llama.cpp made {len(names)} tensors, {len(tensors)} are in the file ({odd})")
    return Parts(
        layers,
        tuple(t for t in tensors if t.name not in in_layers),
        tuple(t for t in tensors if t.name in in_layers),
    )


def refused_direct(source: Source, layers: Iterable[ExpertLayer], lanes: Lanes) -> list[Path]:
    """Files that experts are in and that cannot be read past the page cache: tries a slice of each."""
    tensors = [t for layer in layers for t in layer.tensors]
    refused = []
    for i, path in enumerate(source.file.paths):
        t = next((t for t in tensors if t.file == i), None)
        if t is not None and not lanes.verify_direct(i, t.offset, min(t.nbytes, 1 << 16)):
            refused.append(path)
    return refused


def stream_layout(
    layers: Iterable[ExpertLayer], model: llama.Model
) -> list[tuple[list[tuple[int, int, int, int, int]], int]]:
    """The layers as `Streamer` takes them: tensor address, file, offset, bytes and place in a slot of each slice."""
    layout = []
    for layer in layers:
        area, parts = 0, []
        for t in layer.tensors:
            parts.append((model.tensors[t.name][0], t.file, t.offset, t.nbytes, area))
            area += t.area
        layout.append((parts, layer.n_expert))
    return layout


# ---- the contexts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contexts:
    """The target's context, and its own head's where that drafts. `rows`: the target's hidden rows, for the head.

    `buffers`: what all of it has allocated; `longest`: tokens of the longest draft that can be taken back.
    """

    target: llama.Context
    head: HeadContext | None
    rows: TargetRows | None
    buffers: llama.BufferSizes
    longest: int


def open_contexts(
    stack: ExitStack,
    model: llama.Model,
    shape: ContextPlan,
    n_heads: int,
    settings: Mapping[str, Any],
    *,
    guarded: bool = True,
) -> Contexts:
    """Opens the contexts of a model, or of a dry one, which only say what they would take.

    `settings`: threads and callbacks, the same for both; `guarded`: an allocation beyond the memory that is left is
    refused with an error instead of an OOM kill.
    """

    def room() -> int:
        return memory.read_memory_facts().available() if guarded else memory.UNLIMITED

    with memory.allocations_within(room()):
        target = llama.Context(
            model,
            n_ctx=shape.n_ctx,
            n_ubatch=shape.n_ubatch,
            n_outputs=shape.n_outputs,
            n_each=shape.n_each,
            n_snapshots=shape.n_snapshots,
            **settings,
        )
    stack.callback(target.close)
    # A recurrent state goes back only as far as its snapshots.
    longest = min(shape.longest, target.n_snapshots) if target.recurrent else shape.longest
    if not n_heads or not longest:
        return Contexts(target, None, None, target.buffers, longest)
    with memory.allocations_within(room()):
        head = HeadContext(model, n_heads=n_heads, n_ctx=shape.n_ctx, n_ubatch=shape.head_ubatch, **settings)
    stack.callback(head.close)
    rows = TargetRows(target)
    waiting = llama.BufferSizes(kv=0, recurrent=0, compute=rows.nbytes)
    return Contexts(target, head, rows, target.buffers + head.buffers + waiting, longest)
