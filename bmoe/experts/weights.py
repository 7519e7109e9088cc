"""Where the weights lie: dense ones in memory or in a map of the file, experts in the map until a slot has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..gguf.file import Tensor
from ..host import _memory
from ..llama import Model
from ..streamer import ALIGNMENT as PAGE
from ..streamer import _reads

DenseMode = Literal["mmap", "warm", "lock", "anon"]
DENSE_MODES: tuple[DenseMode, ...] = ("mmap", "warm", "lock", "anon")

_READ = 4 << 20  # bytes of one dense read: long enough for full bandwidth, short enough to share over lanes
_GAP = 64 << 10  # tensors this close are read as one run: padding costs less than another seek


@dataclass(frozen=True)
class Run:
    """A run of dense tensors that lie side by side in one file: `[start, end)` bytes, `start` aligned."""

    file: int
    start: int
    end: int
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes, whole pages."""
        return -(-(self.end - self.start) // PAGE) * PAGE


def dense_runs(tensors: Sequence[Tensor]) -> list[Run]:
    """Joins tensors that are close to each other in their file."""
    runs: list[Run] = []
    group: list[Tensor] = []

    def flush() -> None:
        if group:
            end = max(t.offset + t.nbytes for t in group)
            runs.append(Run(group[0].file, group[0].offset // PAGE * PAGE, end, tuple(group)))

    for t in sorted(tensors, key=lambda t: (t.file, t.offset)):
        if group and (t.file != group[-1].file or t.offset - (group[-1].offset + group[-1].nbytes) > _GAP):
            flush()
            group = []
        group.append(t)
    flush()
    return runs


class Weights:
    """Owns the memory that a model's tensors point at. Close it after the model.

    `dense_bytes`: memory that the dense weights take when all of them are resident; `dense`: where that is, as
    (address, bytes).
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.maps = [_memory.FileMap(os.fspath(p)) for p in paths]
        self.region: _memory.Region | None = None
        self.dense_bytes = 0
        self.bytes_read = 0
        self.note = ""
        self.dense: list[tuple[int, int]] = []

    def place(
        self,
        model: Model,
        dense: Sequence[Tensor],
        experts: Sequence[Tensor],
        mode: DenseMode,
        lanes: _reads.Lanes,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Points every tensor of `model` at its bytes and reads the dense ones, as `mode` says.

        `mmap`: pages of the file, as touched; `warm`: the same, read in now; `anon`: a copy in anonymous memory,
        which no other reader of the disk can push out; `lock`: that copy pinned. Experts point into the map:
        what is not streamed still computes right. Raises ReadError where a read fails.
        """
        for t in experts:
            model.place(t.name, self.maps[t.file].address + t.offset)
        runs = dense_runs(dense)
        self.dense_bytes = sum(run.nbytes for run in runs)
        if mode in ("mmap", "warm"):
            for m in self.maps:
                m.guard()
            self.dense = [(self.maps[run.file].address + run.start, run.end - run.start) for run in runs]
            for t in dense:
                model.place(t.name, self.maps[t.file].address + t.offset)
            if mode == "warm":
                done = 0
                for run in runs:
                    for at in range(run.start, run.end, _READ):
                        self.maps[run.file].warm(at, min(_READ, run.end - at))
                        done += min(_READ, run.end - at)
                        if progress:
                            progress(done, self.dense_bytes)
                self.bytes_read = self.dense_bytes
            return
        self.region = _memory.Region(self.dense_bytes)
        self.dense = [(self.region.address, self.dense_bytes)]
        address, windows = self.region.address, []
        for run in runs:
            for t in run.tensors:
                model.place(t.name, address + t.offset - run.start)
            for at in range(run.start, run.end, _READ):
                nbytes = min(_READ, run.end - at)
                windows.append(_reads.window(run.file, at, nbytes, address + at - run.start))
            address += run.nbytes
        step = 32
        for i in range(0, len(windows), step):
            lanes.read_windows(windows[i : i + step])
            self.bytes_read += sum(w[3] for w in windows[i : i + step])
            if progress:
                progress(self.bytes_read, self.dense_bytes)
        if mode == "lock" and (code := self.region.lock()):
            self.note = f"dense weights are not locked: {os.strerror(code)} (raise ulimit -l)"

    def visible_dense(self) -> list[tuple[int, int]]:
        """Of `dense` what the kernel tells truly whether it is in memory, which is all or nothing.

        Of a mapped file that is neither ours nor ours to write, mincore says that all of it is.
        """
        mapped = self.region is None
        if mapped and any(not os.access(p, os.W_OK) and p.stat().st_uid != os.geteuid() for p in self.paths):
            return []
        return self.dense

    def fault(self) -> str:
        """What is wrong with a map that weights are used from, "" where nothing is."""
        for m, path in zip(self.maps, self.paths, strict=True):
            if m.broken:
                return f"{path}: a page of it cannot be read any more: the file has shrunk, or its disk fails"
        return ""

    def close(self) -> None:
        for m in self.maps:
            m.close()
        if self.region is not None:
            self.region.close()
