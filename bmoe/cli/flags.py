"""Flags that the commands share, in argparse groups, and the engine's settings that they stand for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from ..engine.config import CACHE_POLICIES, DEFAULT_CONTEXT, DEFAULT_LANES, DEFAULT_UBATCH, MAX_LANES, PREFETCHES
from ..errors import UsageError
from ..experts.budget import DEFAULT_FLOOR_MB, parse_cache_mb
from ..experts.weights import DENSE_MODES
from ..host.files import check_outputs


class Parser(argparse.ArgumentParser):
    """A parser whose complaint is a UsageError of one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
            **settings,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see python -m {self.prog} --help)")


def add_model_flag(group: argparse._ActionsContainer) -> None:
    """-m."""
    group.add_argument("-m", "--model", metavar="FILE", help="GGUF file, or the first of its shards")


def add_compute_flags(
    p: argparse.ArgumentParser, context: str = f"context (the model's, at most {DEFAULT_CONTEXT})"
) -> None:
    """Threads, context, batch; `context`: what -c is in this command."""
    g = p.add_argument_group("compute")
    g.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="compute threads (one per core)")
    g.add_argument("-c", "--ctx-size", type=int, default=0, metavar="N", help=context)
    g.add_argument(
        "--ubatch", type=int, default=DEFAULT_UBATCH, metavar="N", help=f"tokens of a prefill batch ({DEFAULT_UBATCH})"
    )
    g.add_argument("--n-expert-used", type=int, metavar="N", help="route N experts instead of the model's (lossy)")


def add_streaming_flags(p: argparse.ArgumentParser) -> None:
    """The cache and the reads."""
    g = p.add_argument_group("expert streaming")
    g.add_argument(
        "--cache-mb", default="auto", metavar="N|auto|0", help="memory for experts, MiB; 0 streams with no cache (auto)"
    )
    g.add_argument(
        "--cache-floor-mb", type=int, metavar="N",
        help=f"auto leaves this much to the system ({DEFAULT_FLOOR_MB}, less under a small limit)",
    )  # fmt: skip
    g.add_argument("--cache-ceil-mb", type=int, metavar="N", help="auto takes no more than this")
    g.add_argument("--force-cache", action="store_true", help="accept a cache that cannot hold what one layer routes")
    g.add_argument(
        "--cache-policy", choices=CACHE_POLICIES, default="default", metavar="|".join(CACHE_POLICIES),
        help="which experts stay: votes of past tokens that are alike (the default), or the least recently used go",
    )  # fmt: skip
    g.add_argument("--overlap", action="store_true", help="compute resident experts while the others are read")
    g.add_argument(
        "--io-threads", type=int, default=DEFAULT_LANES, metavar="N",
        help=f"read lanes, 1 to {MAX_LANES} ({DEFAULT_LANES})",
    )  # fmt: skip
    g.add_argument(
        "--prefetch", choices=PREFETCHES, default="off", metavar="|".join(PREFETCHES),
        help="with --overlap: read what the next layer will likely route before it does (off)",
    )  # fmt: skip
    g.add_argument("--predict-log", action="store_true", help="score guesses at the routing, acted on or not")
    g.add_argument("--no-odirect", action="store_true", help="read through the page cache")
    g.add_argument(
        "--dense-weights", choices=DENSE_MODES, default="anon", metavar="|".join(DENSE_MODES),
        help="how non-expert weights are kept (anon: a copy in memory)",
    )  # fmt: skip


def add_lossy_flags(p: argparse.ArgumentParser) -> None:
    """Less read for another output."""
    g = p.add_argument_group("dropping experts (lossy, off by default)")
    g.add_argument(
        "--drop-cold-experts", type=float, metavar="F",
        help="in decode, leave out routed experts that would have to be read and weigh less than F/top-k of the "
        "token's routing weights; 0 < F <= 1",
    )  # fmt: skip
    g.add_argument("--drop-in-prefill", action="store_true", help="with --drop-cold-experts: in prefill too")


def add_report_flags(p: argparse.ArgumentParser) -> None:
    """--metrics-json, -q."""
    g = p.add_argument_group("reports")
    g.add_argument("--metrics-json", type=Path, metavar="PATH", help="write the run's metrics as one JSON object")
    g.add_argument("-q", "--quiet", action="store_true", help="nothing on stderr but errors")


def add_telemetry_flags(p: argparse.ArgumentParser) -> None:
    """--csv, --progress."""
    g = p.add_argument_group("telemetry")
    g.add_argument(
        "--csv", metavar="PATH",
        help="write a row for each token: where its time went, its bytes by cause, memory; python -m bmoe report "
        "reads it",
    )  # fmt: skip
    g.add_argument("--progress", action="store_true", help="the same as a line of JSON for each token, on stderr")


def add_trace_flags(p: argparse.ArgumentParser) -> None:
    """--route-trace, --io-trace, --cache-state."""
    g = p.add_argument_group("traces and warm starts")
    g.add_argument("--route-trace", metavar="PATH", help="write which experts each token was routed to, as CSV")
    g.add_argument("--io-trace", metavar="PATH", help="write every read of the model's files, as CSV")
    g.add_argument(
        "--cache-state", metavar="PATH",
        help="at exit, write which experts were used most; at start, read those ahead in the background",
    )  # fmt: skip


def check_output_flags(args: argparse.Namespace) -> None:
    """Raises UsageError where a file that the run is to write cannot be written, or is one that it reads."""
    names = ("metrics_json", "csv", "route_trace", "io_trace", "cache_state")
    outputs = {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in names}
    inputs = [f for f in (args.model, args.file) if f and f != "-"]
    check_outputs({flag: Path(path) if path is not None else None for flag, path in outputs.items()}, inputs)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of EngineConfig from the compute, streaming and lossy groups.

    Raises UsageError for cache flags that would be ignored.
    """
    check_cache_flags(args)
    return {
        "cache_mb": args.cache_mb,
        "cache_floor_mb": DEFAULT_FLOOR_MB if args.cache_floor_mb is None else args.cache_floor_mb,
        "cache_ceil_mb": args.cache_ceil_mb,
        "force_cache": args.force_cache,
        "cache_policy": args.cache_policy,
        "overlap": args.overlap,
        "io_threads": args.io_threads,
        "prefetch": args.prefetch,
        "predict_log": args.predict_log,
        "odirect": not args.no_odirect,
        "dense_weights": args.dense_weights,
        "threads": args.threads,
        "ctx": args.ctx_size,
        "ubatch": args.ubatch,
        "n_expert_used": args.n_expert_used,
        "drop_cold_experts": args.drop_cold_experts,
        "drop_in_prefill": args.drop_in_prefill,
        "route_trace": args.route_trace,
        "io_trace": args.io_trace,
        "cache_state": args.cache_state,
    }


def check_cache_flags(args: argparse.Namespace) -> None:
    """Raises UsageError for cache flags that would be ignored."""
    mode, _ = parse_cache_mb(args.cache_mb)
    if args.cache_floor_mb is not None and mode != "auto":
        raise UsageError("--cache-floor-mb goes with --cache-mb auto")
    if mode == "off" and (args.cache_ceil_mb is not None or args.force_cache):
        flag = "--force-cache" if args.force_cache else "--cache-ceil-mb"
        raise UsageError(f"{flag} needs a cache: it excludes --cache-mb 0")
