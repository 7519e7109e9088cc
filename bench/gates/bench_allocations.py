"""Allocations of the hot path and calls of a decode step, counted exactly.

    python -m pytest bench/gates/bench_allocations.py --gate

bmoe's compiled modules must not allocate once every buffer has its size; what Python allocates belongs to a release of
Python and numpy, and is compared where expected.json has this one's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.conftest import EXPECTATIONS
from bench.gates import gate, native


def count(faults: frozenset[str]) -> dict[str, dict[str, int]]:
    """The scenarios of allocations.py, run in a process of their own."""
    library = str(native.build("mallocs"))
    command = [sys.executable, str(Path(__file__).parent / "allocations.py"), library, *sorted(faults)]
    env = {**os.environ, "LD_PRELOAD": library, "PYTHONHASHSEED": "0", "PYTHONMALLOC": "default"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.exact
def test_allocations(request: pytest.FixtureRequest, planted: frozenset[str]) -> None:
    """All scenarios in one process."""
    expectations: Any = request.config.stash[EXPECTATIONS]
    scenarios = count(planted & {"allocation", "call"})
    assert len(scenarios) == 5
    lines, unknown = [], ""
    for name, counts in scenarios.items():
        ours = "@" not in name
        if ours or expectations.known(name) or expectations.rebase:
            # A clock's reading is a new object unless it is a small number, which it sometimes is.
            lines.append(expectations.breach(name, counts, 0.0 if ours else gate.read_tolerance("python allocations")))
        else:
            unknown = name.partition("@")[2]
    if any(lines):
        pytest.fail("\n".join(filter(None, lines)), pytrace=False)
    if unknown:
        pytest.skip(f"allocations: all but Python's own hold; expected.json has no numbers of {unknown}")
