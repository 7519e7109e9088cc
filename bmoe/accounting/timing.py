"""Where a generation's wall time goes: at each moment one account is open. Pure."""

from __future__ import annotations

from operator import add, sub
from time import perf_counter_ns
from typing import NamedTuple

LOOP, GRAPH, DRAFT, OUTPUT = range(4)
"""The accounts of a `Clock`: bmoe's own loop; a graph of the target; drafting, the head's graphs included; whoever
consumes the tokens."""


class Clock:
    """Charges the time since the last `switch` to the account that was open; the loop's is open at first.

    `totals`: nanoseconds by account, without those of the interval under way.
    """

    __slots__ = ("_account", "_since", "totals")

    def __init__(self) -> None:
        self.totals = [0, 0, 0, 0]
        self._account = LOOP
        self._since = perf_counter_ns()

    def switch(self, account: int) -> None:
        """Opens an account and closes the one before."""
        now = perf_counter_ns()
        self.totals[self._account] += now - self._since
        self._since, self._account = now, account

    def read(self) -> tuple[int, int, int, int]:
        """Nanoseconds by account up to now."""
        self.switch(self._account)
        loop, graph, draft, output = self.totals
        return loop, graph, draft, output


Accounts = tuple[int, ...]
"""Nanoseconds by account, as `Clock.read`."""
Spent = tuple[int, int, int, int, int, int, int, int]
"""`StreamCounters.spent`: of the target's graphs compute, wait, manage, build; then of the draft source's."""


class TimeSplit(NamedTuple):
    """Wall time and its parts, nanoseconds; subtract and `plus` as counters.

    Each part is measured where it happens. `compute` (waiting for other compute threads included), `stall` (waiting
    for reads), `manage` (cache management) and `build` (until the first node is computed) are those of thread 0, which
    runs the whole graph, in the target's graphs. `draft` is all of drafting, the draft source's graphs included, of
    which `draft_stall` waits for reads. `loop` is bmoe's own Python, `output` whoever takes the tokens. Only `rest` is
    a remainder: what the target's graphs took beyond these four (mostly copying logits). `wall` is the sum of the
    parts, without `draft_stall`.
    """

    wall: int = 0
    compute: int = 0
    stall: int = 0
    manage: int = 0
    build: int = 0
    rest: int = 0
    draft: int = 0
    loop: int = 0
    output: int = 0
    draft_stall: int = 0

    @classmethod
    def of(cls, clock: Accounts, spent: Spent) -> TimeSplit:
        """From `Clock.read()` and `StreamCounters.spent`, or differences of them."""
        loop, graph, draft, output = clock
        compute, stall, manage, build, _, draft_stall, _, _ = spent
        return cls(
            loop + graph + draft + output, compute, stall, manage, build, graph - compute - stall - manage - build,
            draft, loop, output, draft_stall,
        )  # fmt: skip

    @property
    def graph(self) -> int:
        """In the target's graphs."""
        return self.compute + self.stall + self.manage + self.build + self.rest

    def __sub__(self, other: TimeSplit) -> TimeSplit:
        return TimeSplit._make(map(sub, self, other))

    def plus(self, other: TimeSplit) -> TimeSplit:
        """Sums; `+` of a tuple would put one after the other."""
        return TimeSplit._make(map(add, self, other))

    def as_dict(self) -> dict[str, float]:
        """Part -> seconds, as `compute_s`."""
        return {f"{name}_s": value / 1e9 for name, value in self._asdict().items()}


NO_TIME = TimeSplit()
