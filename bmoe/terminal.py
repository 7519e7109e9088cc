"""Progress on a terminal; on a pipe, nothing."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_STAGES = {"dense": "reading dense weights", "prefill": "prefill"}


class ProgressView:
    """Bars for the stages that an engine reports. `update` is an `engine.Progress`."""

    def __init__(self, enabled: bool = True) -> None:
        self._on = enabled and sys.stderr.isatty()
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None

    def __enter__(self) -> ProgressView:
        if self._on:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
        return self

    def update(self, stage: str, done: int, whole: int) -> None:
        """Shows `done` of `whole` for a stage."""
        if self._progress is None or whole <= 0:
            return
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(_STAGES.get(stage, stage), total=whole, amount="")
        amount = f"{done}/{whole} tokens" if stage == "prefill" else f"{done >> 20}/{whole >> 20} MiB"
        self._progress.update(self._bars[stage], completed=done, total=whole, amount=amount)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
