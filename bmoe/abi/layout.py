"""Checks of layouts: structures by value and by pointer, against the library itself and against its headers."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import AbiError
from ..llama import _ggml
from ..llama.library import GgufInitParams
from ..llama.model import BuftOverride
from .check import BrokenError, Files, SkippedError, check, expect, none_missing
from .names import FUNCTIONS, bindings, llama_modules, tree_of

FIELDS = "layout: fields of parameters"
USED = {
    "load_model": {"params": "llama_model_params", "kv": "llama_model_kv_override"},
    "__init__": {"params": "llama_context_params"},
    "decode_each": {"batch": "llama_batch"},
}
"""In which functions of bmoe/llama/*.py which variable is which structure of the bindings."""
IN_HEADERS = ("llama_model_params", "llama_context_params", "llama_batch", "llama_sampler_chain_params")

Members = dict[str, tuple[int, int]]
"""Offset and size of each member, bytes."""


def fields_used() -> dict[str, set[str]]:
    """The fields that bmoe/llama/*.py reads or sets: one that ctypes does not know would be set without effect."""
    found: dict[str, set[str]] = {}
    for function in (node for module in llama_modules() for node in ast.walk(tree_of(module))):
        if not isinstance(function, ast.FunctionDef) or function.name not in USED:
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute):
                continue
            of = node.value.value if isinstance(node.value, ast.Subscript) else node.value
            struct = USED[function.name].get(of.id) if isinstance(of, ast.Name) else None
            if struct:
                found.setdefault(struct, set()).add(node.attr)
    return found


@check(
    FIELDS,
    "the bindings' structures have the fields that bmoe sets",
    "bmoe/llama/model.py (load_model), bmoe/llama/context.py (Context)",
    ("names: llama_cpp",),
)
def fields(files: Files) -> str:
    missing, n = [], 0
    for struct, names in fields_used().items():
        known = {field[0] for field in getattr(bindings(), struct)._fields_}
        missing += [f"{struct}.{name}" for name in names - known]
        n += len(names)
    none_missing("not in llama_cpp", missing)
    return f"{n} fields"


# ---- against the headers --------------------------------------------------------------------------


def measure(header: Path, struct: str, members: list[str]) -> tuple[int, Members]:
    """Size and members of a structure as a C compiler sees them; members that it does not have are left out."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise SkippedError("no C compiler")
    if not header.exists():
        raise SkippedError(f"no {header.name} is installed")
    with tempfile.TemporaryDirectory(prefix="bmoe-abi-") as folder:
        source, program = Path(folder) / "m.c", Path(folder) / "m"
        while True:
            lines = [f'printf("{m} %zu %zu\\n", offsetof(T, {m}), sizeof(((T *)0)->{m}));' for m in members]
            source.write_text(
                f'#include <stdio.h>\n#include <stddef.h>\n#include "{header}"\ntypedef struct {struct} T;\n'
                f'int main(void) {{ printf("%zu\\n", sizeof(T));\n' + "\n".join(lines) + "\nreturn 0; }\n"
            )
            build = [compiler, "-w", f"-I{header.parent}", "-o", str(program), str(source)]
            done = subprocess.run(build, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
            if done.returncode == 0:
                break
            unknown = set(re.findall(r"no member named '(\w+)'", done.stderr))
            if not unknown & set(members):
                raise BrokenError(f"{header.name} does not compile with struct {struct}")
            members = [m for m in members if m not in unknown]
        out = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split("\n")
    sizes = {line.split()[0]: (int(line.split()[1]), int(line.split()[2])) for line in out[1:] if line}
    return int(out[0]), sizes


def compare(struct: str, header: Path, size: int, members: Members) -> None:
    """Raises BrokenError that lists every member that lies elsewhere in the header's structure."""
    there, found = measure(header, struct, list(members))
    wrong = [f"size {there}, expected {size}"] if there != size else []
    for name, at in members.items():
        if name not in found:
            wrong.append(f"no {name}")
        elif found[name] != at:
            wrong.append(f"{name} at {found[name][0]} ({found[name][1]} bytes), expected {at[0]} ({at[1]})")
    if wrong:
        raise BrokenError(f"{struct} in {header.name}: {'; '.join(wrong)}")


def _of_ctypes(struct: Any) -> tuple[int, Members]:
    names = [field[0] for field in struct._fields_]
    return ctypes.sizeof(struct), {n: (getattr(struct, n).offset, getattr(struct, n).size) for n in names}


def _headers() -> Path:
    return Path(bindings().__file__).parent.parent / "include"


@check("layout: the bindings against llama.h", "structures by value are those of the header", "llama-cpp-python itself")
def by_value(files: Files) -> str:
    c = bindings()
    for struct in IN_HEADERS:
        compare(struct, _headers() / "llama.h", *_of_ctypes(getattr(c, struct)))
    size, members = _of_ctypes(c.llama_model_kv_override)
    # A union without a name: its first member has its place.
    union = {"tag": members["tag"], "key": members["key"], "val_i64": (members["value"][0], 8)}
    compare("llama_model_kv_override", _headers() / "llama.h", size, union)
    return f"{len(IN_HEADERS) + 1} structures"


@check(
    "layout: llama_embd against llama.h",
    "what carries a hidden row into a batch is that of the header",
    "llama-cpp-python itself",
    ("names: bindings of --mtp",),
)
def of_rows(files: Files) -> str:
    compare("llama_embd", _headers() / "llama.h", *_of_ctypes(bindings().llama_embd))
    return "1 structure"


@check(
    "layout: own structures against llama.h",
    "what the bindings leave out is as bmoe has it",
    "bmoe/llama/model.py (BuftOverride), bmoe/llama/library.py (GgufInitParams)",
)
def own(files: Files) -> str:
    compare("llama_model_tensor_buft_override", _headers() / "llama.h", *_of_ctypes(BuftOverride))
    compare("gguf_init_params", _headers() / "gguf.h", *_of_ctypes(GgufInitParams))
    return "2 structures"


@check(
    "layout: ext/bmoe/llama/ggml_abi.h against ggml.h",
    "ggml's public structures are as declared",
    "ext/bmoe/llama/ggml_abi.h",
)
def of_ggml(files: Files) -> str:
    for struct, (size, members) in _ggml.layout().items():
        header = "ggml-cpu.h" if struct == "ggml_type_traits_cpu" else "ggml.h"
        compare(struct, _headers() / header, size, members)
    return f"{len(_ggml.layout())} structures"


# ---- against the library --------------------------------------------------------------------------


def _connect() -> None:
    _ggml.connect(os.fsencode(os.path.realpath(bindings()._lib._name)))


def _enter(part: str, what: str) -> None:
    @check(f"layout: {part}", what, "ext/bmoe/llama/ggml_abi.h", (FUNCTIONS,))
    def compared(files: Files) -> str:
        _connect()
        try:
            return f"{_ggml.check_abi_part(part)} comparisons"
        except AbiError as e:
            raise BrokenError(re.sub(r"^.*?: |; install.*$", "", str(e))) from None


for _part, _what in _ggml.ABI_PARTS.items():
    _enter(_part, f"{_what}: as declared")
LAYOUTS = tuple(f"layout: {part}" for part in _ggml.ABI_PARTS)


class CpuTraits(ctypes.Structure):
    # bm_cpu_traits
    _fields_ = [
        ("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p), ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    ]  # fmt: skip


@check(
    "layout: quantizing by blocks",
    "from_float makes of each block the same bytes, whether the row is done whole or in parts",
    "ext/bmoe/streamer/kernel.pxi (_quantize)",
    LAYOUTS,
)
def by_blocks(files: Files) -> str:
    _connect()
    lib = ctypes.CDLL(bindings()._lib._name)
    lib.ggml_get_type_traits_cpu.restype = ctypes.POINTER(CpuTraits)
    kinds, done = {lib.ggml_get_type_traits_cpu(t).contents.vec_dot_type for t in (2, 8, 12, 14)}, []
    x = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    for kind in sorted(kinds):
        name, block, size = _ggml.type_info(kind)
        convert = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(
            lib.ggml_get_type_traits_cpu(kind).contents.from_float
        )
        whole, parts = np.zeros((2, 1024 // block * size), np.uint8)
        convert(x.ctypes.data, whole.ctypes.data, 1024)
        cut = 3 * 256
        convert(x.ctypes.data + 4 * cut, parts.ctypes.data + cut // block * size, 1024 - cut)
        convert(x.ctypes.data, parts.ctypes.data, cut)
        expect(f"bytes of {name} that differ", int((whole != parts).sum()), 0)
        done.append(name)
    return ", ".join(done)
