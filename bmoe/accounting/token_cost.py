"""What each token has cost: every counter, by cause and by account of time, since the token before."""

from __future__ import annotations

from collections.abc import Callable
from operator import sub

from ..speculation.verify import FlashSplit
from .results import Cost, StreamCounters
from .timing import Clock, TimeSplit


class Meter:
    """Takes differences of one generation's counters; `start` is what they were when it was made."""

    def __init__(self, counters: Callable[[], StreamCounters], clock: Clock, flash: FlashSplit) -> None:
        self._counters, self._clock, self._flash = counters, clock, flash
        self.start = self._mark = counters()
        self._charged, self._time = flash.copy(), clock.read()
        self._first = self._mark, self._time

    def take(self) -> Cost:
        """What has passed since the last call; an interval under way is cut here."""
        since, self._mark = self._mark, self._counters()
        charged, self._charged = self._charged, self._flash.copy()
        before, self._time = self._time, self._clock.read()
        return Cost(self._mark - since, self._flash.since(charged), tuple(map(sub, self._time, before)))

    def begin_decode(self) -> None:
        """The last `take` was the first token's."""
        self._first = self._mark, self._time

    def decode_time(self) -> TimeSplit:
        """From `begin_decode` to the last `take`: the sum over the tokens, without summing at each."""
        mark, clock = self._first
        return TimeSplit.of(tuple(map(sub, self._time, clock)), (self._mark - mark).spent)
