"""Running totals of the expert stream, one named structure. Pure."""

from __future__ import annotations

from operator import add, sub
from typing import NamedTuple

from .timing import Spent


class StreamCounters(NamedTuple):
    """Running totals of the expert stream; subtract two to get what happened between.

    `hits` and `misses` count experts of a layer's batch, each once; `routed` counts (token, expert) pairs;
    `streamed` are misses that passed through the ring without a slot; `bytes` are of expert slices as the file
    stores them, `disk_bytes` what the reads moved, alignment and dense weights included. Times in nanoseconds:
    `plan_ns` cache management, `stall_ns` compute threads waiting for reads (summed over threads), `moe_ns`
    thread 0 inside expert matmuls, `lane_ns` lanes inside reads and `lane_cpu_ns` their CPU there
    (summed over lanes), `disk_ns` wall time with a read queued or under way. Where cold experts are dropped:
    `drop_positions` (layer, token) pairs decided, `drop_routed` routed experts of these, `dropped` those that fell,
    `drop_mass` the sum over the pairs of the share of the routing weights that fell. Read ahead: `guessed` experts,
    `guess_hits` misses that were found among them, `guess_cancelled` guesses taken back before they were read whole,
    `guess_ns` time of guessing. `compute_ns`, `wait_ns`, `manage_ns` and `build_ns` are of thread 0 in the target's
    graphs: computing, waiting for reads, cache management, and what comes before the first node is computed;
    `draft_...` the same in the draft source's graphs. A miss that had been read ahead counts as a miss: the cache did
    not have it.
    """

    plans: int = 0
    routed: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    rereads: int = 0
    streamed: int = 0
    reads: int = 0
    bytes: int = 0
    plan_ns: int = 0
    stall_ns: int = 0
    moe_ns: int = 0
    disk_bytes: int = 0
    lane_ns: int = 0
    lane_cpu_ns: int = 0
    disk_ns: int = 0
    drop_positions: int = 0
    drop_routed: int = 0
    dropped: int = 0
    drop_mass: float = 0.0
    guessed: int = 0
    guess_hits: int = 0
    guess_cancelled: int = 0
    guess_ns: int = 0
    compute_ns: int = 0
    wait_ns: int = 0
    manage_ns: int = 0
    build_ns: int = 0
    draft_compute_ns: int = 0
    draft_wait_ns: int = 0
    draft_manage_ns: int = 0
    draft_build_ns: int = 0

    def __sub__(self, other: StreamCounters) -> StreamCounters:
        return StreamCounters._make(map(sub, self, other))

    def plus(self, other: StreamCounters) -> StreamCounters:
        """Sums; `+` of a tuple would put one after the other."""
        return StreamCounters._make(map(add, self, other))

    @property
    def spent(self) -> Spent:
        """Thread 0's time in graphs, as `TimeSplit.of` takes it."""
        return (
            self.compute_ns, self.wait_ns, self.manage_ns, self.build_ns,
            self.draft_compute_ns, self.draft_wait_ns, self.draft_manage_ns, self.draft_build_ns,
        )  # fmt: skip

    @property
    def hit_rate(self) -> float | None:
        """Share of routed experts that were in the cache, 0..1; None where nothing was routed."""
        looked = self.hits + self.misses
        return self.hits / looked if looked else None

    @property
    def dropped_weight(self) -> float:
        """Share of the routing weights that fell, 0..1, mean over layers and tokens."""
        return self.drop_mass / self.drop_positions if self.drop_positions else 0.0
