"""What each token has cost: every counter, by cause and by account of time, since the token before."""

from __future__ import annotations

from collections.abc import Callable
from operator import sub
from typing import NamedTuple

from .metrics import StreamCounters
from .speculation import FlashSplit
from .timing import Clock, TimeSplit


class Cost(NamedTuple):
    """`stream`: the expert stream's counters; `flash`: bytes charged, cause -> (bytes, re-reads among them)."""

    stream: StreamCounters
    flash: dict[str, tuple[int, int]]
    time: TimeSplit


class Meter:
    """Takes differences of one generation's counters; `start` is what they were when it was made."""

    def __init__(self, counters: Callable[[], StreamCounters], clock: Clock, flash: FlashSplit) -> None:
        self._counters, self._clock, self._flash = counters, clock, flash
        self.start = self._mark = counters()
        self._charged, self._time = flash.copy(), clock.read()

    def take(self) -> Cost:
        """What has passed since the last call; an interval under way is cut here."""
        since, self._mark = self._mark, self._counters()
        charged, self._charged = self._charged, self._flash.copy()
        before, self._time = self._time, self._clock.read()
        stream = self._mark - since
        loop, graph, draft, output = map(sub, self._time, before)
        return Cost(stream, self._flash.since(charged), TimeSplit.of((loop, graph, draft, output), stream.spent))
