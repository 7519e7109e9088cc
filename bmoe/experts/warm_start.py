"""Warm starts: which experts were used most, kept from one run to the next, and read ahead when an engine opens.

The file holds counts and the model's identity, no weights. docs/cache.md says what is done with it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import BmoeError
from ..gguf.file import ExpertLayer, ModelFile
from ..host.files import write_whole
from ..streamer import _reads, _streamer, _warm_start

VERSION = 1
LANES = 3
"""Lanes that read ahead: an expert has two or three slices."""
_MOST_BYTES = 64 << 20
_MOST_COUNT = 1 << 53  # what any reader of JSON holds exactly
_PAUSE_S = 0.0005  # while the engine reads for itself; a read takes about that long
_HALF = 2  # a run counts twice as much as the one before

Counts = list[list[int]]
"""Routed rows of each expert, by layer."""


class StateError(BmoeError):
    """A state file that is not used; the message is one line that says why."""


def identity(file: ModelFile, layers: Sequence[ExpertLayer]) -> dict[str, Any]:
    """What tells this model from others: architecture, sizes of its files, a hash of the header, its experts.

    `file` must still have its header.
    """
    import hashlib  # megabytes of a library that no other run needs

    return {
        "arch": file.arch,
        "file_bytes": [p.stat().st_size for p in file.paths],
        "header_sha256": hashlib.sha256(file.header).hexdigest(),
        "experts": [[layer.block, layer.n_expert, layer.expert_bytes] for layer in layers],
    }


def read_state(path: Path, model: dict[str, Any]) -> Counts | None:
    """The counts in the file at `path`, None where there is no file. Raises StateError for one that is of no use."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise StateError(f"{path} is too large for a cache state")
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as e:
        raise StateError(f"cannot read {path}: {e.strerror}") from None
    except (ValueError, RecursionError):
        raise StateError(f"{path} is damaged, or no cache state") from None
    if not isinstance(state, dict) or "bmoe_cache_state" not in state:
        raise StateError(f"{path} is no cache state")
    if state["bmoe_cache_state"] != VERSION:
        raise StateError(f"{path} has version {str(state['bmoe_cache_state'])[:20]}, this bmoe reads {VERSION}")
    theirs = state.get("model")
    if not isinstance(theirs, dict):
        raise StateError(f"{path} is damaged: it names no model")
    for key, value in model.items():
        if theirs.get(key) != value:
            raise StateError(f"{path} is of another model ({key} differs)")
    counts = state.get("counts")
    shape = [n for _, n, _ in model["experts"]]
    if not (
        isinstance(counts, list)
        and all(isinstance(row, list) for row in counts)
        and [len(row) for row in counts] == shape
        and all(type(n) is int and 0 <= n < _MOST_COUNT for row in counts for n in row)
    ):
        raise StateError(f"{path} is damaged: its counts do not fit the model")
    return counts


def write_state(path: Path, model: dict[str, Any], counts: Counts) -> None:
    """Writes the file, whole or not at all. Raises OSError."""
    write_whole(path, json.dumps({"bmoe_cache_state": VERSION, "model": model, "counts": counts}) + "\n")


def merge(old: Counts | None, new: Counts) -> Counts:
    """Counts of this run, and half of what was known before: the file follows what a user does lately."""
    if old is None:
        return new
    return [[b + a // _HALF for a, b in zip(x, y, strict=True)] for x, y in zip(old, new, strict=True)]


def by_frequency(counts: Counts) -> list[tuple[int, int]]:
    """(layer, expert) pairs that were used, the likeliest first: by their share of their layer's rows."""
    shares = [
        (-n / total, layer, expert)
        for layer, row in enumerate(counts)
        if (total := sum(row))
        for expert, n in enumerate(row)
        if n
    ]
    return [(layer, expert) for _, layer, expert in sorted(shares)]


class Preloader:
    """A thread that reads experts ahead, in the order given, into slots that are empty.

    `failure`: why it ended before its time, one line, or "". `done`: it has nothing left to read.
    """

    def __init__(
        self,
        streamer: _streamer.Streamer,
        lanes: _reads.Lanes,
        order: Sequence[tuple[int, int]],
        layer_class: Sequence[int],
    ) -> None:
        self.lanes = lanes
        self.loader = _warm_start.Loader(streamer, lanes)
        self.failure = ""
        self._order, self._class = order, layer_class
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bmoe-preload", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as e:
            self.failure = str(e)

    def _run(self) -> None:
        full: set[int] = set()
        for layer, expert in self._order:
            if self._class[layer] in full:
                continue
            outcome = "busy"
            while outcome == "busy":
                if self._stop.is_set():
                    return
                outcome = _warm_start.OUTCOMES[self.loader.load(layer, expert)]
                if outcome == "busy":
                    self._stop.wait(_PAUSE_S)
            if outcome == "full":
                full.add(self._class[layer])
            elif outcome == "failed":
                self.failure = self.lanes.failure() or "a read failed"
                return

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing is left to read, `timeout` seconds at most; whether that is so."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return self.done

    def stop(self) -> None:
        """Ends it after the expert that it reads now."""
        self._stop.set()
        self.wait()

    def line(self) -> str:
        """What it did, in one line."""
        loader = self.loader
        unused = f", {loader.bytes_unused >> 20} MiB too late" if loader.bytes_unused else ""
        failure = f"; ended early: {self.failure}" if self.failure else ""
        return (
            f"warm start: {loader.experts} experts, {loader.bytes / (1 << 20):.1f} MiB read ahead, "
            f"{loader.used()} used so far{unused}{failure}"
        )
