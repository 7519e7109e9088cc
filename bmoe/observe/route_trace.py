"""Traces of a run: which experts each token was routed to, and every read of the model's files, as CSV with a preamble.

docs/traces.md has the columns. The compiled parts record into memory; what they recorded is written here after each
batch, whole rows only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..experts.slots import SlotPlan
from ..gguf.file import ExpertLayer, ModelFile
from ..host.files import LineFile
from ..streamer import IO_ROW, Lanes, Streamer
from ..version import __version__

ROUTE_COLUMNS = (
    "turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes", "dropped", "batch",
    "events",
)  # fmt: skip
IO_COLUMNS = (
    "turn", "phase", "step", "time_us", "lane", "layer", "expert", "part", "file", "offset", "bytes", "slice_bytes",
    "queue_us", "latency_us", "direct", "failed", "cause",
)  # fmt: skip
MOST_ROWS = 4096
"""Rows of a route trace that are held as text before they are written: a prompt's would take tens of MiB."""
MOST_READS = 1 << 16
"""Reads that are recorded between two batches at least; more where a model's batch can have more."""

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


@dataclass(frozen=True)
class Batch:
    """What the engine decodes at once: `n_tokens` tokens, the first at `position` of the sequence.

    `cause`: "dense" (opening), "prefill", "decode" or "recovery".
    """

    turn: int
    cause: str
    position: int
    n_tokens: int

    @property
    def phase(self) -> int:
        """0 up to the end of a prompt, 1 for all else: the counters of a result are split in the same way."""
        return 0 if self.cause in ("dense", "prefill") else 1


def layer_number(layer: ExpertLayer, index: int) -> int:
    """The number that a block's name has (`blk.3` is 3); its index where it has none."""
    found = re.search(r"(\d+)$", layer.block)
    return int(found[1]) if found else index


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


class IoTracer:
    """Writes every read of an engine's lanes. `lost`: reads that found no room between two batches."""

    def __init__(self, path: Path, lanes: Lanes, preamble: str) -> None:
        self.rows = self.lost = 0
        self._sources: list[tuple[Lanes, str]] = []
        self._started = 0
        self._starts: list[npt.NDArray[np.int64]] = []
        self._slices: list[list[tuple[int, int, str, int, int]]] = []
        self.file = LineFile(path, "--io-trace")
        self.file.write(preamble + ",".join(IO_COLUMNS) + "\n")
        self._n_files = len(lanes.paths)
        self.add(lanes, "")

    def add(self, lanes: Lanes, cause: str, most: int = MOST_READS) -> None:
        """Records the reads of `lanes` as well; `cause` is theirs whatever the batch, "": the batch's."""
        lanes.record(most)
        self._sources.append((lanes, cause))

    def know(self, layers: Sequence[ExpertLayer]) -> None:
        """Tells where experts lie; before, every read is one of dense weights."""
        found = sorted(
            (t.file, t.offset, layer_number(layer, i), t.name.split(".")[-2], t.nbytes, t.n_expert)
            for i, layer in enumerate(layers)
            for t in layer.tensors
        )
        for file in range(self._n_files):
            here = [f[1:] for f in found if f[0] == file]
            self._starts.append(np.array([h[0] for h in here], np.int64))
            self._slices.append(here)
        slices = sum(layer.n_expert * len(layer.tensors) for layer in layers)
        # A batch reads a slice at most once, and some more as guesses.
        self._sources[0][0].record(slices + MOST_READS)

    def batch(self, batch: Batch) -> None:
        """Writes the reads that ended since the last call, by the time they began."""
        out: list[tuple[int, str]] = []
        for lanes, always in self._sources:
            data, lost = lanes.take_reads()
            self.lost += lost
            rows = np.frombuffer(data, np.dtype(IO_ROW))
            out += [self._row(batch, always or batch.cause, row) for row in rows.tolist()]
        if out:
            self.rows += len(out)
            self.file.write("\n".join(row for _, row in sorted(out)) + "\n")

    def _row(self, batch: Batch, cause: str, row: tuple[int, ...]) -> tuple[int, str]:
        queued, began, ended, offset, need, got, file, lane, direct, failed = row
        self._started = self._started or queued
        layer, expert, part, slice_bytes = -1, -1, "dense", need
        if self._starts:
            at = int(np.searchsorted(self._starts[file], offset + need - 1, "right")) - 1
            if at >= 0:
                start, number, name, nbytes, n_expert = self._slices[file][at]
                index = (offset + need - 1 - start) // nbytes
                if index < n_expert:
                    layer, expert, part, slice_bytes = number, index, name, nbytes
        return began, (
            f"{batch.turn},{batch.phase},{batch.position},{(began - self._started) // 1000},{lane},{layer},{expert},"
            f"{part},{file},{offset},{got},{slice_bytes},{(began - queued) // 1000},{(ended - began) // 1000},"
            f"{direct},{failed},{cause}"
        )

    def close(self) -> None:
        self.file.close()


class Traces:
    """The traces of one engine, those that were asked for."""

    def __init__(self) -> None:
        self.turn = -1
        self.route: RouteTracer | None = None
        self.io: IoTracer | None = None
        self._told = -1
        self._last = Batch(0, "dense", 0, 0)

    def __bool__(self) -> bool:
        return self.route is not None or self.io is not None

    def begin_turn(self) -> None:
        """A generation, or a text to score, begins."""
        self.turn += 1

    def note_event(self, event: str) -> None:
        """Notes what happened to the cache before the next batch."""
        if self.route is not None:
            self.route.note_event(event)

    def note_prompt(self, left: int) -> None:
        """Notes how much of a prompt follows the next batch, where that changes; -1: it is decode's."""
        if left != self._told:
            self._told = left
            self.note_event(f"left:{left}")

    def batch(self, cause: str, position: int, n_tokens: int) -> None:
        """Writes what has come since the last call, as that of this batch."""
        self._last = Batch(max(0, self.turn), cause, position, n_tokens)
        if self.route is not None:
            self.route.batch(self._last)
        if self.io is not None:
            self.io.batch(self._last)

    def lines(self) -> list[str]:
        """What was written, a line for each trace."""
        out = []
        for name, tracer, what in (("route-trace", self.route, "records"), ("io-trace", self.io, "reads")):
            if tracer is not None:
                lost = f", {tracer.lost} {what} lost for want of memory" if tracer.lost else ""
                out.append(f"{name}: {tracer.rows} rows in {tracer.file.path}{lost}")
        return out

    def failures(self) -> list[str]:
        """Why a trace ended early, one line each."""
        return [t.file.failure for t in (self.route, self.io) if t is not None and t.file.failure]

    def close(self) -> None:
        """Writes what is left and closes the files. May be called twice."""
        if self.io is not None:
            self.io.batch(self._last)
            self.io.close()
        if self.route is not None:
            self.route.close()


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
        f"# model={_word(name)} arch={_word(file.arch)} n_layer={file.number('block_count', len(layers))} "
        f"n_expert={max((la.n_expert for la in layers), default=0)} n_expert_used={n_used}",
        f"# engine=bmoe-{__version__} " + " ".join(f"{k}={_word(str(v))}" for k, v in run.items()),
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


def io_preamble(file: ModelFile, name: str, run: dict[str, object]) -> str:
    """The `#` lines of an I/O trace."""
    lines = [
        "# io_trace v1",
        f"# model={_word(name)} arch={_word(file.arch)}",
        f"# engine=bmoe-{__version__} " + " ".join(f"{k}={_word(str(v))}" for k, v in run.items()),
        *(f"# file={i} name={_word(p.name)}" for i, p in enumerate(file.paths)),
    ]
    return "\n".join(lines) + "\n"


def _word(text: str) -> str:
    """`text` as one word of a preamble."""
    return re.sub(r"[^\x21-\x7e]", "_", text) or "_"
