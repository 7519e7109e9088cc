"""What a command says: lines on stderr, text on stdout, and progress on a terminal (on a pipe, none)."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_STAGES = {"dense": "reading dense weights", "prefill": "prefill", "score": "scoring"}

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it (128 + SIGINT)."""

Say = Callable[[str], None]


def say(line: str) -> None:
    """One line on stderr."""
    with contextlib.suppress(OSError):  # nobody reads stderr (`2>&1 | head`)
        print(line, file=sys.stderr, flush=True)


def silent(line: str) -> None:
    """Says nothing (`-q`)."""


class OutputError(Exception):
    """Standard output takes no more text; the message is "" where its reader has just gone."""


def write(text: str) -> None:
    """Text on stdout, at once. Raises OutputError."""
    if not text:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _drop_stdout()
        raise
    except OSError as e:
        _drop_stdout()
        raise OutputError("" if e.errno == errno.EPIPE else f"standard output: {e.strerror}") from None


def _drop_stdout() -> None:
    """Sends what is still buffered nowhere: it would fail, or block, again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


class ProgressView:
    """Bars for the stages that an engine reports. `update` is an `engine.Progress`."""

    def __init__(self, enabled: bool = True) -> None:
        self._on = enabled and sys.stderr.isatty()
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None

    def __enter__(self) -> ProgressView:
        if self._on:
            # Loaded here: megabytes that a run without a terminal keeps.
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

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
        amount = f"{done >> 20}/{whole >> 20} MiB" if stage == "dense" else f"{done}/{whole} tokens"
        self._progress.update(self._bars[stage], completed=done, total=whole, amount=amount)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
