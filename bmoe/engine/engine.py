"""The engine: opens a model, sizes the cache, and generates. `Engine.open(...)` is the library's front door."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..accounting.counters import StreamCounters
from ..errors import BmoeError, ModelError, UsageError
from ..experts import slots, warm_start
from ..experts.budget import CacheDecision, advice, decide
from ..experts.weights import Weights
from ..gguf.file import ExpertLayer, expert_layers, open_model_file
from ..host import _memory, memory
from ..llama import llama
from ..llama.head import HeadContext, TargetRows
from ..observe.tracing import IoTracer, RouteTracer, Traces, io_preamble, route_preamble
from ..speculation import mtp
from ..speculation.draft_width import make_pace
from ..speculation.drafting import make_drafter
from ..streamer import _cache, _reads, _streamer
from . import demo
from .config import EngineConfig, Sampling
from .generation import Generation
from .planning import (
    ALLOWANCE,
    ContextPlan,
    base_rss,
    cache_sizes,
    context_plan,
    expert_override,
    experts_used,
    spare_bytes,
)
from .scoring import Scoring

FEW_EXPERTS = 4
"""Experts per token up to which dropping one is warned about: each carries a quarter of the weight or more."""
MAX_READ_AHEAD = 32
"""Spare slots of each size class for what is read ahead, at most: twice what a token routes in a layer."""
_POPULATE_STEP = 32 << 20

Progress = Callable[[str, int, int], None]
"""Called with a stage ("dense", "prefill"), what is done and the whole; bytes, or tokens for prefill."""


class Engine:
    """One open model. Make it with `Engine.open`; use it as a context manager, or `close()` it.

    One generation at a time; `cancel()` may be called from any thread. Several engines in a process are
    independent of each other. Attributes: `config` (resolved), `arch`, `decision` (the cache and why),
    `layers` (routed experts; empty for a dense model), `load_s`, `notes` (lines worth telling the user), `traces`,
    `preload` (reads ahead after a warm start), `failures` (after `close()`: what could not be written, one line each).
    """

    def __init__(self, path: Path, config: EngineConfig, progress: Progress | None = None) -> None:
        started = time.perf_counter()
        llama.check()
        base_rss()
        self.path = path
        self.notes: list[str] = []
        # The tokens that the context holds; `in_step` is False while a change of it is under way.
        self.cached_ids: list[int] = []
        self.in_step = True
        self.traces = Traces()
        self.preload: warm_start.Preloader | None = None
        self._cancelled = threading.Event()
        self._progress = progress or (lambda stage, done, whole: None)
        self._busy: Generation | None = None
        self.failures: list[str] = []
        self._state: tuple[Path, dict[str, Any], warm_start.Counts | None] | None = None
        self.closed = False
        with ExitStack() as stack:
            self._open(stack, path, config)
            self._stack = stack.pop_all()
        self.load_s = time.perf_counter() - started

    @classmethod
    def open(
        cls, model: str | os.PathLike[str] | None = None, *, progress: Progress | None = None, **settings: Any
    ) -> Engine:
        """Opens the GGUF at `model` (None: the bundled demo model) with the settings of `EngineConfig`.

        Raises UsageError, ModelError, MemoryBudgetError or AbiError, each with one line that says what to do.
        """
        return cls(Path(model) if model is not None else demo.model_path(), EngineConfig(**settings), progress)

    # ---- opening --------------------------------------------------------------------------------

    def _open(self, stack: ExitStack, path: Path, config: EngineConfig) -> None:
        file = open_model_file(path)
        self.file = file
        self.arch = file.arch
        overrides = expert_override(config, file)
        n_heads = mtp.count_heads(file) if "mtp" in config.draft.types else 0
        lanes = _reads.Lanes([os.fspath(p) for p in file.paths], config.io_threads, config.odirect)
        stack.callback(lanes.close)
        stack.callback(self.traces.close)
        if config.io_trace is not None:
            self.traces.io = IoTracer(
                Path(config.io_trace), lanes, io_preamble(file, path.name, self._run_facts(config))
            )
        weights = Weights(file.paths)
        stack.callback(weights.close)
        before = memory.read_process_memory().rss
        model = llama.load_model(file.header, file.virtual_size, str(path), overrides, load_mtp=n_heads > 0)
        stack.callback(model.close)
        _memory.trim_heap()
        # The interpreter, its libraries and the vocabulary: what else this process holds for this model.
        self.overhead = base_rss() + max(0, memory.read_process_memory().rss - before)
        self.lanes, self.weights, self.model = lanes, weights, model

        layers = expert_layers(file.tensors, model.tensors)
        self.layers: tuple[ExpertLayer, ...] = layers
        identity = warm_start.identity(file, layers) if config.cache_state is not None else {}
        self.file = file = replace(file, header=b"")
        self._verify_direct(config)
        expert_names = {t.name for layer in layers for t in layer.tensors}
        loaded = [t for t in file.tensors if t.name in model.tensors]
        if len(loaded) != len(model.tensors):
            odd = next(iter(model.tensors.keys() - {t.name for t in loaded}), "none")
            raise ModelError(
                f"{path}: llama.cpp made {len(model.tensors)} tensors, {len(loaded)} are in the file ({odd})"
            )
        weights.place(
            model,
            [t for t in loaded if t.name not in expert_names],
            [t for t in loaded if t.name in expert_names],
            config.dense_weights,
            lanes,
            lambda done, whole: self._progress("dense", done, whole),
        )
        if weights.note:
            self.notes.append(weights.note)
        self.traces.batch("dense", 0, 0)
        if self.traces.io is not None:
            self.traces.io.know(layers)

        n_threads = config.n_threads()
        # A dense model has one too, without layers: its abort callback is how Ctrl-C and cancel() stop a graph.
        self.streamer = hook = _streamer.Streamer(lanes, self._layer_specs(), n_threads, config.overlap)
        stack.callback(hook.close)
        if not layers:
            self.notes.append(f"{path.name}: no routed experts (*_exps.weight): a dense model, nothing is streamed")
        shape = context_plan(config, file, model.n_vocab)
        self.score_rows = shape.score_rows
        hooks: dict[str, Any] = {
            "n_threads": n_threads,
            "eval_callback": hook.callback if layers else 0,
            "abort_callback": hook.abort_callback,
            "userdata": hook.userdata,
        }
        before = memory.read_process_memory().rss
        room = memory.read_memory_facts().available()
        with memory.allocations_within(room):
            self.context = llama.Context(
                model,
                n_ctx=shape.n_ctx,
                n_ubatch=shape.n_ubatch,
                n_outputs=shape.n_outputs,
                n_each=shape.n_each,
                n_snapshots=shape.n_snapshots,
                **hooks,
            )
        stack.callback(self.context.close)
        # A recurrent state goes back only as far as its snapshots.
        self.widest_draft = min(shape.longest, self.context.n_snapshots) if self.context.recurrent else shape.longest
        if config.draft.types and not self.widest_draft:
            none = "--rs-snapshots 0" if not config.rs_snapshots else f"llama.cpp keeps none of {file.arch}"
            self.notes.append(f"nothing is drafted: there are no recurrent states to go back to ({none})")
        self.pace = make_pace(config.draft.policy)
        self.buffers = self.context.buffers
        self.head: mtp.MtpSource | None = None
        if n_heads and self.widest_draft:
            self._open_head(stack, n_heads, config, shape, hooks)
        # llama.cpp zeroes keys, values and states at once; its compute buffers come as they are used.
        grown = memory.read_process_memory().rss - before
        self.zeroed = max(0, min(grown, self.buffers.kv + self.buffers.recurrent))
        self.drafter = make_drafter(config.draft, self.head)
        self.n_used = experts_used(file, overrides)
        self.config = replace(config, threads=n_threads, ctx=self.context.n_ctx, cache_policy=config.policy)
        self.cache: _cache.ExpertCache | None = None
        self.decision: CacheDecision | None = None
        if layers:
            self._start_cache(stack, config)
        if config.drop_cold_experts is not None:
            self._start_dropping(config.drop_cold_experts)
        if config.route_trace is not None:
            facts = {**self._run_facts(config), "policy": config.policy, "budget_bytes": self.budget_bytes}
            preamble = route_preamble(file, path.name, layers, self.n_used, self.plan if layers else None, facts)
            self.traces.route = RouteTracer(Path(config.route_trace), hook, file, layers, preamble)
        if config.cache_state is not None:
            self._warm_start(stack, config, Path(config.cache_state), identity)

    def _open_head(
        self, stack: ExitStack, n_heads: int, config: EngineConfig, shape: ContextPlan, hooks: dict[str, Any]
    ) -> None:
        """The head's context beside the target's: the same hook, so that its experts are streamed like all others."""
        with memory.allocations_within(memory.read_memory_facts().available()):
            context = HeadContext(self.model, n_heads=n_heads, n_ctx=shape.n_ctx, n_ubatch=shape.head_ubatch, **hooks)
        stack.callback(context.close)
        self.target_rows = TargetRows(self.context)
        draft, width = config.draft, min(config.draft.draft, self.widest_draft)
        self.head = mtp.MtpSource(context, width, draft.mtp_p_min, self.context.n_batch)
        rows = llama.BufferSizes(kv=0, recurrent=0, compute=self.target_rows.nbytes)
        self.buffers = self.buffers + context.buffers + rows

    def _verify_direct(self, config: EngineConfig) -> None:
        if not config.odirect or not self.layers:
            return
        tensors = [t for layer in self.layers for t in layer.tensors]
        refused = [
            self.file.paths[i]
            for i in range(len(self.file.paths))
            if (t := next((t for t in tensors if t.file == i), None))
            and not self.lanes.verify_direct(i, t.offset, min(t.nbytes, 1 << 16))
        ]
        if refused:
            self.notes.append(f"{refused[0]}: the file system has no working direct I/O, reads are buffered")

    def _layer_specs(self) -> list[tuple[list[tuple[int, int, int, int, int]], int]]:
        specs = []
        for layer in self.layers:
            area, parts = 0, []
            for t in layer.tensors:
                parts.append((self.model.tensors[t.name][0], t.file, t.offset, t.nbytes, area))
                area += t.area
            specs.append((parts, layer.n_expert))
        return specs

    def _start_cache(self, stack: ExitStack, config: EngineConfig) -> None:
        layers, buffers = self.layers, self.buffers
        sizes = cache_sizes(layers, self.n_used, self.weights.dense_bytes, buffers, self.overhead)
        spare = spare_bytes(self.overhead)
        excess = max(0, -spare)
        resident = self.weights.dense_bytes if config.dense_weights in ("anon", "lock") else 0
        self.decision = decide(config.cache_request(), sizes, memory.read_memory_facts(), resident + self.zeroed)
        if note := advice(self.decision, config.policy):
            self.notes.append(note)
        ahead = min(2 * self.n_used, MAX_READ_AHEAD) if config.prefetch != "off" else 0
        plan = slots.plan_slots(layers, max(0, self.decision.budget - excess), max(0, spare), ahead)
        if excess and self.decision.budget:
            self.notes.append(
                f"{excess >> 20} MiB of the cache budget are for what the process itself holds "
                f"(libraries and vocabulary, beyond {ALLOWANCE >> 20} MiB)"
            )
        self.plan = plan
        pool = _memory.Region(max(plan.total_bytes, 1))
        stack.callback(pool.close)
        stack.callback(_Populate(pool).stop)
        # No read may be under way when the pool goes: the lanes are joined before it.
        stack.callback(self.lanes.close)
        cache = _cache.ExpertCache(
            [la.n_expert for la in layers],
            list(plan.layer_class),
            list(plan.class_slots),
            config.policy,
            max(1, min(self.n_used, 255)),
        )
        classes, address = [], pool.address
        for n, spares, stride in zip(plan.class_slots, plan.class_spares, plan.class_stride, strict=True):
            classes.append((address, n, spares, stride))
            address += (n + spares) * stride
        self.streamer.start(
            cache, classes, list(plan.layer_class), list(plan.quotas), plan.n_ring, address, plan.ring_stride
        )
        self.streamer.read_ahead(config.prefetch if any(plan.class_spares) else "off", config.predict_log)
        self.cache = cache
        if config.prefetch != "off":
            self._check_prefetch(config)

    def _check_prefetch(self, config: EngineConfig) -> None:
        assert self.cache is not None
        if not self.cache.n_slots:
            raise UsageError(
                f"--prefetch needs a cache, and {self.budget_bytes >> 20} MiB hold no expert: give a larger --cache-mb"
            )
        if not any(self.plan.class_spares):
            everything = all(
                n >= self.plan.layer_class.count(k) * self.layers[self.plan.layer_class.index(k)].n_expert
                for k, n in enumerate(self.plan.class_slots)
            )
            why = "every expert has a slot" if everything else "the cache is too small to spare room for it"
            self.notes.append(f"--prefetch {config.prefetch}: nothing is read ahead, {why}")

    def _start_dropping(self, threshold: float) -> None:
        if self.cache is None:
            raise UsageError(f"--drop-cold-experts: {self.path} has no routed experts")
        if not self.cache.n_slots:
            raise UsageError(
                f"--drop-cold-experts needs a cache, and {self.budget_bytes >> 20} MiB hold no expert: "
                "give a larger --cache-mb"
            )
        if self.n_used <= FEW_EXPERTS:
            self.notes.append(
                f"--drop-cold-experts: the model routes {self.n_used} experts per token only, each carries much of "
                "the output: measure the loss (python -m bmoe perplexity)"
            )
        self.streamer.drop_cold(threshold)

    def _run_facts(self, config: EngineConfig) -> dict[str, object]:
        """What a trace's preamble says of the run."""
        return {
            "overlap": int(config.overlap),
            "io_threads": config.io_threads,
            "ubatch": config.ubatch,
            "draft": ",".join(config.draft.types) or "none",
            "drop_cold_experts": config.drop_cold_experts or 0,
        }

    def _warm_start(self, stack: ExitStack, config: EngineConfig, path: Path, identity: dict[str, Any]) -> None:
        if self.cache is None or not self.cache.n_slots:
            self.notes.append("--cache-state does nothing: there is no cache of experts")
            return
        self.streamer.count_uses()
        old = None
        try:
            old = warm_start.read_state(path, identity)
        except warm_start.StateError as e:
            self.notes.append(f"--cache-state: {e}: ignored, and replaced at exit")
        self._state = (path, identity, old)
        if old is None:
            return
        lanes = _reads.Lanes(self.lanes.paths, warm_start.LANES, config.odirect and self.lanes.direct)
        stack.callback(lanes.close)
        if self.traces.io is not None:
            self.traces.io.add(lanes, "preload")
        self.preload = warm_start.Preloader(self.streamer, lanes, warm_start.by_frequency(old), self.plan.layer_class)
        stack.callback(self.preload.stop)
        self.preload.start()

    def _save_state(self) -> None:
        if self._state is None:
            return
        path, identity, old = self._state
        counts = self.streamer.uses()
        self._state = None
        if not any(map(any, counts)):
            return  # nothing was learned
        try:
            warm_start.write_state(path, identity, warm_start.merge(old, counts))
        except OSError as e:
            self.failures.append(f"--cache-state: cannot write {path}: {e.strerror}")

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

        `prompt`: text, or token ids. `stop_at_end`: stop at an end-of-generation token, else go on to
        `max_tokens`. `stop`: strings that end the text where they begin. Tokens shared with the sequence of the
        generation before are not computed again.
        `script`: token ids that the model is made to choose, one after the other, while every batch is decoded,
        streamed and rolled back for real: for measurements on a given text; at least `max_tokens` of them.
        `records`: each token has its `TokenRecord`.
        Raises UsageError where the prompt is empty or longer than the context.
        """
        self._take_turn()
        ids = self.tokenize(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self._busy = generation = Generation(
            self, ids, max_tokens, sampling or Sampling(), stop_at_end, script, stop, records
        )
        return generation

    def score(self, ids: Sequence[int], first: int = 1, *, one_by_one: bool = False) -> Scoring:
        """Starts to score a text: how surprised the model is by each of `ids[first:]`, given all before it.

        Iterate over it for the tokens; their surprises, in nats, are in its `nll`. The text is computed from an empty
        sequence in batches, as a prompt is, or from `first` on `one_by_one`, as in decode. `score_rows` of the
        settings is how many tokens of a batch are scored together. Raises UsageError where the text is longer than
        the context or there is nothing to score.
        """
        self._take_turn()
        self._busy = scoring = Scoring(self, [int(t) for t in ids], first, one_by_one)
        return scoring

    def _take_turn(self) -> None:
        self._check_open()
        if self._busy is not None and self._busy.running:
            if self._busy.stepping:
                raise BmoeError("a generation is running on this engine in another thread: cancel it first")
            self._busy.close()  # left in the middle: its consumer has gone
        self._cancelled.clear()
        self.traces.begin_turn()
        self.streamer.take_interrupt()  # of a cancel() that came after the last graph

    def cancel(self) -> None:
        """Ends the running generation at the next graph node; callable from any thread."""
        self._cancelled.set()
        if not self.closed:
            self.streamer.request_abort()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

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
        return StreamCounters(**self.streamer.counters(), **self.lanes.counters())

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

    def tell_cache(self, prompt_left: int) -> None:
        """Tells the cache of the next batch: so many tokens of the prompt follow it; -1: it is decode's."""
        if self.cache is not None:
            self.cache.prompt(prompt_left)
            self.traces.tell_prompt(prompt_left)

    def reject_in_cache(self, n: int) -> None:
        """Tells the cache that the last `n` tokens of the batch before were not accepted."""
        if self.cache is not None:
            self.cache.reject(n)
            self.traces.tell(f"reject:{n}")

    def set_progress(self, progress: Progress) -> None:
        """Replaces who is told of progress."""
        self._progress = progress

    def report_progress(self, stage: str, done: int, whole: int) -> None:
        """Passes progress on to who opened the engine."""
        self._progress(stage, done, whole)

    def close(self) -> None:
        """Joins the lanes, frees the model and closes its files. May be called twice."""
        if self._busy is not None:
            self._busy.close()
        if not self.closed:
            self._save_state()
        self.closed = True
        self._stack.close()
        self.failures += self.traces.failures()

    def _check_open(self) -> None:
        if self.closed:
            raise BmoeError("the engine is closed")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Populate:
    """Makes a region resident in the background: zeroing gigabytes would only delay the first token."""

    def __init__(self, region: _memory.Region) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(region,), name="bmoe-populate", daemon=True)
        try:
            self._thread.start()
            self._started = True
        except RuntimeError:  # no thread to be had: pages then come as reads fill them
            self._started = False

    def _run(self, region: _memory.Region) -> None:
        for at in range(0, region.size, _POPULATE_STEP):
            if self._stop.is_set() or region.populate(at, _POPULATE_STEP):
                return

    def stop(self) -> None:
        self._stop.set()
        if self._started:
            self._thread.join()
