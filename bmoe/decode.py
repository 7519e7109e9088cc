"""The decode loop: prefill, then one token after the other, until a limit, an end token or a stop request."""

from __future__ import annotations

import codecs
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import numpy as np

from . import llama, osmem
from .config import Sampling
from .errors import BmoeError, UsageError
from .metrics import GenerationResult, Token

if TYPE_CHECKING:
    from .engine import Engine


class Generation:
    """An iterator of `Token`; `result` is complete once it has ended, also where it ended early.

    A generation stopped by `Engine.cancel()` ends with `result.stop == "cancelled"`. Ctrl-C raises
    KeyboardInterrupt out of the iterator, and a failed read raises ReadError; the engine stays usable.
    """

    def __init__(self, engine: Engine, ids: list[int], max_tokens: int, sampling: Sampling, stop_at_end: bool) -> None:
        n_ctx = engine.context.n_ctx
        if not ids:
            raise UsageError("the prompt is empty: give at least one token")
        if max_tokens < 0:
            raise UsageError(f"--n-predict: {max_tokens} is negative; give 0 or more tokens")
        if len(ids) > n_ctx:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, the context holds {n_ctx}: use -c {len(ids) + max_tokens} or more"
            )
        bad = next((t for t in ids if not 0 <= t < engine.context.n_vocab), None)
        if bad is not None:
            raise UsageError(f"token id {bad} is not in the vocabulary of {engine.context.n_vocab}")
        self.result = GenerationResult(prompt_tokens=len(ids))
        self.running = True
        self._engine = engine
        self._steps = self._run(ids, max_tokens, sampling, stop_at_end)

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        return next(self._steps)

    def close(self) -> None:
        """Ends it where it is."""
        self._steps.close()
        self.running = False

    def _run(
        self, ids: list[int], max_tokens: int, sampling: Sampling, stop_at_end: bool
    ) -> Generator[Token, None, None]:
        engine, result = self._engine, self.result
        context, model = engine.context, engine.model
        started, faults = time.perf_counter(), osmem.major_faults()
        zero = engine.counters()
        chain = (
            None
            if sampling.greedy
            else llama.SamplerChain(sampling.temp, sampling.top_k, sampling.top_p, sampling.seed)
        )
        text = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            result.reused_tokens = self._keep_prefix(ids)
            self._prefill(ids, result.reused_tokens)
            mark = engine.counters()
            result.prefill, result.prefill_s = mark - zero, time.perf_counter() - started
            asked, decode_s = started, 0.0
            for index in range(max_tokens):
                if chain:
                    token = chain.sample(context)
                    end, raw = llama.is_end(model, token), llama.piece(model, token)
                else:
                    token, end, raw = context.greedy()
                result.token_ids.append(token)
                piece = "" if end and stop_at_end else text.decode(raw)
                result.text += piece
                now = time.perf_counter()
                if index == 0:
                    result.ttft_s = now - started
                counters = engine.counters()
                yield Token(index, token, piece, now - asked, decode_s, counters - mark)
                mark, asked = counters, time.perf_counter()
                if end and stop_at_end:
                    result.stop = "end"
                    break
                if index + 1 == max_tokens or len(engine.cached_ids) >= context.n_ctx:
                    result.stop = "length"
                    break
                t0 = time.perf_counter()
                self._decode(np.array([token], np.int32))
                decode_s = time.perf_counter() - t0
                result.decode_s += decode_s
                result.decode_steps += 1
            result.stop = result.stop or "length"
        except _Stopped:
            result.stop = "cancelled"
        except KeyboardInterrupt:
            result.stop = "interrupted"
            raise
        finally:
            if chain:
                chain.close()
            result.text += text.decode(b"", final=True)
            result.decode = engine.counters() - zero - result.prefill
            result.total_s = time.perf_counter() - started
            result.major_faults = osmem.major_faults() - faults
            self.running = False

    def _keep_prefix(self, ids: list[int]) -> int:
        """Drops what the sequence does not share with `ids`; how many tokens stay."""
        context, old = self._engine.context, self._engine.cached_ids
        # At least one token is computed, for its logits.
        limit = min(len(old), len(ids) - 1)
        same = next((i for i in range(limit) if old[i] != ids[i]), limit)
        if same < len(old):
            # A sliding window that has dropped its beginning, or a recurrent state, cannot go back.
            if same == 0 or context.first_kept() > 0 or not context.truncate(same):
                context.clear()
                same = 0
            del old[same:]
        return same

    def _prefill(self, ids: list[int], done: int) -> None:
        step = min(self._engine.config.ubatch, self._engine.context.n_ctx)
        whole = len(ids) - done
        for at in range(done, len(ids), step):
            self._engine.report_progress("prefill", at - done, whole)
            self._decode(np.array(ids[at : at + step], np.int32))
        self._engine.report_progress("prefill", whole, whole)

    def _decode(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        """Appends tokens to the sequence, or leaves it as it was and says why not."""
        engine = self._engine
        if engine.cancelled:
            raise _Stopped
        code = engine.context.decode(tokens)
        if code == 0:
            engine.cached_ids.extend(int(t) for t in tokens)
            return
        self._recover()
        if engine.streamer is not None:
            interrupt = engine.streamer.take_interrupt()
            failure = engine.lanes.failure()
            engine.streamer.reset(failure is not None)
            if failure is not None:
                try:
                    engine.lanes.raise_failure()
                finally:
                    engine.lanes.clear_failure()
            if interrupt is not None:
                raise interrupt
            if code == llama.ABORTED or engine.cancelled:
                raise _Stopped
        if code == 1:
            raise BmoeError(f"the context of {engine.context.n_ctx} tokens is full: use a larger -c")
        raise BmoeError(f"llama.cpp's decode failed with code {code}")

    def _recover(self) -> None:
        """Takes back what a stopped batch has put into the sequence."""
        engine = self._engine
        if not engine.context.truncate(len(engine.cached_ids)):
            engine.context.clear()
            engine.cached_ids.clear()


class _Stopped(Exception):
    """The batch was stopped by a request, not by a fault."""
