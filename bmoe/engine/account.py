"""What one turn costs, as it goes: wall time by account, bytes by cause."""

from __future__ import annotations

from ..accounting.bytes_by_cause import FlashSplit
from ..accounting.timing import GRAPH, Clock
from ..streamer import Streamer

# A cause of bytes, and its counters among those of `Streamer.read_ahead_bytes`: all, and the re-reads among them.
_AHEAD = (("prefetch_used", "used", "used_rereads"), ("prefetch_wasted", "wasted", "wasted_rereads"))


class TurnAccount:
    """The books of one turn. `clock` has the time, `split` the bytes that `streamer` has read, charged to causes.

    What a batch has read is charged when it is known which of its tokens were accepted.
    """

    def __init__(self, streamer: Streamer, split: FlashSplit) -> None:
        self.clock = Clock()
        self.split = split
        self._streamer = streamer
        self._width = 0  # positions of the batch that is not charged yet
        self._ahead = streamer.read_ahead_bytes()
        self._graph_ns = 0

    def open_batch(self, width: int) -> None:
        """A batch of `width` positions is about to run."""
        self._width = width

    def charge_step(self, accepted: int) -> None:
        """Charges what the last batch has read by position: its confirmed token, `accepted` drafts, rejected ones."""
        if self._width:
            self.split.charge_batch(*self._streamer.take_positions(self._width), accepted)
            self._charge_ahead()
        self._width = 0

    def charge_rejected(self, n: int) -> None:
        """Charges the last batch, of which the last `n` drafts were not accepted."""
        self.charge_step(self._width - 1 - n)

    def charge(self, cause: str) -> None:
        """Charges all that was read since the last charge to one cause."""
        self._width = 0
        total, again = self._streamer.take_positions(1)
        self.split.charge(cause, total[0], again[0])
        self._charge_ahead()

    def take_graph_s(self) -> float:
        """Seconds in the target's graphs since the last call."""
        before, self._graph_ns = self._graph_ns, self.clock.totals[GRAPH]
        return (self._graph_ns - before) / 1e9

    def _charge_ahead(self) -> None:
        """Charges what was read ahead since the last call."""
        before, self._ahead = self._ahead, self._streamer.read_ahead_bytes()
        for cause, what, again in _AHEAD:
            self.split.charge(cause, self._ahead[what] - before[what], self._ahead[again] - before[again])
