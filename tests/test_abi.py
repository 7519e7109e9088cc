"""Another llama-cpp-python than the one bmoe was built for: refused by name, by function, or by layout."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import environment

import bmoe
from bmoe import _ggml, llama

CC = shutil.which(os.environ.get("CC", "cc"))


def test_the_installed_one_is_right() -> None:
    llama.check()
    llama.check(installed=llama.PINNED)
    assert _ggml.check_abi() >= 25


@pytest.mark.parametrize("installed", ["0.3.40", "0.3.3", "1.0"])
def test_another_release(installed: str) -> None:
    with pytest.raises(bmoe.AbiError) as e:
        llama.check(installed=installed)
    assert str(e.value) == (
        f"llama-cpp-python {installed} is installed, but this bmoe works with {llama.PINNED} only: "
        f"pip install llama-cpp-python=={llama.PINNED}"
    )
    assert e.value.exit_code == 1
    llama.check()


def test_what_is_installed_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "C", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(bmoe.AbiError, match=r"llama-cpp-python 0\.0\.1 is installed"):
        bmoe.Engine.open()

    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    with pytest.raises(bmoe.AbiError, match=f"not installed: pip install llama-cpp-python=={llama.PINNED}"):
        bmoe.Engine.open()


def test_the_pin_is_one() -> None:
    """pyproject.toml installs what the code was built for."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'"llama-cpp-python=={llama.PINNED}"' in text


COMMAND = "import sys, bmoe.llama; {}; from bmoe.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("bmoe.llama.PINNED = '9.9.9'", "but this bmoe works with 9.9.9 only: pip install llama-cpp-python==9.9.9"),
        # None in sys.modules makes an import of it fail.
        ("sys.modules['llama_cpp'] = None", f"llama-cpp-python {llama.PINNED} cannot be loaded"),
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


# A library in front of libllama whose functions change one thing each, as $BMOE_SHIM says.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int is(const char *what) { const char *s = getenv("BMOE_SHIM"); return s && !strcmp(s, what); }
#define REAL(type, name, args) ((type (*) args)dlsym(RTLD_NEXT, name))

size_t ggml_tensor_overhead(void) { return REAL(size_t, "ggml_tensor_overhead", (void))() + (is("size") ? 16 : 0); }
char *ggml_new_tensor_4d(void *c, int t, int64_t a, int64_t b, int64_t d, int64_t e) {
    char *x = REAL(char *, "ggml_new_tensor_4d", (void *, int, int64_t, int64_t, int64_t, int64_t))(c, t, a, b, d, e);
    return x + (is("members") ? 8 : 0);
}
const char *ggml_get_name(void *t) { return REAL(char *, "ggml_get_name", (void *))(t) + is("name"); }
void *ggml_get_data(void *t) { return is("data") ? NULL : REAL(void *, "ggml_get_data", (void *))(t); }
const char *ggml_op_name(int op) { return is("ops") ? "NONE" : REAL(char *, "ggml_op_name", (int))(op); }
char *ggml_view_1d(void *c, void *t, int64_t n, size_t at) {
    return REAL(char *, "ggml_view_1d", (void *, void *, int64_t, size_t))(c, t, n, at + (is("views") ? 4 : 0));
}
void *ggml_mul_mat_id(void *c, void *a, void *b, void *ids) {
    void **t = REAL(void *, "ggml_mul_mat_id", (void *, void *, void *, void *))(c, a, b, ids);
    for (int i = 0; is("sources") && i < 40; i++) if (t[i] == ids) t[i] = a;
    return t;
}
void *ggml_custom_4d(void *c, int ty, int64_t p, int64_t q, int64_t r, int64_t s, void **args, int n, void *fun,
                     int tasks, void *user) {
    char *t = REAL(char *, "ggml_custom_4d", (void *, int, int64_t, int64_t, int64_t, int64_t, void **, int, void *,
                   int, void *))(c, ty, p, q, r, s, args, n, fun, tasks, user);
    for (int i = 0; is("params") && i < 256; i += 4) if (*(void **)(t + i) == user) *(void **)(t + i) = NULL;
    return t;
}
const void *ggml_backend_cpu_buffer_type(void) {
    static void *moved[16];
    void *real = REAL(void *, "ggml_backend_cpu_buffer_type", (void))();
    memcpy(moved + 1, real, 8 * sizeof(void *));
    return is("buffers") ? moved : real;
}
static void dot(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc) { *s = 0; }
const void *ggml_get_type_traits_cpu(int type) {
    static void *copy[4];
    memcpy(copy, REAL(void *, "ggml_get_type_traits_cpu", (int))(type), sizeof(copy));
    if (is("kernel")) copy[1] = (void *)dot;
    if (is("kernel type")) copy[2] = (void *)7;
    return copy;
}
"""

PROBE = """
import ctypes, ctypes.util, os, sys
from llama_cpp import llama_cpp
from bmoe import _ggml, errors
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
    source, shim = tmp_path / "shim.c", tmp_path / "libshim.so"
    source.write_text(SHIM)
    llama.check()
    path = Path(llama.C._lib._name).resolve()
    build = [str(CC), "-shared", "-fPIC", "-w", "-o", shim, source, "-Wl,--no-as-needed", path, "-ldl"]
    subprocess.run([*build, f"-Wl,-rpath,{path.parent}"], check=True, capture_output=True)
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
