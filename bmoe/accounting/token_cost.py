"""What each token has cost: every counter, by cause and by account of time, since the token before."""

from __future__ import annotations

from collections.abc import Callable
from operator import sub
from typing import NamedTuple

from .bytes_by_cause import FlashSplit
from .counters import StreamCounters
from .timing import Accounts, Clock, TimeSplit


class Cost(NamedTuple):
    """What a token has cost. `stream`: the expert stream's counters; `flash`: bytes charged, cause -> (bytes, re-reads
    among them); `clock`: nanoseconds by account of `timing.Clock`."""

    stream: StreamCounters
    flash: dict[str, tuple[int, int]]
    clock: Accounts

    @property
    def time(self) -> TimeSplit:
        """Where the time went; made when it is asked for, since most runs never do."""
        return TimeSplit.of(self.clock, self.stream.spent)


class TokenCosts:
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
