"""Scoring a given text: the surprise of each token, and what a whole text of them says (perplexity)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import llama
from ..accounting.counters import StreamCounters
from ..accounting.results import GenerationResult, Token
from ..accounting.timing import LOOP, OUTPUT
from ..accounting.token_cost import Cost, TokenCosts
from ..errors import UsageError
from ..host import memory
from .account import TurnAccount
from .request import check_ids
from .sequence import TokenSequence
from .turn import Turn

# ---- pure ----------------------------------------------------------------------------------------


class Window(NamedTuple):
    """A stretch of a text, tokens `begin` to `end`, of which those from `first` on are scored."""

    begin: int
    first: int
    end: int


def windows(n_tokens: int, size: int, stride: int | None = None) -> list[Window]:
    """Cuts a text into windows of `size` tokens, as llama.cpp's perplexity tool does.

    Without `stride` they follow each other, and of each the second half is scored, so that every token scored has at
    least half a window before it. With it, each begins `stride` tokens after the one before, and its last `stride`
    tokens are scored. What does not fill a window at the end is left out.
    """
    if stride is None:
        return [Window(b, b + size // 2 + 1, b + size) for b in range(0, n_tokens - size + 1, size)]
    return [Window(b, b + size - stride, b + size) for b in range(0, n_tokens - size + 1, stride)]


def surprise(logits: npt.NDArray[np.float32], token: int) -> float:
    """-log of the probability that softmax over `logits` (float32 [n_vocab]) gives to `token`, in nats."""
    x = logits.astype(np.float64)
    x -= x.max()
    return float(np.log(np.exp(x).sum()) - x[token])


@dataclass
class Tally:
    """Surprises of many tokens, in nats, as sums: nothing of the text is held. `n_bytes`: of these tokens' text."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0
    n_bytes: int = 0

    def add(self, nll: Iterable[float], n_bytes: int) -> None:
        for x in nll:
            self.n += 1
            self.total += x
            self.squares += x * x
        self.n_bytes += n_bytes

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.total / self.n if self.n else math.nan

    @property
    def perplexity(self) -> float:
        """exp of the mean; infinite where no float holds it."""
        return float(np.exp(self.mean)) if self.mean < 700 or math.isnan(self.mean) else math.inf

    @property
    def error(self) -> float:
        """Standard error of the perplexity, to first order: the mean's, times the perplexity."""
        if self.n < 2:
            return math.nan
        return math.sqrt(max(0.0, self.squares / self.n - self.mean**2) / (self.n - 1)) * self.perplexity

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that the text takes per byte, were it coded by the model; None where the tokens have no text."""
        return self.total / math.log(2) / self.n_bytes if self.n_bytes else None


# ---- with a model --------------------------------------------------------------------------------


class Scoring(Turn):
    """A turn that reads: the tokens of a given text from `first` on; `nll` has the surprise of each so far, nats.

    Made by `Engine.score`. Batches count as `result.prefill`, tokens computed one by one as `result.decode`.
    `score_rows`: tokens of a batch that are scored together.
    """

    def __init__(
        self,
        ids: Sequence[int],
        first: int,
        one_by_one: bool,
        sequence: TokenSequence,
        score_rows: int,
        drop_in_prefill: bool,
        cancel: Callable[[], None],
    ) -> None:
        if not 1 <= first < len(ids):
            raise UsageError(f"a text of {len(ids)} tokens, scored from token {first} on: nothing to score")
        if len(ids) > sequence.context.n_ctx:
            raise UsageError(
                f"the text has {len(ids)} tokens, the context holds {sequence.context.n_ctx}: use -c {len(ids)} or more"
            )
        check_ids(ids, sequence.context.n_vocab)
        self.nll: list[float] = []
        self._ids, self._first, self._one_by_one = ids, first, one_by_one
        self._sequence, self._score_rows, self._drop_in_prefill = sequence, score_rows, drop_in_prefill
        super().__init__(cancel, GenerationResult(prompt_tokens=len(ids)))

    def _batches(self) -> Iterable[tuple[int, int]]:
        """Cuts the text, the last token of which only is predicted, into batches."""
        n, first, at = len(self._ids), self._first, 0
        while at < n - 1:
            end = min(at + self._sequence.context.n_batch, n - 1)
            if self._one_by_one:
                end = at + 1 if at >= first - 1 else min(end, first - 1)
            end = min(end, max(at, first - 1) + self._score_rows)
            yield at, end
            at = end

    def _run(self) -> Generator[Token, None, None]:
        sequence, result = self._sequence, self.result
        started, faults = time.perf_counter(), memory.major_faults()
        account = TurnAccount(sequence.graphs.streamer, result.flash_split)
        costs = TokenCosts(sequence.graphs.counters, account.clock, result.flash_split)
        nothing = Cost(StreamCounters(), {}, (0, 0, 0, 0))
        try:
            with self._noting_the_end():
                sequence.begin_turn(account)
                # Nothing is kept from before: the batches, and with them the rounding, are those of this text alone.
                sequence.clear()
                for at, end in self._batches():
                    single = self._one_by_one and at >= self._first - 1
                    skip = max(0, self._first - 1 - at)
                    self._score(at, end, skip, single)
                    took, cost = account.take_graph_s(), costs.take()
                    if single:
                        result.decode, result.decode_s = result.decode.plus(cost.stream), result.decode_s + took
                        result.decode_steps += 1
                    else:
                        result.prefill_tokens = end
                        result.prefill, result.prefill_s = result.prefill.plus(cost.stream), result.prefill_s + took
                    for token in self._ids[at + skip + 1 : end + 1]:
                        index = self._first + len(result.token_ids)
                        result.token_ids.append(token)
                        account.clock.switch(OUTPUT)
                        yield Token(index, token, "", took, took, cost.stream, cost.flash, cost)
                        account.clock.switch(LOOP)
                        # A batch's whole cost sits on its first token.
                        took, cost = 0.0, nothing
                result.stop = "length"
        finally:
            result.total_s = time.perf_counter() - started
            result.major_faults = memory.major_faults() - faults
            self.running = False

    def _score(self, at: int, end: int, skip: int, single: bool) -> None:
        """Decodes tokens `at` to `end`; what is surprising of those that follow the ones after the first `skip`."""
        sequence, n, context = self._sequence, end - at, self._sequence.context
        tokens = np.array(self._ids[at:end], np.int32)
        drop = single or self._drop_in_prefill
        cause = "decode" if single else "prefill"
        try:
            sequence.append(tokens, each=n - skip > 1, skip=skip, drop=drop, cause=cause, for_head=False)
        finally:
            sequence.account.charge("base" if single else "prefill")
        following = self._ids[at + 1 : end + 1]
        if n - skip == 1:
            self.nll.append(surprise(context.logits(), following[skip]))
        elif n > skip:
            self.nll += [surprise(context.logits_of(i), following[i]) for i in range(skip, n)]


def text_bytes(model: llama.Model, tokens: Sequence[int]) -> int:
    """Bytes of the text that `tokens` stand for."""
    return sum(len(llama.piece(model, t)) for t in tokens)
