"""A generation: prefill, then verify steps until a limit, an end token or a stop request."""

from __future__ import annotations

import codecs
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from ..accounting.counters import StreamCounters
from ..accounting.results import GenerationResult, Token
from ..accounting.timing import DRAFT, GRAPH, LOOP, OUTPUT, Clock
from ..accounting.token_cost import Meter
from ..errors import BmoeError, ReadError, UsageError
from ..host import memory
from ..llama import llama
from ..speculation import mtp
from ..speculation.verify import Choice, Step, verify_steps
from .config import Sampling
from .stop_strings import StopStrings

if TYPE_CHECKING:
    from ..observe.recorder import Recorder
    from .engine import Engine

IntArray = npt.NDArray[np.int32]


class Generation:
    """An iterator of `Token`; `result` is complete once it has ended, also where it ended early.

    A generation stopped by `Engine.cancel()` ends with `result.stop == "cancelled"`. Ctrl-C raises
    KeyboardInterrupt out of the iterator, and a failed read raises ReadError; the engine stays usable.
    """

    _feeds_head = True

    def __init__(
        self,
        engine: Engine,
        ids: list[int],
        max_tokens: int,
        sampling: Sampling,
        stop_at_end: bool,
        script: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        records: bool = False,
    ) -> None:
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
        if not sampling.greedy and engine.drafter.name != "none":
            raise UsageError(f"--temp {sampling.temp}: speculation needs greedy decoding; drop --temp or --spec-type")
        if script is not None and len(script) < max_tokens:
            raise UsageError(f"the script has {len(script)} tokens, {max_tokens} are asked for")
        self._stops = StopStrings(stop)
        self.result = GenerationResult(prompt_tokens=len(ids))
        self.result.spec.type = engine.drafter.name
        self.running = True
        self._lock = threading.Lock()
        self._stepper = 0  # the thread that is inside `next`
        self._closing = False
        self._engine = engine
        self._chain: llama.SamplerChain | None = None
        self._width = 0
        self._ahead = engine.streamer.read_ahead_bytes()
        self._records = records
        self._clock = Clock()
        self._graph_ns = 0
        self._script = script
        self._prompt_len = len(ids)
        self._steps = self._run(ids, max_tokens, sampling, stop_at_end)

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        with self._lock:
            if self._closing:
                raise StopIteration
            self._stepper = threading.get_ident()
            try:
                return next(self._steps)
            finally:
                self._stepper = 0

    @property
    def stepping(self) -> bool:
        """True while a thread is inside `next`."""
        return self._lock.locked()

    def close(self) -> None:
        """Ends it where it is; from another thread, after stopping the step that runs."""
        if self._stepper == threading.get_ident():
            raise BmoeError("a generation cannot be closed from inside one of its own steps: use cancel()")
        if not self.running:
            return
        self._closing = True
        if self._lock.locked():
            self._engine.cancel()
        with self._lock:
            self._steps.close()
            self.result.stop = self.result.stop or "cancelled"
            self.running = False

    def _run(
        self, ids: list[int], max_tokens: int, sampling: Sampling, stop_at_end: bool
    ) -> Generator[Token, None, None]:
        engine, result = self._engine, self.result
        started, faults = time.perf_counter(), memory.major_faults()
        self._chain = (
            None
            if sampling.greedy
            else llama.SamplerChain(sampling.temp, sampling.top_k, sampling.top_p, sampling.seed)
        )
        clock = self._clock = Clock()
        meter = Meter(engine.counters, clock, result.flash_split)
        zero, recorder = meter.start, None
        text = codecs.getincrementaldecoder("utf-8")("replace")
        pieces: list[str] = []
        prefilled, stops = False, self._stops

        def emit(choice: Choice, decode_s: float, step: Step | None) -> Token:
            """The token of one choice, its text decoded, its cost what has passed since the one before.

            `step`: what has decoded it, where it is the first token of that; None for all others.
            """
            index = len(result.token_ids)
            piece = "" if choice.end and stop_at_end else stops.feed(text.decode(choice.text))
            pieces.append(piece)
            host = recorder.sample() if recorder else None
            cost = meter.take()
            if not index:
                result.first_time = cost.time
                meter.begin_decode()
            record = recorder.record(index, choice.id, cost, step, host) if recorder and host else None
            result.token_ids.append(choice.id)
            wall_s = (sum(cost.clock) - cost.clock[OUTPUT]) / 1e9
            # Prefill has paid for the first token: only its record says so.
            stream = cost.stream if index else StreamCounters()
            clock.switch(OUTPUT)
            return Token(index, choice.id, piece, wall_s, decode_s, stream, cost.flash, cost, record)

        def ended(choice: Choice) -> bool:
            """Whether the text ends with this choice; then notes why."""
            if choice.end and stop_at_end:
                result.stop = "end"
            elif stops.hit:
                result.stop, result.stop_string = "stop", stops.hit
            return bool(result.stop)

        try:
            if self._records:
                recorder = _recorder(engine, max_tokens)
            if engine.head is not None:
                engine.head.run_graph = self.run_head
            clock.switch(DRAFT)
            engine.drafter.begin(np.array(ids, np.int32))
            clock.switch(LOOP)
            result.reused_tokens = self._keep_prefix(ids)
            self._prefill(ids, result.reused_tokens)
            result.prefill, result.prefill_s = engine.counters() - zero, time.perf_counter() - started
            prefilled = True
            self._take_graph_s()
            if max_tokens == 0:
                result.stop = "length"
                return
            first = self._choose()
            result.ttft_s = time.perf_counter() - started
            decode_faults, decode_cpu = memory.major_faults(), time.process_time()
            yield emit(first, 0.0, None)
            clock.switch(LOOP)
            if ended(first):
                return
            engine.pace.begin()
            steps = verify_steps(
                self, engine.drafter, list(ids), first, max_tokens - 1, engine.widest_draft, engine.pace, clock
            )
            for step in steps:
                result.spec.count(step.drafted, step.accepted, len(step.confirmed))
                took = self._take_graph_s()
                result.decode_s += took
                result.decode_steps += 1
                self._charge(step.accepted)
                for i, choice in enumerate(step.confirmed):
                    # A group's whole cost sits on its first token.
                    yield emit(choice, 0.0 if i else took, None if i else step)
                    clock.switch(LOOP)
                    if ended(choice):
                        return
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
            if self._chain:
                self._chain.close()
            self._charge(0)
            result.text = "".join(pieces) + stops.feed(text.decode(b"", final=True)) + stops.finish()
            result.total_s = time.perf_counter() - started
            if prefilled:
                result.decode = engine.counters() - zero - result.prefill
            else:
                result.prefill, result.prefill_s = engine.counters() - zero, result.total_s
            result.major_faults = memory.major_faults() - faults
            if result.token_ids:
                result.decode_time = meter.decode_time()
                result.spec.draft_s = result.decode_time.draft / 1e9
                result.decode_faults = memory.major_faults() - decode_faults
                result.decode_cpu_s = time.process_time() - decode_cpu
            if recorder:
                recorder.close()
            self.running = False

    # ---- the target that `verify_steps` drives ----------------------------------------------------

    def room(self) -> int:
        """Positions that the context still has."""
        return self._engine.context.n_ctx - len(self._engine.cached_ids)

    def decode(self, tokens: IntArray) -> list[Choice]:
        """Appends the confirmed token and its drafts; what the model chooses after each of them."""
        head = self._engine.head
        if head is not None and head.behind > mtp.WIDTH:
            # Not asked for long: others have drafted, or it does not pay, and then neither does catching up.
            if self._engine.pace.ready():
                self._feed_head()
            elif head.behind >= head.limit:
                head.skip()
        if len(tokens) == 1:
            self._decode(tokens)
            return [self._choose()]
        self._decode(tokens, each=True)
        if self._script is not None:
            return [self._scripted(i + 1 - len(tokens)) for i in range(len(tokens))]
        return [Choice(*self._engine.context.greedy(i)) for i in range(len(tokens))]

    def drop(self, n: int) -> None:
        """Takes the rejected tail back; where this kind of memory refuses, decodes the rest of the sequence again."""
        engine, result = self._engine, self.result
        engine.in_step = False
        del engine.cached_ids[-n:]
        engine.reject_in_cache(n)
        kept = list(engine.cached_ids)
        if engine.head is not None:
            engine.head.drop(len(kept))
        if engine.context.truncate(len(kept)):
            engine.in_step = True
            return
        started, before = time.perf_counter(), engine.counters().bytes
        self._charge(self._width - 1 - n)
        if not result.spec.recoveries:
            engine.notes.append("this model's memory cannot take rejected drafts back: the sequence is decoded again")
        engine.cached_ids.clear()
        engine.context.clear()
        self._prefill(kept, 0, cause="recovery")
        result.spec.recoveries += 1
        result.spec.recovery_s += time.perf_counter() - started
        result.spec.recovery_bytes += engine.counters().bytes - before

    def _choose(self) -> Choice:
        """The next token after the last decoded one."""
        context, model = self._engine.context, self._engine.model
        if self._script is not None:
            return self._scripted(0)
        if self._chain is None:
            return Choice(*context.greedy())
        token = self._chain.sample(context)
        return Choice(token, llama.is_end(model, token), llama.piece(model, token))

    def _scripted(self, back: int) -> Choice:
        """What the script chooses after the last decoded token, or `-back` places before it."""
        assert self._script is not None
        at = len(self._engine.cached_ids) - self._prompt_len + back
        # A rejected draft reaches past the end of the script: what is chosen there does not matter.
        token = self._script[at] if at < len(self._script) else self._script[-1]
        return Choice(token, llama.is_end(self._engine.model, token), llama.piece(self._engine.model, token))

    def _charge(self, accepted: int) -> None:
        """Charges what the last batch has read, by position, to its causes."""
        if self._width:
            self.result.flash_split.charge_batch(*self._engine.streamer.take_positions(self._width), accepted)
            self._charge_ahead()
        self._width = 0

    def _charge_ahead(self) -> None:
        """Charges what was read ahead since the last call."""
        split, now, before = self.result.flash_split, self._engine.streamer.read_ahead_bytes(), self._ahead
        self._ahead = now
        for what in ("used", "wasted"):
            again = f"{what}_rereads"
            split.charge(f"prefetch_{what}", now[what] - before[what], now[again] - before[again])

    def _keep_prefix(self, ids: list[int]) -> int:
        """Drops what the sequence does not share with `ids`; how many tokens stay."""
        engine = self._engine
        context, old = engine.context, engine.cached_ids
        if not engine.in_step:
            self._recover()
        # At least one token is computed, for its logits.
        limit = min(len(old), len(ids) - 1)
        same = next((i for i in range(limit) if old[i] != ids[i]), limit)
        if engine.head is not None:
            same = engine.head.resume(same)
        if same < len(old):
            engine.in_step = False
            del old[same:]
            # A sliding window that has dropped its beginning, or a recurrent state, cannot go back.
            if same == 0 or context.first_kept() > 0 or not context.truncate(same):
                old.clear()
                context.clear()
            engine.in_step = True
        return len(old)

    def _prefill(self, ids: list[int], done: int, cause: str = "prefill") -> None:
        engine = self._engine
        step = engine.context.n_batch
        whole = len(ids) - done
        for at in range(done, len(ids), step):
            engine.report_progress("prefill", at - done, whole)
            engine.tell_cache(max(0, len(ids) - at - step))
            try:
                self._decode(np.array(ids[at : at + step], np.int32), drop=engine.config.drop_in_prefill, cause=cause)
                if cause == "prefill":
                    self.result.prefill_tokens = min(at + step, len(ids)) - done
            finally:
                engine.tell_cache(-1)
                self._width = 0
                total, again = engine.streamer.take_positions(1)
                self.result.flash_split.charge(cause, total[0], again[0])
                self._charge_ahead()
            if engine.head is not None:
                self._feed_head()
        engine.report_progress("prefill", whole, whole)

    def _decode(
        self, tokens: IntArray, each: bool = False, skip: int = 0, drop: bool = True, cause: str = "decode"
    ) -> None:
        """Appends tokens to the sequence, or leaves it as it was and says why not.

        `each`: logits of every one are kept, but for the first `skip`; `drop`: cold experts may be dropped, where the
        engine does that; `cause`: what its traces call the batch, "prefill", "decode" or "recovery".
        """
        engine = self._engine
        if engine.cancelled:
            raise _Stopped
        self._width = len(tokens)
        context = engine.context
        engine.in_step = False
        engine.streamer.set_dropping(drop)
        # In this order: what lies between the two is of the graph's account, as the streamer's own times are.
        self._clock.switch(GRAPH)
        engine.streamer.begin_graph()
        try:
            code = context.decode_each(tokens, len(engine.cached_ids), skip) if each else context.decode(tokens)
        finally:
            self._clock.switch(LOOP)
            if engine.traces:
                engine.traces.batch(cause, len(engine.cached_ids), len(tokens))
        if code == 0:
            if engine.head is not None and self._feeds_head:
                engine.head.take(len(engine.cached_ids), engine.target_rows.last(len(tokens)))
            engine.cached_ids.extend(tokens.tolist())
            engine.in_step = True
            if fault := engine.weights.fault():
                engine.cached_ids.clear()
                engine.context.clear()
                raise ReadError(fault)
            self._look_for_interrupt()
            return
        self._recover()
        self._give_up(code)

    def _feed_head(self) -> None:
        """The head catches up with the sequence."""
        assert self._engine.head is not None
        self._clock.switch(DRAFT)
        self._engine.head.feed(self._engine.cached_ids)
        self._clock.switch(LOOP)

    def _take_graph_s(self) -> float:
        """Seconds in the target's graphs since the last call."""
        before, self._graph_ns = self._graph_ns, self._clock.totals[GRAPH]
        return (self._graph_ns - before) / 1e9

    def run_head(self, graph: Callable[[], int], wanted: bool) -> None:
        """Runs a graph of the draft source's own (`mtp.RunGraph`): all it reads is charged to the source."""
        engine = self._engine
        if engine.cancelled:
            raise _Stopped
        engine.streamer.skip = not wanted
        engine.streamer.set_dropping(wanted)
        engine.streamer.begin_graph(drafting=True)
        try:
            code = graph()
        finally:
            engine.streamer.skip = False
            total, again = engine.streamer.take_positions(1)
            self.result.flash_split.charge("draft_source", total[0], again[0])
            self._charge_ahead()
        if code:
            self._give_up(code)
        if fault := engine.weights.fault():
            raise ReadError(fault)
        self._look_for_interrupt()

    def _look_for_interrupt(self) -> None:
        """Raises a Ctrl-C that the graph's last nodes caught, too late to stop it."""
        streamer = self._engine.streamer
        if streamer.interrupt_pending:
            raise streamer.take_interrupt() or KeyboardInterrupt

    def _give_up(self, code: int) -> NoReturn:
        """Says why a graph that llama.cpp ended with `code` has stopped."""
        engine = self._engine
        interrupt = engine.streamer.take_interrupt()
        failure, unweighted = engine.lanes.failure(), engine.streamer.take_drop_fault()
        engine.streamer.reset(failure is not None)
        if failure is not None:
            engine.lanes.clear_failure()
            raise ReadError(failure)
        if interrupt is not None:
            raise interrupt
        if unweighted is not None:
            raise UsageError(
                f"--drop-cold-experts: {engine.arch} does not weight its experts' outputs in "
                f"{engine.layers[unweighted].block}, so none can be dropped: leave the flag out"
            )
        if code == llama.ABORTED or engine.cancelled:
            raise _Stopped
        if code == 1:
            raise BmoeError(f"the context of {engine.context.n_ctx} tokens is full: use a larger -c")
        raise BmoeError(f"llama.cpp's decode failed with code {code}")

    def _recover(self) -> None:
        """Takes back what a stopped batch has put into the sequence.

        Also after an exception from a signal handler that came between a graph and its account: `in_step` says
        whether `cached_ids` is what the context holds.
        """
        engine = self._engine
        # A recurrent state may have moved on in the middle of the batch: no snapshot of it can be trusted.
        if engine.context.recurrent or not engine.context.truncate(len(engine.cached_ids)):
            engine.cached_ids.clear()
            engine.context.clear()
        engine.in_step = True


def _recorder(engine: Engine, max_tokens: int) -> Recorder:
    # Loaded where it is asked for: other runs keep the memory.
    from ..observe.recorder import Recorder

    return Recorder(engine, max_tokens)


class _Stopped(Exception):
    """The batch was stopped by a request, not by a fault."""
