"""Writes a route trace: which experts each token was routed to, as CSV with a preamble (docs/traces.md).

The streamer records into memory; what it recorded is written here after each batch, whole rows only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..experts.slots import SlotPlan
from ..gguf.file import ExpertLayer, ModelFile
from ..host.files import LineFile
from ..streamer import Streamer
from ..version import __version__
from .batch import Batch, layer_number, word

ROUTE_COLUMNS = (
    "turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes", "dropped", "batch",
    "events",
)  # fmt: skip
MOST_ROWS = 4096
"""Rows of a route trace that are held as text before they are written: a prompt's would take tens of MiB."""

# Records of the log, as ext/bmoe/streamer/_route_log.pxd has them.
_PLAN, _HOLD, _WARM, _RELEASE, _FORGET, _CLEAR = range(1, 7)
_HEAD, _RESIDENT, _DROPPED = 4, 20, 22
_EVENTS = {
    _HOLD: "hold:{0}",
    _WARM: "warm:{0}:{1}",
    _RELEASE: "release:{0}",
    _FORGET: "forget:{0}:{1}",
    _CLEAR: "clear",
}

Words = npt.NDArray[np.int32]


def records(words: Words) -> Iterator[tuple[int, int, int, Words]]:
    """The records of a log: kind, layer, a number (tokens of a plan, else an expert), and a plan's entries.

    Entries are int32 [n_tokens, n_used, 2]: expert and flags, and the bits of the weight.
    """
    at = 0
    while at < len(words):
        kind, layer, number, n_used = words[at : at + _HEAD].tolist()
        at += _HEAD
        n = 2 * number * n_used if kind == _PLAN else 0
        yield kind, layer, number, words[at : at + n].reshape(number, n_used, 2) if n else words[:0]
        at += n


class RouteTracer:
    """Writes the route trace of one engine. `lost`: records that found no memory."""

    def __init__(
        self, path: Path, streamer: Streamer, file: ModelFile, layers: Sequence[ExpertLayer], preamble: str
    ) -> None:
        self.rows = self.lost = 0
        self._streamer = streamer
        self._numbers = [layer_number(layer, i) for i, layer in enumerate(layers)]
        self._bytes = [layer.expert_bytes for layer in layers]
        self._events: list[str] = []
        self._batch = 0
        self.file = LineFile(path, "--route-trace")
        self.file.write(preamble + ",".join(ROUTE_COLUMNS) + "\n")
        streamer.log_routes(True)

    def note_event(self, event: str) -> None:
        """Notes what happened to the cache before the next batch."""
        self._events.append(event)

    def batch(self, batch: Batch) -> None:
        """Writes what was routed since the last call, as that of `batch`."""
        data, lost = self._streamer.take_routes()
        self.lost += lost
        out: list[str] = []
        for kind, layer, number, entries in records(np.frombuffer(data, np.int32)):
            if kind != _PLAN:
                self._event(_EVENTS[kind].format(self._numbers[layer], number))
                continue
            out += self._plan(batch, layer, entries)
            self._batch += 1
            if len(out) >= MOST_ROWS:
                self._write(out)
        self._write(out)

    def _write(self, rows: list[str]) -> None:
        if rows:
            self.rows += len(rows)
            self.file.write("\n".join(rows) + "\n")
            rows.clear()

    def _event(self, event: str) -> None:
        # An expert that was read ahead at once takes one word.
        held = event.replace("warm", "hold").rsplit(":", 1)[0]
        if event.startswith("warm") and self._events and self._events[-1] == held:
            self._events[-1] = event.replace("warm", "load")
        else:
            self._events.append(event)

    def _plan(self, batch: Batch, layer: int, entries: Words) -> list[str]:
        n_tok, n_used = entries.shape[:2]
        flags = entries[..., 0].ravel()
        experts = flags & ((1 << _RESIDENT) - 1)
        residency = (flags >> _RESIDENT) & 3
        dropped = (flags >> _DROPPED) & 1
        read = np.zeros(len(flags), np.int64)
        missed = np.flatnonzero((residency == 0) & (dropped == 0))
        # Charged to the first row that wants it; what was read ahead is charged to none.
        read[missed[np.unique(experts[missed], return_index=True)[1]]] = self._bytes[layer]
        weights = np.ascontiguousarray(entries[..., 1]).view(np.float32).ravel().tolist()
        steps = np.full(n_tok, batch.position)
        if batch.phase == 0:
            # The last layer computes only the tokens whose logits are wanted: the last ones.
            steps += batch.n_tokens - n_tok + np.arange(n_tok)
        events, self._events = " ".join(self._events), []
        head, tail = f"{batch.turn},{batch.phase},", f",{self._batch},"
        number = self._numbers[layer]
        rows = [
            f"{head}{step},{number},{slot},{e},{'' if w != w else f'{w:.6g}'},{r},{b},{d}{tail}"
            for step, slot, e, w, r, b, d in zip(
                np.repeat(steps, n_used).tolist(),
                list(range(n_used)) * n_tok,
                experts.tolist(),
                weights,
                residency.tolist(),
                read.tolist(),
                dropped.tolist(),
                strict=True,
            )
        ]
        if rows:
            rows[0] += events
        return rows

    def close(self) -> None:
        self._streamer.log_routes(False)
        self.file.close()


def route_preamble(
    file: ModelFile,
    name: str,
    layers: Sequence[ExpertLayer],
    n_used: int,
    plan: SlotPlan | None,
    run: dict[str, object],
) -> str:
    """The `#` lines of a route trace; `run`: what else is worth knowing of the run, in order."""
    lines = [
        "# route_trace v1",
        f"# model={word(name)} arch={word(file.arch)} n_layer={file.number('block_count', len(layers))} "
        f"n_expert={max((la.n_expert for la in layers), default=0)} n_expert_used={n_used}",
        f"# engine=bmoe-{__version__} " + " ".join(f"{k}={word(str(v))}" for k, v in run.items()),
    ]
    if plan is not None:
        lines[-1] += f" slots={','.join(map(str, plan.class_slots))} slot_bytes={','.join(map(str, plan.class_stride))}"
    for i, layer in enumerate(layers):
        experts = {t.name for t in layer.tensors}
        prefix = layer.block + "."
        dense = sum(t.nbytes for t in file.tensors if t.name.startswith(prefix) and t.name not in experts)
        line = f"# layer={layer_number(layer, i)} expert_bytes={layer.expert_bytes} dense_bytes={dense}"
        line += f" n_expert={layer.n_expert}"
        if plan is not None:
            line += f" class={plan.layer_class[i]} quota={plan.quotas[i]}"
        lines.append(line)
    return "\n".join(lines) + "\n"
