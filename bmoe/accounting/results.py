"""What a generation gives out: its tokens, and what it did. Plain data, no model, no I/O."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .bytes_by_cause import FlashSplit
from .counters import StreamCounters
from .timing import NO_TIME, TimeSplit
from .token_cost import Cost
from .token_record import TokenRecord


@dataclass
class SpecResult:
    """What speculation did in one generation. `type`: the drafters, "none" without; seconds.

    `decodes` are verify batches and plain decodes together, `drafted_steps` those that had a draft. `draft_s`:
    drafting, the head's graphs included. `recoveries`: times that a rejected tail could not be taken back and the
    sequence was decoded again.
    """

    type: str = "none"
    drafted: int = 0
    accepted: int = 0
    decodes: int = 0
    drafted_steps: int = 0
    confirmed: int = 0
    draft_s: float = 0.0
    recoveries: int = 0
    recovery_s: float = 0.0
    recovery_bytes: int = 0

    def count(self, drafted: int, accepted: int, confirmed: int) -> None:
        """Adds one verify step: tokens drafted, of these accepted, and tokens that it confirmed."""
        self.drafted += drafted
        self.accepted += accepted
        self.decodes += 1
        self.drafted_steps += drafted > 0
        self.confirmed += confirmed

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were accepted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_decode(self) -> float | None:
        return self.confirmed / self.decodes if self.decodes else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "acceptance": self.acceptance, "tokens_per_decode": self.tokens_per_decode}


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token and what it cost.

    `text` is what can be printed now: "" while a character is incomplete, or a stop string may have begun; the last
    token has what was held back. Where a generation is cancelled, that comes without a token, as one of `id` -1.
    `wall_s` is the time from asking for the token to having it; `decode_s` of that the model's graph (0.0 for the
    first, which prefill has paid for). `flash`: bytes read by cause, and the re-reads among them, of what was charged
    since the token before. `cost`: the same and more as it was counted. Of the tokens that one verify batch confirms,
    the first has the whole batch's cost. `record`: all of it in one row, where the generation was asked for it.
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
    have), "cancelled", "interrupted", "error". `seed`: of the draws, None where nothing was drawn.

    `prefill_tokens`: prompt tokens that were computed, without the `reused_tokens` kept from the generation before;
    fewer than the rest of the prompt where prefill was stopped. `first_time`: where the time up to the first token
    went, `decode_time`: from there to the last token; `major_faults` of the process, `decode_faults` of these after the
    first token; `decode_cpu_s`: CPU of the process after the first token, all threads.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    stop: str = ""
    stop_string: str = ""
    seed: int | None = None
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
