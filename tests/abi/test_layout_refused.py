"""Another llama-cpp-python than the one bmoe was built for: refused by name, by function, or by layout."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from abi_shim import CC, build_shim
from cli_process import environment

import bmoe
from bmoe.llama import _ggml, library


def test_the_installed_one_is_right() -> None:
    library.check()
    library.check(installed=library.PINNED)
    assert _ggml.check_abi() >= 25


@pytest.mark.parametrize("installed", ["0.3.40", "0.3.3", "1.0"])
def test_another_release(installed: str) -> None:
    with pytest.raises(bmoe.AbiError) as e:
        library.check(installed=installed)
    assert str(e.value) == (
        f"llama-cpp-python {installed} is installed, but this bmoe works with {library.PINNED} only: "
        f"pip install llama-cpp-python=={library.PINNED}"
    )
    assert e.value.exit_code == 1
    library.check()


def test_what_is_installed_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "C", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(bmoe.AbiError, match=r"llama-cpp-python 0\.0\.1 is installed"):
        bmoe.Engine.open()

    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    with pytest.raises(bmoe.AbiError, match=f"not installed: pip install llama-cpp-python=={library.PINNED}"):
        bmoe.Engine.open()


def test_the_pin_is_one() -> None:
    """pyproject.toml installs what the code was built for."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"llama-cpp-python=={library.PINNED}"' in text


COMMAND = "import sys, bmoe.llama.library; {}; from bmoe.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            "bmoe.llama.library.PINNED = '9.9.9'",
            "but this bmoe works with 9.9.9 only: pip install llama-cpp-python==9.9.9",
        ),
        # None in sys.modules makes an import of it fail.
        ("sys.modules['llama_cpp'] = None", f"llama-cpp-python {library.PINNED} cannot be loaded"),
    ],
)
def test_the_command_line_says_so(change: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(change), "-n", "1"], env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("bmoe: llama-cpp-python ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


PROBE = """
import ctypes, ctypes.util, os, sys
from llama_cpp import llama_cpp
from bmoe import errors
from bmoe.llama import _ggml
shim = os.fsencode(sys.argv[1])
loaded = ctypes.CDLL(sys.argv[1])
for change in sys.argv[2:]:
    pid = os.fork()
    if not pid:
        os.environ["BMOE_SHIM"] = change
        try:
            _ggml.connect(os.fsencode(ctypes.util.find_library("m")) if change == "functions" else shim)
            print(change, "passes", _ggml.check_abi(), sep="|", flush=True)
        except errors.AbiError as e:
            print(change, "refused", e, sep="|", flush=True)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        print(change, "died", status, sep="|", flush=True)
"""
CHANGES = {
    "nothing": "",
    "functions": "has no function ggml_init",
    "size": "size of ggml_tensor is",
    "members": "ne is [3, 5, 7, 4]",
    "name": "address of name is",
    "data": "data is 0",
    "ops": "op of ggml_mul_mat_id is b'NONE'",
    "views": "view_offs is 12",
    "sources": "src of ggml_mul_mat_id is",
    "params": "userdata of ggml_custom_4d is 0",
    "buffers": "functions of a buffer type",
    "kernel": "vec_dot of f32 is 0.0",
    "kernel type": "vec_dot_type of f32 is 7",
}


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
def test_another_layout(tmp_path: Path) -> None:
    shim = build_shim(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, shim, *CHANGES], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    ends = {name: (what, said) for name, what, said in (line.split("|") for line in done.stdout.splitlines())}
    assert ends["nothing"][0] == "passes"
    for change, says in CHANGES.items():
        if change != "nothing":
            what, said = ends[change]
            assert what == "refused", (change, what, said)
            assert says in said, change
            assert "install" in said, change
