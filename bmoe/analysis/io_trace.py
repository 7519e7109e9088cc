"""Reading an I/O trace, and what it says of the disk: pure, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .table import Table, integer

_NUMBERS = ("time_us", "lane", "layer", "bytes", "slice_bytes", "queue_us", "latency_us", "direct", "failed")


@dataclass(frozen=True)
class IoTrace:
    """One I/O trace: int64 columns by name, and the cause of each read."""

    path: Path
    columns: dict[str, npt.NDArray[np.int64]]
    causes: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.causes)


@dataclass(frozen=True)
class Reads:
    """Reads of one cause. Bytes as moved, `slice_bytes` as wanted; times in microseconds.

    `busy_s`: with one of them under way; `latency`: the 50th, 90th and 99th of a hundred and the longest.
    """

    cause: str
    n: int
    bytes: int
    slice_bytes: int
    busy_s: float
    latency: tuple[float, float, float, float]
    queue_p50: float
    buffered: int
    failed: int

    @property
    def mib_s(self) -> float | None:
        """Bytes moved per second with a read under way, MiB/s."""
        return self.bytes / (1 << 20) / self.busy_s if self.busy_s else None


def is_io_trace(path: Path) -> bool:
    """Whether the first line says so."""
    try:
        with open(path, "rb") as f:
            return f.readline(64).startswith(b"# io_trace")
    except OSError:
        return False  # the reader of route traces says why


def read_io_trace(path: Path) -> IoTrace:
    """Reads an I/O trace. Raises TableError with one line for one that is damaged or cut off."""
    table = Table(path, "an I/O trace", row_fault="not a whole row: ")
    table.need((*_NUMBERS, "cause"))
    values = table.columns({**dict.fromkeys(_NUMBERS, integer), "cause": str})
    return IoTrace(path, {name: np.array(values[name], np.int64) for name in _NUMBERS}, np.array(values["cause"]))


def busy_us(starts: Sequence[int] | npt.NDArray[np.int64], ends: Sequence[int] | npt.NDArray[np.int64]) -> int:
    """Length of the union of intervals."""
    total, reach = 0, None
    for a, b in sorted(zip(np.asarray(starts).tolist(), np.asarray(ends).tolist(), strict=True)):
        if reach is None or a > reach:
            total += b - a
            reach = b
        elif b > reach:
            total += b - reach
            reach = b
    return total


def summarise(trace: IoTrace) -> list[Reads]:
    """The reads of each cause, in the order in which they appear."""
    c, out = trace.columns, []
    for cause in dict.fromkeys(trace.causes.tolist()):
        at = trace.causes == cause
        start, latency = c["time_us"][at], c["latency_us"][at]
        p50, p90, p99 = np.percentile(latency, [50, 90, 99]).tolist()
        out.append(
            Reads(
                cause,
                int(at.sum()),
                int(c["bytes"][at].sum()),
                int(c["slice_bytes"][at].sum()),
                busy_us(start, start + latency) / 1e6,
                (p50, p90, p99, float(latency.max())),
                float(np.median(c["queue_us"][at])),
                int((c["direct"][at] == 0).sum()),
                int(c["failed"][at].sum()),
            )
        )
    return out
