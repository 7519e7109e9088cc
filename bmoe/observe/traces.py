"""The traces of one engine, those that were asked for."""

from __future__ import annotations

from .batch import Batch
from .io_trace import IoTracer
from .route_trace import RouteTracer


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
