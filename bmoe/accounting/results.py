"""Counters of a run and the views that reports take of them. Plain data, no model, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add, sub
from typing import TYPE_CHECKING, Any, NamedTuple

from ..speculation.verify import FlashSplit, SpecResult
from .timing import NO_TIME, Accounts, Spent, TimeSplit

if TYPE_CHECKING:
    from ..observe.telemetry import TokenRecord


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
        """Thread 0's time in graphs, as `Streamer.spent` has it."""
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


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token and what it cost.

    `text` is what can be printed now: "" while a character is incomplete, or a stop string may have begun. `wall_s`
    is the time from asking for the token to having it; `decode_s` of that the model's graph (0.0 for the first,
    which prefill has paid for). `flash`: bytes read by cause, and the re-reads among them, of what was charged since
    the token before. `cost`: the same and more as it was counted. Of the tokens that one verify batch confirms, the
    first has the whole batch's cost. `record`: all of it in one row, where the generation was asked for it.
    """

    index: int
    id: int
    text: str
    wall_s: float
    decode_s: float
    stream: StreamCounters
    flash: dict[str, tuple[int, int]]
    cost: Cost | None = None
    record: TokenRecord | None = None

    @property
    def time(self) -> TimeSplit:
        """Where the time since the token before went."""
        return NO_TIME if self.cost is None else self.cost.time


@dataclass
class GenerationResult:
    """What a generation did. Seconds, bytes.

    `stop` is one of "length", "end" (an end-of-generation token), "stop" (`stop_string` came, which `text` does not
    have), "cancelled", "interrupted", "error".

    `prefill_tokens`: prompt tokens that were computed, without the `reused_tokens` kept from the generation before;
    fewer than the rest of the prompt where prefill was stopped. `first_time`: where the time up to the first token
    went, `decode_time`: from there to the last token; `major_faults` of the process, `decode_faults` of these after the
    first token; `decode_cpu_s`: CPU of the process after the first token, all threads.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    stop: str = ""
    stop_string: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    total_s: float = 0.0
    major_faults: int = 0
    decode_faults: int = 0
    decode_cpu_s: float = 0.0
    first_time: TimeSplit = NO_TIME
    decode_time: TimeSplit = NO_TIME
    prefill: StreamCounters = field(default_factory=StreamCounters)
    decode: StreamCounters = field(default_factory=StreamCounters)
    spec: SpecResult = field(default_factory=SpecResult)
    flash_split: FlashSplit = field(default_factory=FlashSplit)

    @property
    def prefill_tok_s(self) -> float | None:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second of model time; the first token is prefill's."""
        return self.decoded / self.decode_s if self.decode_s else None

    @property
    def decoded(self) -> int:
        """Tokens after the first."""
        return max(0, len(self.token_ids) - 1)

    @property
    def effective_tok_s(self) -> float | None:
        """Tokens per second of wall time after the first token, everything included."""
        after = self.total_s - self.ttft_s
        return self.decoded / after if self.decoded and after > 0 else None


def expert_summary(
    counters: StreamCounters, steps: int, budget: int, resident: int, drop_threshold: float | None = None
) -> dict[str, Any]:
    """The `expert` object of the metrics file for one phase."""
    return {
        "bytes_read": counters.bytes,
        "bytes_per_token": counters.bytes / steps if steps else None,
        "reads": counters.reads,
        "routed": counters.routed,
        "hits": counters.hits,
        "misses": counters.misses,
        "hit_rate": counters.hit_rate,
        "evictions": counters.evictions,
        "rereads": counters.rereads,
        "streamed": counters.streamed,
        "budget_bytes": budget,
        "resident_bytes": resident,
        "drop": {
            "threshold": drop_threshold,
            "routed": counters.drop_routed,
            "dropped": counters.dropped,
            "weight_mass_dropped": counters.dropped_weight,
        },
    }
