"""The command line: flags in, text on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from .. import llama
from ..engine import chat, demo
from ..engine.config import DEFAULT_SNAPSHOTS, EngineConfig, Sampling
from ..engine.engine import Engine
from ..engine.stop_strings import StopStrings
from ..errors import BmoeError, UsageError
from ..observe.diagnosis import diagnose
from ..version import __version__
from . import commands, metrics_file, summary
from .draft_flags import add_draft_flags, spec_from_args
from .evidence import evidence
from .flags import (
    Parser,
    add_compute_flags,
    add_lossy_flags,
    add_model_flag,
    add_report_flags,
    add_streaming_flags,
    add_telemetry_flags,
    add_trace_flags,
    check_output_flags,
    engine_settings,
)
from .terminal import INTERRUPTED, OutputError, ProgressView, Say, say, silent, write
from .text_output import text_view
from .token_output import CsvFile, ProgressLines, run_summary

_AGAIN_S = 1.0  # a Ctrl-C this soon after another one changes nothing: the first is being served


def build_parser() -> argparse.ArgumentParser:
    """All flags, in groups."""
    p = Parser(
        prog="bmoe",
        description="Runs Mixture-of-Experts GGUF models larger than memory: routed experts are streamed from "
        "disk through a bounded cache while the current layer computes.",
        epilog=f"With no -m, the bundled demo model runs; docs/ explains every flag. {commands.summary()}",
    )
    p.add_argument("--version", action="version", version=f"bmoe {__version__}")
    g = p.add_argument_group("model and prompt")
    add_model_flag(g)
    g.add_argument("-p", "--prompt", metavar="TEXT", help="prompt; - reads it from standard input")
    g.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    g.add_argument("-n", "--n-predict", type=int, metavar="N", help="tokens to generate (256)")
    g.add_argument("--chat", action="store_true", help="wrap the prompt in the model's own chat template")
    g.add_argument("--chatml", action="store_true", help="wrap the prompt in ChatML")
    g.add_argument("--no-think", action="store_true", help="with --chat or --chatml: ask for no thinking")
    g.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end where TEXT comes, or the special token of that name, without it; repeatable",
    )
    g.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-generation token")

    g = p.add_argument_group("sampling (greedy by default)")
    g.add_argument("--temp", type=float, metavar="F", help="temperature; 0 is greedy (0)")
    g.add_argument("--top-k", type=int, metavar="N", help="keep the N likeliest tokens; 0 keeps all (40)")
    g.add_argument("--top-p", type=float, metavar="F", help="keep the likeliest tokens up to this mass (0.95)")
    g.add_argument("--seed", type=int, metavar="N", help="seed of the draw (one is drawn, and said at the end)")

    add_compute_flags(p)
    add_streaming_flags(p)
    add_lossy_flags(p)

    g = p.add_argument_group("drafting (off by default; needs greedy decoding)")
    add_draft_flags(g)
    g.add_argument(
        "--rs-snapshots",
        type=int,
        default=DEFAULT_SNAPSHOTS,
        metavar="N",
        help=f"recurrent models: longest draft that can be taken back ({DEFAULT_SNAPSHOTS})",
    )

    add_trace_flags(p)
    add_telemetry_flags(p)
    add_report_flags(p)
    return p


def main(argv: Sequence[str] | None = None, *, take_interrupt: bool = False) -> int:
    """Runs the command line; returns the exit code: 0, 1 for a failure, 2 for usage, 130 after Ctrl-C.

    `take_interrupt`: Ctrl-C is this program's to handle, though no Python handler is set yet.
    """
    try:
        _prepare_streams()
        _prepare_interrupt(take_interrupt)
        words = list(sys.argv[1:] if argv is None else argv)
        command = commands.find(words)
        if command is not None:
            code = command.run(command.build_parser().parse_args(words[1:]))
            return _interrupted() if code == INTERRUPTED else code
        return run(build_parser().parse_args(words))
    except BmoeError as e:
        say(f"bmoe: {_one_line(str(e))}")
        return e.exit_code
    except OutputError as e:
        if str(e):
            say(f"bmoe: {e}")
        return BmoeError.exit_code
    except MemoryError:
        say("bmoe: out of memory: use a smaller --cache-mb, or a smaller -c")
        return BmoeError.exit_code
    except KeyboardInterrupt:
        say("bmoe: interrupted")
        return _interrupted()


def _prepare_streams() -> None:
    """Gives a closed standard stream (`<&-`) a place to go, and characters that stdout's encoding lacks a `?`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the process's life
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _prepare_interrupt(ours: bool) -> None:
    """Makes one KeyboardInterrupt of an impatient series, so that the summary of the run is not cut off."""
    if threading.current_thread() is not threading.main_thread():
        return
    if not ours and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # ignored on purpose (nohup), or somebody else's
    last = -_AGAIN_S

    def interrupt(number: int, frame: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _AGAIN_S:
            last = now
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def _interrupted() -> int:
    """The exit code of an interrupted run; what is left to do takes no more interrupts."""
    if threading.current_thread() is threading.main_thread():
        # Python's exit would make one the death of the process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return INTERRUPTED


def _one_line(text: str) -> str:
    """`text` with line breaks and terminal controls spelled out: names and keys of a file may hold anything."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def run(args: argparse.Namespace) -> int:
    """One generation as `args` ask for it."""
    prompt = read_prompt(args)
    check_output_flags(args)
    if args.n_predict is not None and args.n_predict < 0:
        raise UsageError(f"--n-predict: {args.n_predict} is negative; give 0 or more tokens")
    StopStrings(args.stop)
    bundled = args.model is None
    draft = spec_from_args(args)
    # The demo samples, but for drafting, which needs greedy decoding.
    sampling = choose_sampling(args, bundled and args.prompt is None and args.file is None and not draft.types)
    settings = {**engine_settings(args), "draft": draft, "rs_snapshots": args.rs_snapshots}
    EngineConfig(**settings)  # before a large file is touched
    notice = silent if args.quiet else say
    if bundled:
        how = "greedy" if sampling.greedy else f"sampling at temperature {sampling.temp} with seed {sampling.seed}"
        notice(f"bmoe {__version__}: no model given, running the bundled demo model ({demo.MODEL}), {how}")
    llama.exit_on_abort()
    with ProgressView(enabled=not args.quiet) as view:
        engine = Engine.open(args.model, progress=view.update, **settings)
    with engine:
        for line in summary.opening_lines(engine):
            notice(line)
        if args.chat:
            prompt = chat.apply_template(engine, prompt, think=not args.no_think)
        elif args.chatml:
            prompt = chat.chatml(prompt, think=not args.no_think)
        code = _generate(engine, prompt, sampling, args, notice)
    for line in engine.failures:
        say(f"bmoe: {line}")
    return code


def _generate(engine: Engine, prompt: str, sampling: Sampling, args: argparse.Namespace, notice: Say) -> int:
    n = 256 if args.n_predict is None else args.n_predict
    outputs = _outputs(engine, args, sampling, n)
    generation = engine.generate(
        prompt,
        max_tokens=n,
        sampling=sampling,
        stop_at_end=not args.ignore_eos,
        stop=args.stop,
        records=bool(outputs),
    )
    result, failure, code = generation.result, "", 0
    text = text_view(not args.quiet and not args.progress, lambda: _full_slots(engine))
    try:
        with ProgressView(enabled=not args.quiet) as view:
            engine.set_progress(view.update)
            first = next(generation, None)
        for token in chain([first] if first is not None else [], generation):
            text.write(token.text)
            text.token(token)
            for output in outputs:
                output.token(token)
    except KeyboardInterrupt:
        code, stop = INTERRUPTED, "interrupted"
    except OutputError as e:
        # The reader of stdout has gone (`| head`), or its disk is full.
        code, stop, failure = 1, "cancelled", str(e)
    finally:
        text.close()
        generation.close()
        result.stop = stop if code else result.stop
        for output in outputs:
            output.close(run_summary(result))
    _end_text(patient=code != INTERRUPTED)
    found = diagnose(evidence(engine, result, sampling.greedy))
    for line in summary.closing_lines(engine, result, found, table=not args.progress and sys.stderr.isatty()):
        notice(line)
    for output in outputs:
        if output.failure:
            say(f"bmoe: {output.failure}")
    if args.metrics_json:
        metrics_file.write_json(args.metrics_json, metrics_file.metrics(engine, result, sampling, found))
    if failure:
        raise BmoeError(failure)
    return _interrupted() if code == INTERRUPTED else code


def _full_slots(engine: Engine) -> tuple[int, int] | None:
    """Slots of the cache: full ones and all; None without one."""
    return (engine.cache.n_resident, engine.cache.n_slots) if engine.cache is not None else None


def _outputs(engine: Engine, args: argparse.Namespace, sampling: Sampling, n: int) -> list[CsvFile | ProgressLines]:
    """What takes the records of tokens."""
    outputs: list[CsvFile | ProgressLines] = []
    if args.csv is not None:
        config = {**metrics_file.resolved_config(engine, sampling), "n_predict": n}
        run = {"engine": f"bmoe-{__version__}", "model": str(engine.path), "arch": engine.arch, "config": config}
        outputs.append(CsvFile(Path(args.csv), run))
    if args.progress:
        outputs.append(ProgressLines())
    return outputs


def _end_text(patient: bool) -> None:
    """Ends the text with a line break; not `patient`: only where that cannot block."""
    with contextlib.suppress(OutputError, OSError, ValueError):
        if patient or select.select([], [sys.stdout], [], 0)[1]:
            write("\n")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from -p, -f, standard input or the demo. Raises UsageError where it is missing or doubled."""
    if args.chat and args.chatml:
        raise UsageError("--chat and --chatml exclude each other")
    if args.no_think and not (args.chat or args.chatml):
        raise UsageError("--no-think goes with --chat or --chatml")
    if args.prompt is not None and args.file is not None:
        raise UsageError("-p and -f exclude each other")
    if args.file is not None:
        try:
            return Path(args.file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"-f: {args.file} is not UTF-8 text") from None
        except OSError as e:
            raise UsageError(f"-f: {args.file}: {e.strerror}") from None
    if args.prompt == "-":
        try:
            return sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError:
            raise UsageError("-p -: standard input is not UTF-8 text") from None
    if args.prompt is not None:
        try:
            args.prompt.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError("-p: the prompt is not UTF-8 text") from None
        return str(args.prompt)
    if args.model is not None:
        raise UsageError("no prompt: give -p TEXT, -p - or -f FILE")
    return demo.PROMPT


def choose_sampling(args: argparse.Namespace, demo_run: bool) -> Sampling:
    """Greedy, unless a flag asks for sampling, with a seed that is drawn; the demo without a prompt has a fixed one."""
    base = demo.SAMPLING if demo_run else Sampling()
    given = {k: getattr(args, k) for k in ("temp", "top_k", "top_p", "seed") if getattr(args, k) is not None}
    chosen = Sampling(**{**{k: getattr(base, k) for k in ("temp", "top_k", "top_p", "seed")}, **given})
    if chosen.greedy and any(k in given for k in ("top_k", "top_p", "seed")):
        raise UsageError("--top-k, --top-p and --seed need --temp above 0")
    return chosen.with_seed()
