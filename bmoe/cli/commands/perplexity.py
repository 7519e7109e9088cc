"""`python -m bmoe perplexity FILE`: how well a model, as it is streamed, predicts a text."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

from ... import llama
from ...accounting.counters import StreamCounters
from ...engine.config import EngineConfig
from ...engine.engine import Engine
from ...engine.scoring import Tally, Window, text_bytes, windows
from ...errors import UsageError
from ...version import __version__
from .. import metrics_file, summary
from ..flags import (
    Parser,
    add_compute_flags,
    add_lossy_flags,
    add_model_flag,
    add_report_flags,
    add_streaming_flags,
    add_trace_flags,
    check_output_flags,
    engine_settings,
)
from ..terminal import INTERRUPTED, ProgressView, say, silent, write

DEFAULT_WINDOW = 512
MODES = ("batch", "decode")
MiB = 1 << 20


def build_parser() -> argparse.ArgumentParser:
    """All flags, in groups."""
    p = Parser(
        prog="bmoe perplexity",
        description="Perplexity of a text, in windows of the context's size, with the experts streamed. Without "
        "--stride the second half of each window is scored.",
        epilog="docs/dropping.md explains it.",
    )
    g = p.add_argument_group("model and text")
    g.add_argument("file", metavar="FILE", help="the text, UTF-8; - reads standard input")
    add_model_flag(g)
    g.add_argument(
        "--mode", choices=MODES, default="batch", metavar="|".join(MODES),
        help="batch: in prefill batches, fast (default); decode: the scored tokens one by one, as generation runs",
    )  # fmt: skip
    g.add_argument("--chunks", type=int, metavar="N", help="no more than N windows (all)")
    g.add_argument("--stride", type=int, metavar="N", help="begin a window every N tokens and score the last N of each")
    add_compute_flags(p, context=f"tokens of a window ({DEFAULT_WINDOW})")
    add_streaming_flags(p)
    add_lossy_flags(p)
    add_trace_flags(p)
    add_report_flags(p)
    return p


def run(args: argparse.Namespace) -> int:
    """Scores the file; prints one line on stdout."""
    settings = _settings(args)
    text = _read(args.file)
    check_output_flags(args)
    notice = silent if args.quiet else say
    llama.exit_on_abort()
    with ProgressView(enabled=not args.quiet) as view:
        engine = Engine.open(args.model, progress=view.update, **settings)
    with engine:
        for line in summary.opening_lines(engine):
            notice(line)
        ids = engine.tokenize(text, special=False)
        measured = Measurement(engine, ids, _windows(args, len(ids), settings["ctx"]), args)
        try:
            with ProgressView(enabled=not args.quiet) as view:
                engine.set_progress(view.update)
                measured.run()
            code = 0
        except KeyboardInterrupt:
            code = INTERRUPTED
        if measured.tally.n:
            write(f"{measured.headline()}\n")
        for line in measured.lines():
            notice(line)
        if args.metrics_json:
            metrics_file.write_json(args.metrics_json, measured.metrics(complete=code == 0))
    for line in engine.failures:
        say(f"bmoe: {line}")
    return code


class Measurement:
    """The windows of one text through one engine, and what they cost."""

    def __init__(self, engine: Engine, ids: list[int], cut: list[Window], args: argparse.Namespace) -> None:
        self.engine, self.ids, self.windows, self.args = engine, ids, cut, args
        self.tally = Tally()
        self.prefill, self.decode = StreamCounters(), StreamCounters()
        self.prefilled = self.done = 0
        self.seconds = 0.0
        self.bos = llama.bos_token(engine.model) if engine.adds_bos else -1

    def run(self) -> None:
        """Scores window after window."""
        one_by_one = self.args.mode == "decode"
        scored = sum(w.end - w.first for w in self.windows)
        started = time.perf_counter()
        for window in self.windows:
            ids = self.ids[window.begin : window.end]
            if self.bos >= 0:
                ids[0] = self.bos
            scoring = self.engine.score(ids, window.first - window.begin, one_by_one=one_by_one)
            before = self.tally.n
            try:
                for i, _ in enumerate(scoring):
                    if i % 16 == 0:
                        self.engine.report_progress("score", before + i, scored)
            finally:
                scoring.close()
                tokens = scoring.result.token_ids[: len(scoring.nll)]
                self.tally.add(scoring.nll[: len(tokens)], text_bytes(self.engine.model, tokens))
                self.prefill = self.prefill.plus(scoring.result.prefill)
                self.decode = self.decode.plus(scoring.result.decode)
                self.prefilled += len(ids) - 1 - scoring.result.decode_steps
                self.seconds = time.perf_counter() - started
            self.done += 1

    @property
    def _phase(self) -> tuple[StreamCounters, int]:
        """What the mode is about: its counters, and over how many tokens."""
        if self.args.mode == "decode":
            return self.decode, self.tally.n
        return self.prefill, self.prefilled

    def headline(self) -> str:
        t = self.tally
        bits = "" if t.bits_per_byte is None else f", {t.bits_per_byte:.4f} bits/byte"
        return f"perplexity {t.perplexity:.4f} +/- {t.error:.4f}{bits}, {t.mean:.4f} nats/token over {t.n} tokens"

    def lines(self) -> list[str]:
        """What it took, a line for each subject."""
        args, engine = self.args, self.engine
        size = self.windows[0].end - self.windows[0].begin
        stride = "" if args.stride is None else f" every {args.stride}"
        out = [
            f"text: {len(self.ids)} tokens, {self.done} of {len(self.windows)} windows of {size}{stride}, "
            f"mode {args.mode}, {self.seconds:.2f} s"
        ]
        counters, tokens = self._phase
        if engine.cache is None or not tokens:
            return out
        rate = counters.hit_rate
        out.append(
            f"moe-stream: {(self.prefill.bytes + self.decode.bytes) / MiB:.1f} MiB read, "
            f"{counters.bytes / MiB / tokens:.3f} MiB/token in {args.mode}, "
            f"{'-' if rate is None else f'{100 * rate:.1f} %'} hit"
        )
        out += summary.drop_lines(engine.config.drop_cold_experts, self.prefill, self.decode)
        return out + summary.extra_lines(engine)

    def metrics(self, complete: bool) -> dict[str, Any]:
        """The metrics object."""
        engine, t = self.engine, self.tally
        counters, tokens = self._phase
        budget, resident, dropping = engine.budget_bytes, engine.resident_bytes, engine.config.drop_cold_experts
        return {
            "version": __version__,
            "command": "perplexity",
            "model": str(engine.path),
            "arch": engine.arch,
            "config": {**engine.config.as_dict(), "budget_bytes": budget, "direct_io": engine.lanes.direct},
            "cache": engine.decision.explain() if engine.decision else None,
            "file": self.args.file,
            "mode": self.args.mode,
            "window": self.windows[0].end - self.windows[0].begin,
            "stride": self.args.stride,
            "windows": self.done,
            "complete": complete,
            "tokens": t.n,
            "bytes": t.n_bytes,
            "perplexity": _finite(t.perplexity),
            "perplexity_error": _finite(t.error),
            "nats_per_token": _finite(t.mean),
            "bits_per_byte": _finite(t.bits_per_byte),
            "bytes_per_token": counters.bytes / tokens if tokens else None,
            "hit_rate": counters.hit_rate,
            "total_s": self.seconds,
            "warm_start": metrics_file.warm_start(engine),
            "expert": metrics_file.expert_summary(self.decode, t.n, budget, resident, dropping),
            "prefill": {
                "expert": metrics_file.expert_summary(self.prefill, self.prefilled, budget, resident, dropping)
            },
        }


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Engine settings, checked before anything is read."""
    settings = engine_settings(args)
    settings["ctx"] = settings["ctx"] or DEFAULT_WINDOW
    settings["score_rows"] = 0 if args.mode == "decode" else settings["ubatch"]
    EngineConfig(**settings)
    if settings["ctx"] < 4:
        raise UsageError(f"--ctx-size: a window of {settings['ctx']} tokens is too short, give 4 or more")
    if args.chunks is not None and args.chunks < 1:
        raise UsageError(f"--chunks: {args.chunks} is out of range, give 1 or more")
    if args.stride is not None and not 1 <= args.stride < settings["ctx"]:
        raise UsageError(f"--stride: {args.stride} is out of range, give 1 to {settings['ctx'] - 1} (below the window)")
    if args.drop_cold_experts is not None and args.mode == "batch" and not args.drop_in_prefill:
        raise UsageError("--drop-cold-experts drops in decode only: add --mode decode, or --drop-in-prefill")
    return settings


def _windows(args: argparse.Namespace, n_tokens: int, size: int) -> list[Window]:
    cut = windows(n_tokens, size, args.stride)[: args.chunks]
    if n_tokens < 4:
        raise UsageError(f"{args.file}: a text of {n_tokens} tokens is too short: give 4 or more")
    if not cut:
        raise UsageError(f"{args.file}: {n_tokens} tokens do not fill one window of {size}; use -c {n_tokens} or less")
    return cut


def _read(name: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{name}: not UTF-8 text") from None
    except OSError as e:
        raise UsageError(f"{name}: {e.strerror}") from None
