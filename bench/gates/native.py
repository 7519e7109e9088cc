"""The references in native.c and the counter in mallocs.c, compiled once in a session with the machine's C compiler."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent
Tokens = npt.NDArray[np.int32]
Windows = npt.NDArray[np.int64]


def compiler() -> str | None:
    """The C compiler, as setuptools would choose it."""
    return shutil.which(os.environ.get("CC", "cc").split()[0])


def build(name: str) -> Path:
    """Compiles bench/`name`.c to a shared library. Raises RuntimeError with the compiler's words."""
    cc = compiler()
    if cc is None:
        raise RuntimeError("no C compiler: install one, or set CC")
    out = _place() / f"{name}.so"
    flags = ["-O3", "-D_GNU_SOURCE", "-fno-strict-aliasing", "-fPIC", "-shared"]
    done = subprocess.run([cc, *flags, "-o", out, HERE / f"{name}.c", "-ldl"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}.c does not compile: {done.stderr.strip()}")
    return out


@functools.cache
def _place() -> Path:
    path = tempfile.mkdtemp(prefix="bmoe-bench-")
    atexit.register(shutil.rmtree, path, True)
    return Path(path)


_loaded: list[ctypes.CDLL] = []


def library(path: Path | None = None) -> ctypes.CDLL:
    """native.c, compiled at the first call or already at `path`."""
    if not _loaded:
        _loaded.append(_bind(ctypes.CDLL(os.fspath(path or build("native")))))
    return _loaded[0]


def _bind(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.plain_drafter.argtypes = [pointer, number, number, ctypes.c_int, ctypes.c_int, pointer]
    for policy in (lib.plain_lru, lib.plain_votes):
        policy.argtypes = [pointer, *[ctypes.c_int] * 5, pointer]
        policy.restype = number
    lib.plain_reads.argtypes = [ctypes.c_int, pointer, ctypes.c_int]
    lib.marks_end.argtypes = [ctypes.c_char_p]
    return lib


def plain_drafter(text: Tokens, prompt: int, n: int, m: int) -> tuple[int, int, int, int]:
    """Steps, drafts, tokens drafted and accepted along `text` (int32): up to `m` tokens after the newest `n`."""
    out = (ctypes.c_int64 * 4)()
    if library().plain_drafter(text.ctypes.data, len(text), prompt, n, m, out):
        raise MemoryError
    return out[0], out[1], out[2], out[3]


def plain_policy(policy: str, rows: Tokens, n_layers: int, n_expert: int, n_slots: int) -> tuple[int, tuple[int, ...]]:
    """Nanoseconds, and hits, misses, evictions, over `rows`: int32 [n, 1 + k], a layer and its routed experts."""
    out = (ctypes.c_int64 * 3)()
    run = getattr(library(), f"plain_{policy}")
    took = run(rows.ctypes.data, len(rows), rows.shape[1] - 1, n_layers, n_expert, n_slots, out)
    if took < 0:
        raise MemoryError
    return took, tuple(out)


def as_windows(windows: Sequence[tuple[int, int, int]]) -> Windows:
    """Offset, length and address of each read, as `plain_reads` takes them."""
    return np.array(windows, np.int64).reshape(-1, 3)


def plain_reads(fd: int, windows: Windows) -> None:
    """One pread after the other."""
    if library().plain_reads(fd, windows.ctypes.data, len(windows)):
        raise OSError("a read came short")
