"""The bookkeeping of a generation: fills its result, and says of each token what it has cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..accounting.counters import StreamCounters
from ..accounting.results import GenerationResult, Token
from ..accounting.timing import OUTPUT
from ..accounting.token_cost import TokenCosts
from ..host import memory
from ..speculation.verify import Choice, Step
from .account import TurnAccount

if TYPE_CHECKING:
    from ..observe.telemetry import Telemetry  # loaded where records are asked for


class GenerationBooks:
    """The books of one generation, opened as it begins.

    `counters` gives the totals of the expert stream; `account` has what is charged while graphs run.
    """

    def __init__(self, account: TurnAccount, counters: Callable[[], StreamCounters], result: GenerationResult) -> None:
        self._started, self._faults = time.perf_counter(), memory.major_faults()
        self.account, self._counters, self._result = account, counters, result
        self._costs = TokenCosts(counters, account.clock, account.split)
        self._decode_faults, self._decode_cpu = self._faults, 0.0
        self._prefilled = False
        self.telemetry: Telemetry | None = None

    def end_prefill(self) -> None:
        """The prompt is decoded; what comes now is decode's."""
        result = self._result
        result.prefill, result.prefill_s = self._counters() - self._costs.start, self._since_start()
        self._prefilled = True
        self.account.take_graph_s()

    def first_chosen(self) -> None:
        """The first token is there."""
        self._result.ttft_s = self._since_start()
        self._decode_faults, self._decode_cpu = memory.major_faults(), time.process_time()

    def step(self, step: Step) -> float:
        """A verify step is done; seconds in its graphs."""
        result, took = self._result, self.account.take_graph_s()
        result.spec.count(step.drafted, step.accepted, len(step.confirmed))
        result.decode_s += took
        result.decode_steps += 1
        self.account.charge_step(step.accepted)
        return took

    def token(self, choice: Choice, text: str, decode_s: float, step: Step | None) -> Token:
        """The token of one choice; its cost is what has passed since the one before.

        `step`: what has decoded it, where it is the first token of that; None for all others.
        """
        result, telemetry = self._result, self.telemetry
        index = len(result.token_ids)
        host = telemetry.sample() if telemetry else None
        cost = self._costs.take()
        if not index:
            result.first_time = cost.time
            self._costs.begin_decode()
        record = None
        if telemetry and host:
            batch = (step.drafted + 1, step.drafted, step.accepted) if step else (0, 0, 0)
            record = telemetry.record(index, choice.id, cost, batch, host)
        result.token_ids.append(choice.id)
        wall_s = (sum(cost.clock) - cost.clock[OUTPUT]) / 1e9
        # Prefill has paid for the first token: only its record says so.
        stream = cost.stream if index else StreamCounters()
        self.account.clock.switch(OUTPUT)
        return Token(index, choice.id, text, wall_s, decode_s, stream, cost.flash, cost, record)

    def rest(self, text: str) -> Token:
        """What is left of the text where no token can carry it any more."""
        return Token(len(self._result.token_ids), -1, text, 0.0, 0.0, StreamCounters(), {})

    def close(self) -> None:
        """Completes the result, whatever has happened."""
        result = self._result
        self.account.charge_step(0)
        result.total_s = self._since_start()
        if self._prefilled:
            result.decode = self._counters() - self._costs.start - result.prefill
        else:
            result.prefill, result.prefill_s = self._counters() - self._costs.start, result.total_s
        result.major_faults = memory.major_faults() - self._faults
        if result.token_ids:
            result.decode_time = self._costs.decode_time()
            result.spec.draft_s = result.decode_time.draft / 1e9
            result.decode_faults = memory.major_faults() - self._decode_faults
            result.decode_cpu_s = time.process_time() - self._decode_cpu
        if self.telemetry:
            self.telemetry.close()

    def _since_start(self) -> float:
        return time.perf_counter() - self._started
