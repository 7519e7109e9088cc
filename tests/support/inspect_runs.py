"""Runs of `bmoe inspect`, and the models that they are of."""

from __future__ import annotations

import json
from typing import Any

from cli_process import Finished, run

SMALL = {"n_layer": 2, "n_embd": 64, "n_ff": 32, "n_expert": 8}
LARGE = {"n_layer": 4, "n_expert": 32, "n_used": 4, "n_embd": 256, "n_ff": 256}


def inspect(*argv: Any) -> Finished:
    """One run with one thread."""
    return run("inspect", *argv, "-t", "1", timeout=120)


def as_json(*argv: Any) -> dict[str, Any]:
    """What it says with --json."""
    done = inspect(*argv, "--json")
    assert done.code == 0, done
    assert done.err == ""
    found: dict[str, Any] = json.loads(done.out)
    return found
