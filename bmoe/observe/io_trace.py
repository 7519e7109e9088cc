"""Writes an I/O trace: every read of the model's files, as CSV with a preamble (docs/traces.md).

The lanes record into memory; what they recorded is written here after each batch, whole rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..gguf.file import ExpertLayer, ModelFile
from ..host.files import LineFile
from ..streamer import IO_ROW, Lanes
from ..version import __version__
from .batch import Batch, layer_number, word

IO_COLUMNS = (
    "turn", "phase", "step", "time_us", "lane", "layer", "expert", "part", "file", "offset", "bytes", "slice_bytes",
    "queue_us", "latency_us", "direct", "failed", "cause",
)  # fmt: skip
MOST_READS = 1 << 16
"""Reads that are recorded between two batches at least; more where a model's batch can have more."""


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


def io_preamble(file: ModelFile, name: str, run: dict[str, object]) -> str:
    """The `#` lines of an I/O trace."""
    lines = [
        "# io_trace v1",
        f"# model={word(name)} arch={word(file.arch)}",
        f"# engine=bmoe-{__version__} " + " ".join(f"{k}={word(str(v))}" for k, v in run.items()),
        *(f"# file={i} name={word(p.name)}" for i, p in enumerate(file.paths)),
    ]
    return "\n".join(lines) + "\n"
