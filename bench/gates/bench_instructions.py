"""Instructions of the drafters and of the planning step, counted by callgrind: no clock, so no noise.

    python -m pytest bench/gates/bench_instructions.py --gate

Counted is what runs inside bmoe's own compiled modules and inside the plain references, not what they call in Python or
in the C library. Absolute numbers belong to one compiler; they are compared where expected.json has this one's. The
ratios to the references, which the same compiler has just made, are compared everywhere, more loosely.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.conftest import EXPECTATIONS
from bench.gates import gate, native
from bmoe.speculation import _drafters

PLAIN = {"drafters": "plain drafter", "plan/lru": "plain lru", "plan/votes": "plain votes"}


def toolchain() -> str:
    """What made the compiled modules: compiler, Cython, Python, machine."""
    image = Path(_drafters.__file__).read_bytes()
    gcc = re.search(rb"GCC: \([^)]*\) ([\d.]+)", image)
    clang = re.search(rb"clang version ([\d.]+)", image)
    cython = re.search(rb"_cython_(\d+_\d+_\d+)", image)
    made_by = f"clang {clang[1].decode()}" if clang else f"gcc {gcc[1].decode()}" if gcc else "unknown compiler"
    release = cython[1].decode().replace("_", ".") if cython else "unknown"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"{made_by}, cython {release}, python {python}, {platform.machine()}"


def read_profile(text: str) -> tuple[str, dict[str, int]]:
    """The name of a callgrind dump (written with --compress-strings=no), and the instructions of each object file."""
    name, where, skip = "", "", False
    found: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith("desc: Trigger: Client Request: "):
            name = line.rpartition("Request: ")[2]
        elif line.startswith("ob="):
            where = Path(line[3:]).name
        elif line.startswith("calls="):
            skip = True  # the next line is what the callee has cost
        elif re.match(r"[+*0-9-]", line):
            if not skip:
                found[where] = found.get(where, 0) + int(line.split()[1])
            skip = False
    return name, found


def count(directory: Path, plant: bool = False) -> dict[str, int]:
    """Instructions of each section of instructions.py."""
    library = native.build("native")
    command = [
        str(shutil.which("valgrind")),
        "--tool=callgrind",
        "--instr-atstart=no",
        "--collect-atstart=no",
        "--compress-strings=no",
        "--compress-pos=no",
        f"--callgrind-out-file={directory / 'out'}",
        sys.executable,
        str(Path(__file__).parent / "instructions.py"),
        str(library),
        *["plant"] * plant,
    ]
    # Without a choice of vector units, numpy takes what valgrind knows.
    env = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "NPY_DISABLE_CPU_FEATURES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1800)
    if done.returncode == 3:
        pytest.skip(f"instruction counts: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    totals = {}
    for file in directory.glob("out.*"):
        name, objects = read_profile(file.read_text())
        ours = [n for where, n in objects.items() if where == library.name or re.match(r"_\w+\.cpython.*\.so$", where)]
        totals[name] = sum(ours)
    return totals


@pytest.mark.instructions
def test_instructions(request: pytest.FixtureRequest, tmp_path: Path, planted: frozenset[str]) -> None:
    """All sections in one run of valgrind."""
    if shutil.which("valgrind") is None:
        pytest.skip("instruction counts: valgrind is not installed (apt-get install valgrind)")
    expectations = request.config.stash[EXPECTATIONS]
    totals = count(tmp_path, "instructions" in planted)
    ours = {name: n for name, n in totals.items() if not name.startswith("plain")}
    assert len(ours) == 7
    reference = {name: totals[next(p for k, p in PLAIN.items() if name.startswith(k))] for name in ours}
    permille = {name: round(1000 * n / reference[name]) for name, n in ours.items()}
    made_by, ratio = toolchain(), gate.read_tolerance("instruction ratios")
    lines = [expectations.breach("instructions, in 1/1000 of the plain references'", permille, ratio)]
    absolute = f"instructions@{made_by}"
    if expectations.known(absolute) or expectations.rebase:
        lines.append(expectations.breach(absolute, totals, gate.read_tolerance("instructions")))
    if any(lines):
        pytest.fail("\n".join(filter(None, lines)), pytrace=False)
    if not expectations.known(absolute):
        pytest.skip(f"instruction counts: ratios hold; expected.json has no absolute numbers of {made_by}")
