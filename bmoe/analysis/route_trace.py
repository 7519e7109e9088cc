"""Route traces: which experts each token was routed to, as a CSV file with a preamble, gzipped or not.

Lines that start with `#` are the preamble: `key=value` pairs of the whole trace (`model`, `arch`, `n_layer`,
`n_expert`, `n_expert_used`) and a line for each layer with routed experts (`layer=3 expert_bytes=3059712 ...`).
Then comes a line of column names and a row for each routed expert; columns are found by name, so others may be
there. Pure reading: no model, no cache. docs/traces.md has the columns that bmoe writes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .table import Parse, Table, TableError, number, whole_numbers

PREFILL, DECODE = 0, 1
"""Values of the column `phase`."""

_REQUIRED = ("turn", "phase", "step", "layer", "slot", "expert")
_OPTIONAL = ("residency", "expert_bytes", "dropped", "batch")
_OTHERS: dict[str, Parse] = {"weight": number, "events": str}

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RoutedBatch:
    """What one layer routed in one batch: `rows[i]` are the experts of its i-th token, as the router ranked them.

    `layer` is the layer's number in the model, as the trace has it. Experts that were dropped are left out;
    `routed` has them, where there are any. `events`: what happened to the cache before it.
    """

    turn: int
    phase: int
    step: int
    layer: int
    rows: tuple[tuple[int, ...], ...]
    events: tuple[str, ...] = ()
    routed: tuple[tuple[int, ...], ...] | None = None

    @property
    def prefill(self) -> bool:
        return self.phase == PREFILL

    def distinct(self) -> list[int]:
        """Its experts in the order of their first row, each once."""
        return list(dict.fromkeys(e for row in self.rows for e in row))


@dataclass(frozen=True)
class RouteTrace:
    """One trace. `header`: the preamble's pairs; `expert_bytes`, `n_expert`: of each layer with routed experts.

    `columns`: int64 arrays, one value for each row (`turn`, `phase`, `step`, `layer`, `slot`, `expert`, and
    `residency`, `expert_bytes`, `dropped`, `batch` where the file has them); `weights`: router weights, float64, NaN
    where one is not known, or None. `layers`: all pairs of the preamble's line of a layer. `events`: what happened to
    the cache before a row, by the row's number; None where the file does not tell.
    """

    path: Path
    header: Mapping[str, str]
    expert_bytes: Mapping[int, int]
    n_expert: int
    columns: Mapping[str, IntArray]
    weights: npt.NDArray[np.float64] | None = field(default=None, repr=False)
    layers: Mapping[int, Mapping[str, str]] = field(default_factory=dict, repr=False)
    events: Mapping[int, str] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The file's name without its endings: `qwen` for `qwen.route.csv.gz`."""
        return self.path.name.split(".")[0]

    def __len__(self) -> int:
        """Rows: routed (token, layer, expert) triples."""
        return len(self.columns["expert"])

    def batches(self) -> Iterator[RoutedBatch]:
        """The batches in the order of the trace.

        Those of one number, where the file numbers them. Else, prefill: the rows of one layer that follow each other,
        all tokens; decode: those of one step and layer.
        """
        c = self.columns
        turn, phase, step, layer, expert = (c[k] for k in ("turn", "phase", "step", "layer", "expert"))
        if not len(expert):
            return
        slot = c["slot"]
        new_batch = (np.diff(turn) != 0) | (np.diff(phase) != 0) | (np.diff(layer) != 0)
        new_batch |= (np.diff(step) != 0) & (phase[1:] != PREFILL)
        if "batch" in c:
            new_batch = np.diff(c["batch"]) != 0
        kept = c["dropped"] == 0 if "dropped" in c else np.ones(len(expert), bool)
        whole = bool(kept.all())
        starts = [0, *(np.flatnonzero(new_batch) + 1).tolist(), len(expert)]
        # Within a batch a token's rows have ascending slots.
        new_row = set((np.flatnonzero((np.diff(step) != 0) | (np.diff(slot) <= 0)) + 1).tolist())
        experts = expert.tolist()
        for a, b in itertools.pairwise(starts):
            cuts = [a, *(i for i in range(a + 1, b) if i in new_row), b]
            rows = tuple(tuple(experts[i:j]) for i, j in itertools.pairwise(cuts))
            routed = None
            if not whole and not kept[a:b].all():
                routed = rows
                rows = tuple(tuple(expert[i:j][kept[i:j]].tolist()) for i, j in itertools.pairwise(cuts))
            events = tuple(self.events.get(a, "").split()) if self.events else ()
            yield RoutedBatch(int(turn[a]), int(phase[a]), int(step[a]), int(layer[a]), rows, events, routed)


def read_trace(path: str | os.PathLike[str]) -> RouteTrace:
    """Reads a route trace, gzipped or not (told by its first bytes).

    Raises TableError with one line for a file that is missing, damaged, cut off or not a route trace.
    """
    table = Table(Path(path), "a route trace")
    header: dict[str, str] = {}
    layers: dict[int, dict[str, str]] = {}
    expert_bytes: dict[int, int] = {}
    for line_number, line in table.preamble():
        pairs = dict(word.split("=", 1) for word in line.lstrip("#").split() if "=" in word)
        if "layer" not in pairs:
            header.update(pairs)
            continue
        where = table.where(line_number)
        layer = _whole(pairs, "layer", where)
        if "expert_bytes" not in pairs:
            raise TableError(f"{where}: the line of layer {layer} has no expert_bytes")
        layers[layer], expert_bytes[layer] = pairs, _whole(pairs, "expert_bytes", where)
        if not expert_bytes[layer]:
            raise TableError(f"{where}: expert_bytes of layer {layer} is 0")
    table.need(_REQUIRED)
    if not expert_bytes:
        raise TableError(f"{table.path}: the preamble has no line 'layer=N expert_bytes=N': sizes are unknown")
    whole = whole_numbers()
    parsers: dict[str, Parse] = {name: whole for name in (*_REQUIRED, *_OPTIONAL) if name in table.names}
    values = table.columns(parsers | {name: p for name, p in _OTHERS.items() if name in table.names})
    columns = {name: np.array(values[name], np.int64) for name in parsers}
    weights = np.array(values["weight"], np.float64) if "weight" in values else None
    events = {i: e for i, e in enumerate(values["events"]) if e} if "events" in values else None
    n_expert = _whole(header, "n_expert", str(table.path)) if "n_expert" in header else 0
    _check(table.path, columns, expert_bytes, n_expert)
    n_expert = n_expert or int(columns["expert"].max()) + 1
    return RouteTrace(table.path, header, expert_bytes, n_expert, columns, weights, layers, events)


def _whole(pairs: Mapping[str, str], name: str, where: str) -> int:
    try:
        return int(whole_numbers()(pairs[name]))
    except ValueError as e:
        raise TableError(f"{where}: {name} {pairs[name][:40]!r} {e}") from None


def _check(path: Path, columns: Mapping[str, IntArray], expert_bytes: Mapping[int, int], n_expert: int) -> None:
    unknown = sorted(set(np.unique(columns["layer"]).tolist()) - expert_bytes.keys())
    if unknown:
        raise TableError(f"{path}: rows of layer {unknown[0]}, which the preamble does not have")
    most = int(columns["expert"].max())
    if n_expert and most >= n_expert:
        raise TableError(f"{path}: expert {most} of n_expert={n_expert}")
    if most >= 1 << 20:
        raise TableError(f"{path}: expert {most} is out of range")
    if int(columns["phase"].max()) > DECODE:
        raise TableError(f"{path}: phase {int(columns['phase'].max())} is neither 0 (prefill) nor 1 (decode)")
