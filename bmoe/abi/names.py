"""Checks of names: everything that bmoe takes from the bindings, from the libraries and from their tables."""

from __future__ import annotations

import ast
import ctypes
import inspect
import os
import re
from collections.abc import Iterator
from importlib import import_module, resources
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import llama
from ..llama import _ggml, head, library
from .check import BrokenError, Files, SkippedError, check, expect, none_missing

if TYPE_CHECKING:
    from importlib.abc import Traversable

# fmt: off
GRAPH_OPS = frozenset({
    "ADD", "ARGSORT", "CONT", "CUSTOM", "FILL", "MUL", "MUL_MAT", "MUL_MAT_ID", "NONE", "PERMUTE", "RESHAPE",
    "SET_ROWS", "SOFT_MAX", "SQRT", "TOP_K", "TRANSPOSE", "UNARY", "VIEW",
})
# fmt: on
"""The operations that ext/*.pyx knows by name."""
UNARY_OPS = frozenset({"SIGMOID", "SOFTPLUS"})

BINDINGS = "names: bindings"
FUNCTIONS = "names: ggml functions"
LEFT_OUT = "names: functions without bindings"
MTP_CALLS = "names: calls of --mtp"


def bindings() -> Any:
    """llama_cpp's low-level bindings."""
    try:
        return import_module("llama_cpp.llama_cpp")
    except Exception as e:
        raise BrokenError(f"llama_cpp cannot be loaded: {e}") from None


def libllama() -> ctypes.CDLL:
    """libllama, and through it the libraries that it needs."""
    return ctypes.CDLL(bindings()._lib._name)


def has(lib: ctypes.CDLL, name: str) -> bool:
    """Whether the library exports a function of that name."""
    try:
        getattr(lib, name)
    except AttributeError:
        return False
    return True


def llama_modules() -> list[ModuleType]:
    """The modules of bmoe.llama that every run needs: all that is Python but the head's, which only --mtp needs."""
    names = [m.name for m in iter_modules(llama.__path__) if not m.name.startswith("_")]
    return [import_module(f"{llama.__name__}.{name}") for name in names if name != "head"]


def tree_of(module: ModuleType) -> ast.Module:
    """The parsed source of a module of bmoe's: what it uses is read there, so that no list of it can be outdated."""
    return ast.parse(inspect.getsource(module))


def _is_bindings(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id in ("C", "bindings")
    return isinstance(node, ast.Attribute) and node.attr == "C"


def used_of_bindings(*modules: ModuleType) -> set[str]:
    """The names that modules take from the bindings."""
    nodes = (node for module in modules for node in ast.walk(tree_of(module)))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and _is_bindings(n.value)}


@check(
    "names: llama_cpp", "llama_cpp loads, and its library is the one that is loaded", "bmoe/llama/library.py (check)"
)
def loads(files: Files) -> str:
    path = bindings()._lib._name
    _ggml.connect(os.fsencode(os.path.realpath(path)))
    return str(path).rpartition("/")[2]


@check(
    BINDINGS,
    "every name that bmoe takes from the bindings is there",
    "bmoe/llama/*.py (library.C)",
    ("names: llama_cpp",),
)
def in_the_bindings(files: Files) -> str:
    used = used_of_bindings(*llama_modules())
    none_missing("not in llama_cpp", (n for n in used if not hasattr(bindings(), n)))
    return f"{len(used)} names"


@check(
    "names: bindings of --mtp",
    "every name that --mtp takes from the bindings is there",
    "bmoe/llama/head.py",
    ("names: llama_cpp",),
)
def in_the_bindings_for_mtp(files: Files) -> str:
    used = used_of_bindings(head)
    none_missing("not in llama_cpp", (n for n in used if not hasattr(bindings(), n)))
    return f"{len(used)} names"


@check(LEFT_OUT, "libllama has the functions that the bindings leave out", "bmoe/llama/library.py (FUNCTIONS)")
def without_bindings(files: Files) -> str:
    lib = libllama()
    none_missing("not in libllama", (n for n in library.FUNCTIONS if not has(lib, n)))
    return f"{len(library.FUNCTIONS)} functions"


@check(FUNCTIONS, "libllama has the functions that the extensions call", "ext/bmoe/llama/_ggml.pyx (_functions)")
def of_ggml(files: Files) -> str:
    lib, needed = libllama(), [n for n, needed in _ggml.function_names() if needed]
    none_missing("not in libllama", (n for n in needed if not has(lib, n)))
    return f"{len(needed)} functions"


@check(
    "names: the tiled kernel (optional)",
    "both of its functions are exported, or neither",
    "ext/bmoe/llama/_ggml.pyx (connect)",
)
def tiled(files: Files) -> str:
    lib = libllama()
    found = [n for n in ("ggml_compute_forward_mul_mat_id_tiled", "ggml_tiled_wdata_size") if has(lib, n)]
    if len(found) == 1:
        raise BrokenError(f"only {found[0]} is there")
    return "there" if found else "not there: wide batches run one vec_dot for each row"


@check(
    "names: throwing out of an assertion (optional)",
    "the C++ library exports what throws",
    "ext/bmoe/llama/ggml_log.pxi (_throw)",
)
def throws(files: Files) -> str:
    if not has(libllama(), "_ZSt21__throw_runtime_errorPKc"):
        raise SkippedError("not there: a failed assertion while a model is opened ends the process")
    return "there"


@check(MTP_CALLS, "libllama has --mtp's calls under their mangled names", "bmoe/llama/head.py (SYMBOLS)")
def mangled(files: Files) -> str:
    lib, names = libllama(), [symbol for symbol, _, _ in head.SYMBOLS.values()]
    none_missing("not in libllama", (n for n in names if not has(lib, n)))
    return f"{len(names)} calls"


def heads_in(library_bytes: bytes) -> tuple[set[str], set[str]]:
    """Of a libllama: architectures with a graph for a head, and those of them that assert that there is one head only.

    Names without `-` and `_`, from the mangled names of the classes and from the texts of the assertions.
    """
    classes = {m.decode() for m in re.findall(rb"N\d+llama_model_(\w+?)9graph_mtp[CE]", library_bytes)}
    single = {m.decode() for m in re.findall(rb'n_layer_nextn == 1 && "(\w+) MTP', library_bytes)}
    return {plain(c) for c in classes}, {plain(s) for s in single}


def plain(arch: str) -> str:
    """An architecture's name without what its spellings differ in."""
    return re.sub(r"[-_]", "", arch).lower()


@check("names: heads", "HEADS lists the architectures with a graph for a head", "bmoe/llama/head.py (HEADS)")
def heads(files: Files) -> str:
    with open(bindings()._lib._name, "rb") as file:
        there, single = heads_in(file.read())
    if not there:
        raise BrokenError("libllama has no class graph_mtp")
    wrong = [a for a in head.HEADS if plain(a) not in there]
    more = [f"{a} ({n} heads, one is asserted)" for a, n in head.HEADS.items() if n > 1 and plain(a) in single]
    none_missing("in HEADS, but without a graph for so many", [*wrong, *more])
    new = there - {plain(a) for a in head.HEADS}
    return f"{len(there)} architectures" + (f"; could be added: {', '.join(sorted(new))}" if new else "")


def _names_by_number(function: Any) -> Iterator[str]:
    """What a table of names holds, as far as it goes: past its end there is no address near the first name."""
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_int]
    first = function(0)
    for i in range(256):
        address = function(i)
        if not address or abs(address - first) > 1 << 20:
            return
        yield ctypes.string_at(address).decode("ascii", "replace")


@check(
    "names: operations",
    "operations of the graph have the names that are looked for",
    "ext/bmoe/streamer/_router.pyx, ext/bmoe/streamer/_dropping.pyx",
)
def operations(files: Files) -> str:
    lib = libllama()
    ops, unary = set(_names_by_number(lib.ggml_op_name)), set(_names_by_number(lib.ggml_unary_op_name))
    none_missing("no operation is called", [*(GRAPH_OPS - ops), *(UNARY_OPS - unary)])
    return f"{len(GRAPH_OPS) + len(UNARY_OPS)} operations"


@check("names: values", "numbers that bmoe writes are what they stand for", "bmoe/llama/model.py (load_model)")
def values(files: Files) -> str:
    c, numbers = bindings(), {"LLAMA_LOAD_MODE_NONE": 0, "LLAMA_LAZY_MODE_OFF": 0}
    none_missing("not in llama_cpp", (n for n in numbers if not hasattr(c, n)))
    for name, number in numbers.items():
        expect(name, int(getattr(c, name)), number)
    return "2 numbers"


def _python_files(folder: Traversable) -> Iterator[Traversable]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _python_files(entry)
        elif entry.name.endswith(".py"):
            yield entry


@check(
    "names: helpers in Python",
    "llama_cpp's classes that bmoe uses are there",
    "bmoe/engine/chat.py, bmoe/speculation/drafters.py",
)
def helpers(files: Files) -> str:
    missing, n = [], 0
    for entry in _python_files(resources.files("bmoe")):
        for node in ast.walk(ast.parse(entry.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llama_cpp."):
                module = import_module(str(node.module))
                missing += [f"{node.module}.{a.name}" for a in node.names if not hasattr(module, a.name)]
                n += len(node.names)
    none_missing("not in llama_cpp", missing)
    expect("classes are imported from llama_cpp", n > 0, True)
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    given = {"template", "eos_token", "bos_token"}
    none_missing("Jinja2ChatFormatter does not take", given - set(inspect.signature(Jinja2ChatFormatter).parameters))
    return f"{n} classes"
