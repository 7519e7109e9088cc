"""`python -m bmoe inspect MODEL`: what a model takes, what a run would decide, and how fast it will be here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ... import llama
from ...engine import demo
from ...engine.config import DEFAULT_SNAPSHOTS, EngineConfig
from ...errors import UsageError
from ...inspect.forecast import budgets, forecast, measure
from ...inspect.inspection import inspect_model
from .. import inspect_view
from ..draft_flags import add_draft_flags, spec_from_args
from ..flags import Parser, add_compute_flags, add_lossy_flags, add_model_flag, add_streaming_flags, engine_settings
from ..terminal import ProgressView, write


def build_parser() -> argparse.ArgumentParser:
    """All flags, in groups: those of a run, which change what is decided, and two of its own."""
    p = Parser(
        prog="bmoe inspect",
        description="Says what a model takes and what a run with the same flags would decide; measures its disk and a "
        "few of its tokens, in seconds, and predicts the speed with caches of several sizes.",
        epilog="With no MODEL, the bundled demo model is inspected. docs/inspect.md explains every line.",
    )
    g = p.add_argument_group("inspect")
    g.add_argument("file", nargs="?", metavar="MODEL", help="GGUF file, or the first of its shards")
    add_model_flag(g)
    g.add_argument("--no-measure", action="store_true", help="read the header only: no speed is predicted")
    g.add_argument("--json", action="store_true", help="one JSON object on stdout instead of lines")
    add_compute_flags(p)
    add_streaming_flags(p)
    add_lossy_flags(p)
    g = p.add_argument_group("drafting (what it takes is counted, its speed is not predicted)")
    add_draft_flags(g)
    g.add_argument(
        "--rs-snapshots", type=int, default=DEFAULT_SNAPSHOTS, metavar="N",
        help=f"recurrent models: longest draft that can be taken back ({DEFAULT_SNAPSHOTS})",
    )  # fmt: skip
    p.set_defaults(route_trace=None, io_trace=None, cache_state=None)
    return p


def run(args: argparse.Namespace) -> int:
    """Prints what is known from the header, then what was measured."""
    if args.file is not None and args.model is not None:
        raise UsageError("MODEL and -m exclude each other")
    settings = {**engine_settings(args), "draft": spec_from_args(args), "rs_snapshots": args.rs_snapshots}
    config = EngineConfig(**settings)
    name = args.file if args.file is not None else args.model
    path = Path(name) if name is not None else demo.model_path()
    llama.exit_on_abort()
    found = inspect_model(path, config)
    if not args.json:
        _print(inspect_view.header_lines(found))
    measured = None
    if found.layers and not args.no_measure:
        with ProgressView(enabled=not args.json) as view:
            measured = measure(found, view.update)
    rows = forecast(found, measured, budgets(found)) if found.layers else []
    if args.json:
        write(json.dumps(inspect_view.as_dict(found, measured, rows), indent=1) + "\n")
    elif found.layers:
        _print(inspect_view.measured_lines(found, measured) + inspect_view.table(found, rows))
    return 0


def _print(lines: list[str]) -> None:
    write("\n".join(lines) + "\n")
