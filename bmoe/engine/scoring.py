"""Scoring a given text: the surprise of each token, and what a whole text of them says (perplexity)."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import llama
from ..accounting.bytes_by_cause import FlashSplit
from ..accounting.results import Token
from ..errors import UsageError
from ..host import memory
from .config import Sampling
from .generation import Generation, _Stopped

if TYPE_CHECKING:
    from .engine import Engine


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


class Scoring(Generation):
    """An iterator over the tokens of a given text from `first` on; `nll` holds the surprise of each so far, nats.

    Made by `Engine.score`, and stopped, closed and interrupted as a generation is. Batches count as `result.prefill`,
    tokens computed one by one as `result.decode`.
    """

    _feeds_head = False

    def __init__(self, engine: Engine, ids: list[int], first: int, one_by_one: bool) -> None:
        if not 1 <= first < len(ids):
            raise UsageError(f"a text of {len(ids)} tokens, scored from token {first} on: nothing to score")
        if len(ids) > engine.context.n_ctx:
            raise UsageError(
                f"the text has {len(ids)} tokens, the context holds {engine.context.n_ctx}: use -c {len(ids)} or more"
            )
        super().__init__(engine, ids, len(ids) - first, Sampling(), stop_at_end=False)
        self.nll: list[float] = []
        self._one_by_one = one_by_one

    def _batches(self, n: int, first: int) -> Iterable[tuple[int, int]]:
        """Cuts tokens 0 to `n` - 1, the last of which only is predicted, into batches."""
        engine, at = self._engine, 0
        while at < n - 1:
            end = min(at + engine.context.n_batch, n - 1)
            if self._one_by_one:
                end = at + 1 if at >= first - 1 else min(end, first - 1)
            end = min(end, max(at, first - 1) + engine.score_rows)
            yield at, end
            at = end

    def _run(
        self, ids: list[int], max_tokens: int, sampling: Sampling, stop_at_end: bool
    ) -> Generator[Token, None, None]:
        engine, result = self._engine, self.result
        started, faults, zero = time.perf_counter(), memory.major_faults(), engine.counters()
        first, mark, charged = len(ids) - max_tokens, zero, FlashSplit()
        try:
            # Nothing is kept from before: the batches, and with them the rounding, are those of this text alone.
            engine.in_step = False
            engine.cached_ids.clear()
            engine.context.clear()
            if engine.head is not None:
                engine.head.resume(0)
            engine.in_step = True
            for at, end in self._batches(len(ids), first):
                single = self._one_by_one and at >= first - 1
                skip = max(0, first - 1 - at)
                self._score(ids[at:end], skip, ids[at + 1 : end + 1], single)
                took = self._take_graph_s()
                since, mark = mark, engine.counters()
                if single:
                    result.decode, result.decode_s = result.decode.plus(mark - since), result.decode_s + took
                    result.decode_steps += 1
                else:
                    result.prefill_tokens = end
                    result.prefill, result.prefill_s = result.prefill.plus(mark - since), result.prefill_s + took
                for i in range(at + skip, end):
                    flash, charged = result.flash_split.since(charged), result.flash_split.copy()
                    # A batch's whole cost sits on its first token.
                    cost, spent = (mark - since, took) if i == at + skip else (mark - mark, 0.0)
                    token = ids[i + 1]
                    result.token_ids.append(token)
                    yield Token(i + 1, token, "", spent, spent, cost, flash)
            result.stop = "length"
        except _Stopped:
            result.stop = "cancelled"
        except KeyboardInterrupt:
            result.stop = "interrupted"
            raise
        except Exception:
            result.stop = "error"
            raise
        finally:
            result.total_s = time.perf_counter() - started
            result.major_faults = memory.major_faults() - faults
            self.running = False

    def _score(self, tokens: Sequence[int], skip: int, following: Sequence[int], single: bool) -> None:
        """Decodes one batch; what is surprising of the tokens that follow those after the first `skip`."""
        engine = self._engine
        drop = single or engine.config.drop_in_prefill
        scored, cause = skip < len(tokens), "decode" if single else "prefill"
        try:
            self._decode(np.array(tokens, np.int32), each=len(tokens) - skip > 1, skip=skip, drop=drop, cause=cause)
        finally:
            self._width = 0
            total, again = engine.streamer.take_positions(1)
            self.result.flash_split.charge("base" if single else "prefill", total[0], again[0])
        if not scored:
            return
        if len(tokens) - skip == 1:
            self.nll.append(surprise(engine.context.logits(), following[skip]))
            return
        for i in range(skip, len(tokens)):
            self.nll.append(surprise(engine.context.logits_of(i), following[i]))


def text_bytes(engine: Engine, tokens: Sequence[int]) -> int:
    """Bytes of the text that `tokens` stand for."""
    return sum(len(llama.piece(engine.model, t)) for t in tokens)
