"""Runs llama.cpp's graphs with the streamer serving their experts, and says why one has stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from .. import llama
from ..accounting.counters import StreamCounters
from ..accounting.timing import GRAPH, LOOP
from ..errors import BmoeError, ReadError, UsageError
from ..experts.weights import Weights
from ..gguf.file import ExpertLayer
from ..observe.traces import Traces
from ..streamer import ExpertCache, Lanes, Streamer
from .account import TurnAccount


class Stopped(Exception):
    """A graph was stopped by a request, not by a fault."""


class GraphRunner:
    """What every graph of an engine goes through, its target's and its draft source's.

    `cache`: None where nothing is cached; `n_ctx`: tokens of the context, for its message.
    """

    def __init__(
        self,
        streamer: Streamer,
        lanes: Lanes,
        weights: Weights,
        cache: ExpertCache | None,
        traces: Traces,
        arch: str,
        layers: Sequence[ExpertLayer],
        n_ctx: int,
    ) -> None:
        self.streamer, self.lanes, self.cache = streamer, lanes, cache
        self._weights, self._traces = weights, traces
        self._arch, self._layers, self._n_ctx = arch, layers, n_ctx
        self._cancelled = threading.Event()

    # ---- stopping ---------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Stops the graph that runs at its next node, and lets none follow; callable from any thread."""
        self._cancelled.set()
        self.streamer.request_abort()

    def begin_turn(self) -> None:
        """Forgets a request to stop that came after the last graph."""
        self._cancelled.clear()
        self.streamer.take_interrupt()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check_cancelled(self) -> None:
        """Raises Stopped after `cancel`."""
        if self._cancelled.is_set():
            raise Stopped

    # ---- running ----------------------------------------------------------------------------------

    def run(
        self,
        account: TurnAccount,
        cause: str,
        position: int,
        n_tokens: int,
        dropping: bool,
        decode: Callable[..., int],
        *arguments: object,
    ) -> int:
        """Has `decode(*arguments)` run the target's graph for `n_tokens` tokens at `position`; llama_decode's code.

        `cause`: what traces call the batch, "prefill", "decode" or "recovery"; `dropping`: cold experts may be
        dropped, where the engine does that.
        """
        self.streamer.set_dropping(dropping)
        # In this order: what lies between the two is of the graph's account, as the streamer's own times are.
        account.clock.switch(GRAPH)
        self.streamer.begin_graph()
        try:
            return decode(*arguments)
        finally:
            account.clock.switch(LOOP)
            if self._traces:
                self._traces.batch(cause, position, n_tokens)

    def run_head(self, graph: Callable[[], int], wanted: bool, account: TurnAccount) -> None:
        """Runs a graph of the draft source's own (`mtp.RunGraph`): all it reads is charged to the source."""
        self.check_cancelled()
        self.streamer.skip = not wanted
        self.streamer.set_dropping(wanted)
        self.streamer.begin_graph(drafting=True)
        try:
            code = graph()
        finally:
            self.streamer.skip = False
            account.charge("draft_source")
        if code:
            self.fail(code)
        if fault := self.fault():
            raise ReadError(fault)
        self.raise_interrupt()

    def fault(self) -> str:
        """What is wrong with a map that the last graph has computed from, "" where nothing is."""
        return self._weights.fault()

    def raise_interrupt(self) -> None:
        """Raises a Ctrl-C that the graph's last nodes caught, too late to stop it."""
        if self.streamer.interrupt_pending:
            raise self.streamer.take_interrupt() or KeyboardInterrupt

    def fail(self, code: int) -> NoReturn:
        """Says why a graph that llama.cpp ended with `code` has stopped."""
        interrupt = self.streamer.take_interrupt()
        failure, unweighted = self.lanes.failure(), self.streamer.take_drop_fault()
        self.streamer.reset(failure is not None)
        if failure is not None:
            self.lanes.clear_failure()
            raise ReadError(failure)
        if interrupt is not None:
            raise interrupt
        if unweighted is not None:
            raise UsageError(
                f"--drop-cold-experts: {self._arch} does not weight its experts' outputs in "
                f"{self._layers[unweighted].block}, so none can be dropped: leave the flag out"
            )
        if code == llama.ABORTED or self.cancelled:
            raise Stopped
        if code == 1:
            raise BmoeError(f"the context of {self._n_ctx} tokens is full: use a larger -c")
        raise BmoeError(f"llama.cpp's decode failed with code {code}")

    # ---- what the cache is told -------------------------------------------------------------------

    def expect_prompt(self, left: int) -> None:
        """Tells the cache of the next batch: so many tokens of the prompt follow it; -1: it is decode's."""
        if self.cache is not None:
            self.cache.prompt(left)
            self._traces.note_prompt(left)

    def reject(self, n: int) -> None:
        """Tells the cache that the last `n` tokens of the batch before were not accepted."""
        if self.cache is not None:
            self.cache.reject(n)
            self._traces.note_event(f"reject:{n}")

    def counters(self) -> StreamCounters:
        """Totals of the expert stream since opening."""
        return StreamCounters(**self.streamer.counters(), **self.lanes.counters())
