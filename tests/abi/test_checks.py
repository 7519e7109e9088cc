"""The checks of llama.cpp: all holds for the pinned release, and every kind of fault has its line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from abi_shim import CC, build_shim
from cli_process import ROOT, environment

from bmoe.abi import names
from bmoe.abi.check import BROKEN, OK, SKIPPED
from bmoe.cli import commands
from bmoe.cli.commands import abi
from bmoe.llama.library import PINNED

RUN = """
import ctypes, os, signal, sys, time
from bmoe.gguf import header as gguf_header
from bmoe import llama
from bmoe.llama import _ggml, context, head, library
from bmoe.cli import commands
from bmoe.cli.commands import abi
from bmoe.abi import check, graph, heads, layout, names, stock, streaming
{fault}
from bmoe.cli.main import main
sys.exit(main(["abi", *sys.argv[1:]]))
"""


def checked(*argv: object, fault: str = "") -> tuple[int, dict[str, tuple[str, str]], str]:
    """Exit code, `{check: (state, what was said)}` and stderr of a run in a fresh process."""
    command = [sys.executable, "-c", RUN.format(fault=fault), *map(str, argv)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        state = next(s for s in (OK, BROKEN, SKIPPED) if line.startswith(s))
        name, _, said = line.removeprefix(state).strip().partition(": ")
        rest, _, said = said.partition(": ")
        found[f"{name}: {rest}"] = (state, said)
    return done.returncode, found, done.stderr


def test_the_pinned_release_is_as_assumed(tiny: Any) -> None:
    """With a recurrent model, no check is left out."""
    code, found, err = checked("--model", tiny("qwen35moe"))
    assert list(found) == [c.name for c in abi.CHECKS]
    assert {name: end for name, end in found.items() if end[0] != OK} == {}
    assert code == 0
    assert found["names: helpers in Python"] != (OK, "0 classes")
    assert f"llama-cpp-python {PINNED} (as pinned): {len(abi.CHECKS)} ok, 0 BROKEN, 0 not checked" in err
    assert "qwen35moe" in found["identity: wide batches"][1]


def test_every_row_of_the_document_is_a_check() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \| (.+) \|$", (ROOT / "docs" / "abi.md").read_text(), re.MULTILINE)
    assert [name for name, _, _ in rows] == [c.name for c in abi.CHECKS]
    assert [mend.replace("`", "") for *_, mend in rows] == [c.mend for c in abi.CHECKS]


def test_operations_are_those_of_the_extensions() -> None:
    source = "".join(p.read_text() for p in (ROOT / "ext").rglob("*") if p.suffix in (".pyx", ".pxi"))
    asked = {*re.findall(r'_is\([^"]*?b"(\w+)"\)', source), *re.findall(r'op_name\([^()]*\), b?"(\w+)"', source)}
    asked |= set(re.findall(r'_g\.op_name\(\w+\.op\), b"(\w+)"', source))
    assert asked == names.GRAPH_OPS
    assert set(re.findall(r'strcmp\(name, b"(\w+)"\)', source)) == names.UNARY_OPS


def test_needs_are_checks_that_come_before() -> None:
    seen: set[str] = set()
    for check in abi.CHECKS:
        assert set(check.needs) <= seen, check.name
        seen.add(check.name)


FAULTS = {
    "names: bindings": (
        "names.used_of_bindings = lambda *modules: {'llama_decode', 'llama_no_such'}",
        "not in llama_cpp: llama_no_such",
    ),
    "names: functions without bindings": ("library.FUNCTIONS['gguf_no_such'] = (None, [])", "gguf_no_such"),
    "names: ggml functions": (
        "real = _ggml.function_names(); _ggml.function_names = lambda: [*real, ('ggml_no_such', True)]",
        "not in libllama: ggml_no_such",
    ),
    "names: calls of --mtp": ("head.SYMBOLS['x'] = ('_Z4lostv', None, [])", "not in libllama: _Z4lostv"),
    "names: heads": (
        "head.HEADS.update({'glm5-next': 1, 'qwen35': 2})",
        "glm5-next, qwen35 (2 heads, one is asserted)",
    ),
    "names: operations": ("names.GRAPH_OPS |= {'NO_SUCH'}", "no operation is called: NO_SUCH"),
    "layout: fields of parameters": (
        "real = layout.fields_used()\n"
        "layout.fields_used = lambda: {**real, 'llama_batch': {'token', 'no_such'}}",
        "not in llama_cpp: llama_batch.no_such",
    ),
    "layout: own structures against llama.h": (
        "class B(ctypes.Structure): _fields_ = [('buft', ctypes.c_void_p), ('pattern', ctypes.c_void_p)]\n"
        "layout.BuftOverride = B",
        "pattern at 0 (8 bytes), expected 8 (8)",
    ),
    "layout: ext/bmoe/llama/ggml_abi.h against ggml.h": (
        "real = _ggml.layout()\nreal['ggml_tensor'][1].update(data=(240, 8), lost=(0, 1))\n_ggml.layout = lambda: real",
        "data at 248 (8 bytes), expected 240 (8); no lost",
    ),
    "graph: shown before it runs": ("graph.N_EXPERT_TENSORS = 7", "expert matmuls is 6, expected 7"),
    "graph: abort": ("llama.ABORTED = 3", "llama_decode is 2, expected 3"),
    "header: values": (
        "gguf_header._SCALARS[0] = ctypes.c_int8",
        "a key of type u8 is -56, expected 200",
    ),
    "context: sizes": (
        "import re; context._BUFFER_LINE = re.compile('no such line(.)(.)(.)')",
        "KV cache is in the log is False, expected True",
    ),
    "identity: one token at a time": (
        "real = streaming._open\ndef _open(path, **settings):\n    engine = real(path, **settings)\n"
        "    engine.lanes.sabotage(2)\n    return engine\nstreaming._open = _open",
        "differs from the resident run in",
    ),
    "heads: keys and values before experts": (
        "real = heads.StockHead.replay\ndef replay(self, batch):\n    batch.rows = batch.rows * 0\n"
        "    return real(self, batch)\nheads.StockHead.replay = replay",
        "that differ from a head with experts is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told(name: str) -> None:
    fault, says = FAULTS[name]
    code, found, _ = checked("--only", name, fault=fault)
    state, said = found[name]
    assert (code, state) == (1, BROKEN)
    assert says in said
    mend = next(c.mend for c in abi.CHECKS if c.name == name)
    assert said.endswith(f"see {mend}")
    # What it does not need is as it was.
    wrong = {n for n, end in found.items() if end[0] == BROKEN} - {name}
    needs = next(c.needs for c in abi.CHECKS if c.name == name)
    assert not wrong & set(needs)


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
def test_another_layout_is_told_part_by_part(tmp_path: Path) -> None:
    """Each part that differs has a line, and what would run on it is not run."""
    shim = build_shim(tmp_path)
    fault = (
        f"real = layout._ggml.connect\ndef connect(): ctypes.CDLL({str(shim)!r}); real({bytes(shim)!r})\n"
        "layout._connect = connect\nos.environ['BMOE_SHIM'] = {!r}"
    )
    code, found, _ = checked("--only", "identity: one token", fault=fault.format("sources"))
    assert code == 1
    broken = {name: said for name, (state, said) in found.items() if state == BROKEN}
    assert list(broken) == ["layout: matmul"]
    assert "src of ggml_mul_mat_id is" in broken["layout: matmul"]
    assert "see ext/bmoe/llama/ggml_abi.h" in broken["layout: matmul"]
    assert found["loader: opens"] == (SKIPPED, "needs layout: matmul")
    assert found["identity: one token at a time"] == (SKIPPED, "needs loader: opens")
    _, found, _ = checked("--only", "layout: ", fault=fault.format("ops"))
    assert {n for n, end in found.items() if end[0] == BROKEN} == {"layout: matmul", "layout: custom"}


ENDS = {
    "ctypes.string_at(8)": "crashed (SIGSEGV)",
    "os.abort()": "crashed (SIGABRT)",
    "os.write(2, b'/build/llama.cpp/src/x.cpp:7: GGML_ASSERT(false) failed\\n') and os.abort()": (
        "crashed (SIGABRT): x.cpp:7: GGML_ASSERT(false) failed"
    ),
    "os._exit(3)": "exited with code 3",
    "time.sleep(60)": "did not end within 1 s",
    "1 / 0": "ZeroDivisionError: division by zero",
    "sys.exit(5)": "SystemExit: 5",
}


@pytest.mark.parametrize("end", ENDS)
def test_what_a_check_dies_of_is_told(end: str) -> None:
    """And the checks after it are made."""
    fault = (
        f"def dies(files): {end}; return ''\nold = check.CHECKS[1]\n"
        "check.CHECKS[1] = check.Check(old.name, old.assumes, old.mend, dies, old.needs)\n"
        "real = check.run_apart\ncheck.run_apart = lambda work, installed: real(work, installed, 1.0)"
    )
    code, found, err = checked("--only", "names: bindings", fault=fault)
    assert code == 1
    assert found["names: bindings"][0] == BROKEN
    assert found["names: bindings"][1].startswith(ENDS[end])
    assert found["names: bindings of --mtp"][0] == OK
    assert "1 BROKEN" in err


def test_another_release_is_checked_not_refused() -> None:
    fault = "from importlib import metadata; metadata.version = lambda name: '0.3.99'"
    code, found, err = checked("--only", "loader: opens", fault=fault)
    assert (code, found["loader: opens"][0]) == (0, OK)
    assert f"llama-cpp-python 0.3.99 (bmoe is pinned to {PINNED}): " in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [(("--only", "no such"), "--only: no check has 'no such' in its name"), (("--model", "lost.gguf"), "no such file")],
)
def test_usage(argv: tuple[str, ...], says: str) -> None:
    code, found, err = checked(*argv)
    assert (code, found) == (2, {})
    assert err.startswith("bmoe: ")
    assert says in err


def test_without_llama_cpp_python() -> None:
    fault = (
        "from importlib import metadata\ndef none(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = none"
    )
    code, _, err = checked("--only", "names: bindings", fault=fault)
    assert (code, err) == (
        1,
        f"bmoe: llama-cpp-python is not installed: pip install llama-cpp-python=={PINNED}\n",
    )


def test_the_former_name_goes_on_working() -> None:
    assert commands.find(["seam", "--only", "x"]) is commands.find(["abi"]) is abi
    assert "seam" not in commands.summary()
    assert commands.find(["seams"]) is None
