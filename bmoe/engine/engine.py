"""The engine: opens a model, sizes the cache, and generates. `Engine.open(...)` is the library's front door."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import llama
from ..accounting.counters import StreamCounters
from ..errors import BmoeError
from ..experts import warm_start
from ..experts.budget import CacheDecision, decide
from ..experts.slots import SlotPlan
from ..experts.weights import Weights
from ..gguf.file import ExpertLayer
from ..host import memory
from ..observe.io_trace import IoTracer, io_preamble
from ..observe.route_trace import RouteTracer, route_preamble
from ..observe.traces import Traces
from ..speculation import make_draft_width, make_drafter, mtp
from ..streamer import ExpertCache, Lanes, Streamer
from . import demo
from .cache_opening import CacheState, Grant, OpenCache, open_cache, start_dropping
from .config import EngineConfig, Sampling
from .generation import Drafting, Generation, Hooks
from .graphs import GraphRunner
from .opening import (
    Contexts,
    Overhead,
    Parts,
    Source,
    open_contexts,
    part_tensors,
    read_source,
    refused_direct,
    stream_layout,
)
from .planning import ContextPlan, base_rss, cache_sizes, context_plan
from .request import Request
from .scoring import Scoring
from .sequence import TokenSequence
from .turn import Turn, check_process

if TYPE_CHECKING:
    from ..observe.telemetry import Telemetry

Progress = Callable[[str, int, int], None]
"""Called with a stage ("dense", "prefill"), what is done and the whole; bytes, or tokens for prefill."""


class Engine:
    """One open model. Make it with `Engine.open`; use it as a context manager, or `close()` it.

    One generation at a time; `cancel()` may be called from any thread. Several engines in a process are
    independent of each other. Attributes: `config` (resolved), `arch`, `decision` (the cache and why),
    `layers` (routed experts; empty for a dense model), `load_s`, `notes` (lines worth telling the user), `traces`,
    `preload` (reads ahead after a warm start), `failures` (after `close()`: what could not be written, one line each).
    `sequence` has the tokens that the context holds, `drafting` what drafts and how much of it is verified.
    """

    def __init__(
        self, path: Path, config: EngineConfig, progress: Progress | None = None, grant: Grant = decide
    ) -> None:
        started = time.perf_counter()
        self._process = os.getpid()
        llama.check()
        base_rss()
        self.path = path
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.traces = Traces()
        self.closed = False
        self._progress = progress or (lambda stage, done, whole: None)
        self._hooks = Hooks(self.cancel, self._tell_prefill, self.notes.append, self._telemetry)
        self._turn: Turn | None = None
        with ExitStack() as stack:
            self._open(stack, config, grant)
            self._stack = stack.pop_all()
        self.load_s = time.perf_counter() - started

    @classmethod
    def open(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Progress | None = None,
        grant: Grant = decide,
        **settings: Any,
    ) -> Engine:
        """Opens the GGUF at `model` (None: the bundled demo model) with the settings of `EngineConfig`.

        `progress` is told how far opening and prefill are; `grant` decides the cache's memory (`budget.decide`).
        Raises UsageError, ModelError, MemoryBudgetError or AbiError, each with one line that says what to do.
        """
        return cls(Path(model) if model is not None else demo.model_path(), EngineConfig(**settings), progress, grant)

    # ---- opening --------------------------------------------------------------------------------

    def _open(self, stack: ExitStack, config: EngineConfig, grant: Grant) -> None:
        """Opens part after part; `stack` undoes them in the reverse order, also where one fails."""
        source = read_source(self.path, config)
        self.arch, self.n_used = source.file.arch, source.n_used
        self.lanes = lanes = Lanes([os.fspath(p) for p in source.file.paths], config.io_threads, config.odirect)
        stack.callback(lanes.close)
        stack.callback(self.traces.close)
        self._trace_reads(source, config)
        self.weights = weights = Weights(source.file.paths)
        stack.callback(weights.close)
        overhead = Overhead()
        self.model = model = source.load()
        stack.callback(model.close)
        self.overhead = overhead.measure()
        parts = part_tensors(source, model.tensors)
        self.layers: tuple[ExpertLayer, ...] = parts.layers
        identity = warm_start.identity(source.file, parts.layers) if config.cache_state is not None else {}
        self.file = replace(source.file, header=b"")
        source = replace(source, file=self.file)  # the header is megabytes, and nobody needs it any more
        self._place_weights(source, parts, config)
        threads = config.n_threads()
        # A dense model has one too, without layers: its abort callback is how Ctrl-C and cancel() stop a graph.
        self.streamer = Streamer(lanes, stream_layout(parts.layers, model), threads, config.overlap)
        stack.callback(self.streamer.close)
        shape = context_plan(config, self.file, model.n_vocab)
        contexts = self._open_contexts(stack, source, shape, threads)
        self.config = replace(config, threads=threads, ctx=contexts.target.n_ctx, cache_policy=config.policy)
        head = self._open_head(config, contexts)
        self.drafting = Drafting(
            make_drafter(config.draft, head), make_draft_width(config.draft.policy), contexts.longest
        )
        self._cache = self._open_cache(stack, config, grant) if parts.layers else None
        if config.drop_cold_experts is not None:
            start_dropping(
                config.drop_cold_experts, self._cache, self.n_used, self.streamer, self.path, self.notes.append
            )
        self._trace_routes(config)
        graphs = GraphRunner(
            self.streamer, lanes, weights, self.cache, self.traces, self.arch, self.layers, contexts.target.n_ctx
        )
        self.sequence = TokenSequence(contexts.target, graphs, head, contexts.rows, config.drop_in_prefill)
        self.score_rows = shape.score_rows
        self._state = self._warm_start(stack, config, identity)

    def _place_weights(self, source: Source, parts: Parts, config: EngineConfig) -> None:
        """Dense weights in memory, experts where the streamer finds them."""
        if config.odirect and (refused := refused_direct(source, parts.layers, self.lanes)):
            self.notes.append(f"{refused[0]}: the file system has no working direct I/O, reads are buffered")
        self.weights.place(
            self.model,
            parts.dense,
            parts.experts,
            config.dense_weights,
            self.lanes,
            lambda done, whole: self._progress("dense", done, whole),
        )
        if self.weights.note:
            self.notes.append(self.weights.note)
        if not parts.layers:
            none = "no routed experts (*_exps.weight): a dense model, nothing is streamed"
            self.notes.append(f"{self.path.name}: {none}")
        self.traces.batch("dense", 0, 0)
        if self.traces.io is not None:
            self.traces.io.know(parts.layers)

    def _open_contexts(self, stack: ExitStack, source: Source, shape: ContextPlan, threads: int) -> Contexts:
        """The contexts, with the streamer's hook in their graphs."""
        settings = {
            "n_threads": threads,
            "eval_callback": self.streamer.callback if self.layers else 0,
            "abort_callback": self.streamer.abort_callback,
            "userdata": self.streamer.userdata,
        }
        before = memory.read_process_memory().rss
        contexts = open_contexts(stack, self.model, shape, source.n_heads, settings)
        # llama.cpp zeroes keys, values and states at once; its compute buffers come as they are used.
        grown = memory.read_process_memory().rss - before
        self.buffers = contexts.buffers
        self.zeroed = max(0, min(grown, self.buffers.kv + self.buffers.recurrent))
        return contexts

    def _open_head(self, config: EngineConfig, contexts: Contexts) -> mtp.MtpSource | None:
        """The model's own head as a source of drafts, where it drafts; says where nothing can."""
        if config.draft.types and not contexts.longest:
            none = "--rs-snapshots 0" if not config.rs_snapshots else f"llama.cpp keeps none of {self.arch}"
            self.notes.append(f"nothing is drafted: there are no recurrent states to go back to ({none})")
        if contexts.head is None:
            return None
        width = min(config.draft.draft, contexts.longest)
        return mtp.MtpSource(contexts.head, width, config.draft.mtp_p_min, contexts.target.n_batch)

    def _open_cache(self, stack: ExitStack, config: EngineConfig, grant: Grant) -> OpenCache:
        """The expert cache, of the memory that is left."""
        sizes = cache_sizes(self.layers, self.n_used, self.weights.dense_bytes, self.buffers, self.overhead)
        resident = self.weights.dense_bytes if config.dense_weights in ("anon", "lock") else 0
        return open_cache(
            stack,
            config,
            self.layers,
            self.n_used,
            sizes,
            resident=resident + self.zeroed,
            overhead=self.overhead,
            streamer=self.streamer,
            lanes=self.lanes,
            grant=grant,
            note=self.notes.append,
        )

    def _warm_start(self, stack: ExitStack, config: EngineConfig, identity: dict[str, Any]) -> CacheState | None:
        """Reads ahead what earlier runs have used most, in the background."""
        if config.cache_state is None:
            return None
        if self._cache is None or not self._cache.index.n_slots:
            self.notes.append("--cache-state does nothing: there is no cache of experts")
            return None
        state = CacheState(Path(config.cache_state), identity, self.streamer, self.notes.append)
        if state.known:
            lanes = Lanes(self.lanes.paths, warm_start.LANES, config.odirect and self.lanes.direct)
            stack.callback(lanes.close)
            if self.traces.io is not None:
                self.traces.io.add(lanes, "preload")
            state.preload(stack, lanes, self._cache.plan)
        return state

    def _trace_reads(self, source: Source, config: EngineConfig) -> None:
        if config.io_trace is not None:
            preamble = io_preamble(source.file, self.path.name, _run_facts(config))
            self.traces.io = IoTracer(Path(config.io_trace), self.lanes, preamble)

    def _trace_routes(self, config: EngineConfig) -> None:
        if config.route_trace is not None:
            facts = {**_run_facts(config), "policy": config.policy, "budget_bytes": self.budget_bytes}
            preamble = route_preamble(self.file, self.path.name, self.layers, self.n_used, self.plan, facts)
            self.traces.route = RouteTracer(Path(config.route_trace), self.streamer, self.file, self.layers, preamble)

    # ---- use ------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop_at_end: bool = True,
        script: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        records: bool = False,
    ) -> Generation:
        """Starts a generation: iterate over it for tokens, then read `.result`.

        `prompt`: text, or token ids. `sampling`: greedy without; without a seed one is drawn (`result.seed`).
        `stop_at_end`: stop at an end-of-generation token, else go on to `max_tokens`. `stop`: strings that end the text
        where they begin, or the names of special tokens, which end it where they come. Tokens shared with the sequence
        of the generation before are not computed again.
        `script`: token ids that the model is made to choose, one after the other, while every batch is decoded,
        streamed and rolled back for real: for measurements on a given text; at least `max_tokens` of them.
        `records`: each token has its `TokenRecord`.
        Raises UsageError where the prompt is empty or longer than the context.
        """
        self._take_turn()
        ids = self.tokenize(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        special = {s: llama.special_token(self.model, s) for s in stop}
        request = Request(
            ids,
            max_tokens,
            (sampling or Sampling()).with_seed(),
            stop_at_end,
            script,
            stop,
            {token: s for s, token in special.items() if token is not None},
            records,
        )
        self._turn = generation = Generation(request, self.sequence, self.drafting, self._hooks)
        return generation

    def score(self, ids: Sequence[int], first: int = 1, *, one_by_one: bool = False) -> Scoring:
        """Starts to score a text: how surprised the model is by each of `ids[first:]`, given all before it.

        Iterate over it for the tokens; their surprises, in nats, are in its `nll`. The text is computed from an empty
        sequence in batches, as a prompt is, or from `first` on `one_by_one`, as in decode. `score_rows` of the
        settings is how many tokens of a batch are scored together. Raises UsageError where the text is longer than
        the context or there is nothing to score.
        """
        self._take_turn()
        self._turn = scoring = Scoring(
            [int(t) for t in ids],
            first,
            one_by_one,
            self.sequence,
            self.score_rows,
            self.config.drop_in_prefill,
            self.cancel,
        )
        return scoring

    def _take_turn(self) -> None:
        self._check_open()
        turn = self._turn
        if turn is not None and turn.running:
            if turn.stepping:
                raise BmoeError("a generation is running on this engine in another thread: cancel it first")
            turn.close()  # left in the middle: its consumer has gone
        self.traces.begin_turn()
        self.sequence.graphs.begin_turn()

    def _tell_prefill(self, done: int, whole: int) -> None:
        self._progress("prefill", done, whole)

    def _telemetry(self, steps: int) -> Telemetry:
        # Loaded where it is asked for: other runs keep the memory.
        from ..observe.telemetry import Telemetry

        return Telemetry(self.traces.turn, steps, self.cache, self.budget_bytes, self.weights.visible_dense())

    def cancel(self) -> None:
        """Ends the running generation at the next graph node; callable from any thread."""
        if not self.closed:
            self.sequence.graphs.cancel()

    @property
    def cancelled(self) -> bool:
        """True from `cancel` until the next generation begins."""
        return self.sequence.graphs.cancelled

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`; `special`: the names of control tokens in it stand for these."""
        self._check_open()
        return llama.tokenize(self.model, text, special=special)

    def special_text(self, name: str) -> str:
        """Text of the "bos" or "eos" token, "" where the model has none."""
        self._check_open()
        return llama.special_text(self.model, name)

    @property
    def adds_bos(self) -> bool:
        """True where `tokenize` puts a BOS token first."""
        self._check_open()
        return llama.adds_bos(self.model)

    def counters(self) -> StreamCounters:
        """Totals of the expert stream since opening."""
        return self.sequence.graphs.counters()

    @property
    def cache(self) -> ExpertCache | None:
        """Which experts have slots; None for a dense model."""
        return self._cache.index if self._cache else None

    @property
    def plan(self) -> SlotPlan | None:
        """How the cache is cut; None for a dense model."""
        return self._cache.plan if self._cache else None

    @property
    def decision(self) -> CacheDecision | None:
        """What memory experts have, and why; None for a dense model."""
        return self._cache.decision if self._cache else None

    @property
    def preload(self) -> warm_start.Preloader | None:
        """What reads ahead after a warm start."""
        return self._state.preloader if self._state else None

    @property
    def budget_bytes(self) -> int:
        """Memory granted to experts, bytes."""
        return self.decision.budget if self.decision else 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of slots that hold an expert now."""
        if self.cache is None:
            return 0
        return sum(len(self.cache.resident(i)) * layer.slot_bytes for i, layer in enumerate(self.layers))

    def report_progress(self, stage: str, done: int, whole: int) -> None:
        """Passes progress on to whoever is told of it."""
        self._progress(stage, done, whole)

    def set_progress(self, progress: Progress) -> None:
        """Replaces who is told of progress."""
        self._progress = progress

    def close(self) -> None:
        """Joins the lanes, frees the model and closes its files. May be called twice.

        In a process forked from the engine's it only lets go: what it holds there is a copy without threads.
        """
        if os.getpid() != self._process:
            self.closed = True
            return
        if self._turn is not None:
            self._turn.close()
        if not self.closed and self._state is not None and (failure := self._state.save()):
            self.failures.append(failure)
        self.closed = True
        self._stack.close()
        self.failures += self.traces.failures()

    def _check_open(self) -> None:
        if self.closed:
            raise BmoeError("the engine is closed")
        check_process(self._process)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _run_facts(config: EngineConfig) -> dict[str, object]:
    """What a trace's preamble says of the run."""
    return {
        "overlap": int(config.overlap),
        "io_threads": config.io_threads,
        "ubatch": config.ubatch,
        "draft": ",".join(config.draft.types) or "none",
        "drop_cold_experts": config.drop_cold_experts or 0,
    }
