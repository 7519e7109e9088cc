"""Route traces: which experts each token was routed to, as a CSV file with a preamble, gzipped or not.

Lines that start with `#` are the preamble: `key=value` pairs of the whole trace (`model`, `arch`, `n_layer`,
`n_expert`, `n_expert_used`) and a line for each layer with routed experts (`layer=3 expert_bytes=3059712 ...`).
Then comes a line of column names and a row for each routed expert; columns are found by name, so others may be
there. Pure reading: no model, no cache. docs/traces.md has the columns that bmoe writes.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import BmoeError

PREFILL, DECODE = 0, 1
"""Values of the column `phase`."""

_REQUIRED = ("turn", "phase", "step", "layer", "slot", "expert")
_MOST = 1 << 31  # of a number in any whole-number column

IntArray = npt.NDArray[np.int64]


class TraceError(BmoeError):
    """A route trace that cannot be read; the message names the file and, where there is one, the line."""


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

    Raises TraceError with one line for a file that is missing, damaged, cut off or not a route trace.
    """
    path = Path(path)
    lines = _text(path).splitlines()
    header: dict[str, str] = {}
    expert_bytes: dict[int, int] = {}
    layers: dict[int, dict[str, str]] = {}
    at = 0
    while at < len(lines) and (lines[at].startswith("#") or not lines[at].strip()):
        pairs = dict(word.split("=", 1) for word in lines[at].lstrip("#").split() if "=" in word)
        if "layer" in pairs:
            where = f"{path}:{at + 1}"
            layer, size = _whole(pairs["layer"], "layer", where), pairs.get("expert_bytes")
            if size is None:
                raise TraceError(f"{where}: the line of layer {layer} has no expert_bytes")
            expert_bytes[layer] = _whole(size, "expert_bytes", where)
            layers[layer] = pairs
            if not expert_bytes[layer]:
                raise TraceError(f"{where}: expert_bytes of layer {layer} is 0")
        else:
            header.update(pairs)
        at += 1
    if at == len(lines):
        raise TraceError(f"{path}: no line of column names: not a route trace, or cut off")
    names = [name.strip() for name in lines[at].split(",")]
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        raise TraceError(
            f"{path}:{at + 1}: no column {missing[0]!r}: not a route trace (columns {', '.join(names)[:80]})"
        )
    if not expert_bytes:
        raise TraceError(f"{path}: the preamble has no line 'layer=N expert_bytes=N': sizes are unknown")
    columns, weights, events = _columns(path, lines, at, names)
    n_expert = _whole(header["n_expert"], "n_expert", str(path)) if "n_expert" in header else 0
    _check(path, at, columns, expert_bytes, n_expert)
    n_expert = n_expert or int(columns["expert"].max(initial=0)) + 1
    return RouteTrace(path, header, expert_bytes, n_expert, columns, weights, layers, events)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as f:
                data = f.read()
        return data.decode("utf-8")
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TraceError(f"{path}: damaged or cut off (gzip)") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not a text file, so no route trace") from None
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror or e}") from None


def _columns(
    path: Path, lines: list[str], at: int, names: list[str]
) -> tuple[dict[str, IntArray], npt.NDArray[np.float64] | None, dict[int, str] | None]:
    """The rows after line `at` (from 0), by column; comments (a trailer) and blank lines are passed over."""
    whole = [name for name in (*_REQUIRED, "residency", "expert_bytes", "dropped", "batch") if name in names]
    places = [names.index(name) for name in whole]
    weight_at = names.index("weight") if "weight" in names else -1
    values: list[list[int]] = [[] for _ in whole]
    events_at = names.index("events") if "events" in names else -1
    weights: list[float] = []
    events: dict[int, str] = {}
    for number, line in enumerate(lines[at + 1 :], at + 2):
        if not line.strip() or line.startswith("#"):
            continue
        row = line.split(",")
        where = f"{path}:{number}"
        if len(row) != len(names):
            raise TraceError(f"{where}: {len(row)} fields where the header has {len(names)} (cut off?)")
        for out, name, place in zip(values, whole, places, strict=True):
            out.append(_whole(row[place], name, where))
        if weight_at >= 0:
            try:
                weights.append(float(row[weight_at] or "nan"))
            except ValueError:
                raise TraceError(f"{where}: weight {row[weight_at][:40]!r} is not a number") from None
        if events_at >= 0 and row[events_at]:
            events[len(values[0]) - 1] = row[events_at]
    arrays = {name: np.array(v, np.int64) for name, v in zip(whole, values, strict=True)}
    return arrays, np.array(weights, np.float64) if weight_at >= 0 else None, events if events_at >= 0 else None


def _check(
    path: Path, at: int, columns: Mapping[str, IntArray], expert_bytes: Mapping[int, int], n_expert: int
) -> None:
    if not len(columns["expert"]):
        raise TraceError(f"{path}: no rows after line {at + 1}")
    unknown = sorted(set(np.unique(columns["layer"]).tolist()) - expert_bytes.keys())
    if unknown:
        raise TraceError(f"{path}: rows of layer {unknown[0]}, which the preamble does not have")
    most = int(columns["expert"].max())
    if n_expert and most >= n_expert:
        raise TraceError(f"{path}: expert {most} of n_expert={n_expert}")
    if most >= 1 << 20:
        raise TraceError(f"{path}: expert {most} is out of range")
    if int(columns["phase"].max()) > DECODE:
        raise TraceError(f"{path}: phase {int(columns['phase'].max())} is neither 0 (prefill) nor 1 (decode)")


def _whole(text: str, name: str, where: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 12) or int(text) >= _MOST:
        raise TraceError(f"{where}: {name} {text[:40]!r} is not a whole number in range")
    return int(text)
