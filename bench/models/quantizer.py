"""ggml's own quantizer, from the installed llama-cpp-python: the gguf package cannot write K-quants itself."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path


@cache
def load_quantizer() -> Callable[..., int]:
    """`ggml_quantize_chunk`, found without importing llama_cpp. Raises ImportError without llama-cpp-python."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ImportError("llama-cpp-python is not installed here: its libggml-base has the quantizer")
    quantize = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-base.so")).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return quantize
