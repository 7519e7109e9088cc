"""llama.cpp as a library: the pinned release, the check of it, and its functions.

Everything goes through stock `llama_cpp`. `check()` runs once, before the first model: it refuses another
release than the pinned one and compares ggml's binary layout with the one the extensions were compiled for.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from importlib import metadata
from typing import Any

from ..errors import AbiError
from . import _ggml

PINNED = "0.3.36"
"""The llama-cpp-python release whose ggml layout ext/bmoe/llama/ggml_abi.h describes."""

# The low-level bindings: llama_cpp.llama_cpp, and a second handle on the same library for what they leave out.
# Other modules read `library.C`: it is None until `check()` has set it.
C: Any = None
_lib: Any = None

_lock = threading.Lock()


def check(installed: str | None = None) -> None:
    """Loads llama.cpp and makes sure that it is the one bmoe was built for. Cheap after the first call.

    `installed` overrides the version found (for tests). Raises AbiError with one line that says what to install.
    """
    global C, _lib
    with _lock:
        if C is not None and installed is None:
            return
        if installed is None:
            try:
                installed = metadata.version("llama-cpp-python")
            except metadata.PackageNotFoundError:
                raise AbiError(f"llama-cpp-python is not installed: pip install llama-cpp-python=={PINNED}") from None
        if installed != PINNED:
            raise AbiError(
                f"llama-cpp-python {installed} is installed, but this bmoe works with {PINNED} only: "
                f"pip install llama-cpp-python=={PINNED}"
            )
        try:
            from llama_cpp import llama_cpp as bindings
        except (ImportError, OSError, RuntimeError) as e:
            raise AbiError(f"llama-cpp-python {installed} cannot be loaded: {e}") from None
        path = os.path.realpath(bindings._lib._name)
        _ggml.connect(os.fsencode(path))
        _ggml.check_abi()
        _lib = _bind(path)
        bindings.llama_backend_init()
        _quiet()
        C = bindings


def lib() -> Any:
    """The library's functions that the bindings leave out, with their signatures."""
    return _lib


class GgufInitParams(ctypes.Structure):
    # gguf_init_params
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(ctypes.c_void_p))]


_P, _S, _I, _N, _B = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_bool
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    # Two calls of every decoded token, with cheaper signatures than the bindings have.
    "llama_get_logits_ith": (_P, [_P, ctypes.c_int32]),
    "llama_token_to_piece": (ctypes.c_int32, [_P, ctypes.c_int32, _P, ctypes.c_int32, ctypes.c_int32, _B]),
    "gguf_init_from_file": (_P, [_S, GgufInitParams]),
    "gguf_init_empty": (_P, []),
    "gguf_free": (None, [_P]),
    "gguf_get_data_offset": (_N, [_P]),
    "gguf_get_n_kv": (_I, [_P]),
    "gguf_find_key": (_I, [_P, _S]),
    "gguf_get_key": (_S, [_P, _I]),
    "gguf_get_kv_type": (ctypes.c_int, [_P, _I]),
    "gguf_get_val_data": (_P, [_P, _I]),
    "gguf_get_val_str": (_S, [_P, _I]),
    "gguf_get_arr_type": (ctypes.c_int, [_P, _I]),
    "gguf_get_arr_n": (_N, [_P, _I]),
    "gguf_get_arr_data": (_P, [_P, _I]),
    "gguf_get_n_tensors": (_I, [_P]),
    "gguf_get_tensor_offset": (_N, [_P, _I]),
    "gguf_get_tensor_name": (_S, [_P, _I]),
    "gguf_get_tensor_ne": (ctypes.POINTER(_I), [_P, _I]),
    "gguf_get_tensor_type": (ctypes.c_int, [_P, _I]),
    "gguf_get_tensor_size": (_N, [_P, _I]),
    "gguf_set_kv": (None, [_P, _P]),
    "gguf_remove_key": (_I, [_P, _S]),
    "gguf_add_tensor": (None, [_P, _P]),
    "gguf_get_meta_size": (_N, [_P]),
    "gguf_get_meta_data": (None, [_P, _P]),
    "ggml_get_first_tensor": (_P, [_P]),
    "ggml_get_next_tensor": (_P, [_P, _P]),
    "ggml_free": (None, [_P]),
    "ggml_type_name": (_S, [ctypes.c_int]),
}
"""The functions that the bindings leave out, with the types of their results and arguments."""


def _bind(path: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(path)
    for name, (result, args) in FUNCTIONS.items():
        try:
            f = getattr(lib, name)
        except AttributeError:
            raise AbiError(f"the installed llama-cpp-python has no function {name}") from None
        f.restype, f.argtypes = result, args
    return lib


def _quiet() -> None:
    """Keeps llama.cpp's log off stderr, unless the program has set that logger's level itself.

    What goes wrong is reported by exceptions, with the reason from the captured log.
    """
    logger = logging.getLogger("llama-cpp-python")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL + 1)


def type_name(number: int) -> str:
    """ggml's name of a tensor type, as "q4_K"."""
    return str(_lib.ggml_type_name(number).decode())


def exit_on_abort() -> None:
    """For programs: a failed assertion inside llama.cpp ends the process with one line and exit code 1."""
    check()
    _ggml.exit_on_abort()
