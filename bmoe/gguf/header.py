"""The header of one GGUF file, read by llama.cpp's own parser."""

from __future__ import annotations

import ctypes
import os
from typing import Any, NamedTuple

from .. import llama
from ..errors import ModelError

_SCALARS: dict[int, Any] = {
    0: ctypes.c_uint8, 1: ctypes.c_int8, 2: ctypes.c_uint16, 3: ctypes.c_int16, 4: ctypes.c_uint32,
    5: ctypes.c_int32, 6: ctypes.c_float, 7: ctypes.c_bool, 10: ctypes.c_uint64, 11: ctypes.c_int64,
    12: ctypes.c_double,
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
_LONGEST = 4096  # of an array that is kept: one number per layer is wanted, a vocabulary is not

Value = int | float | bool | str | tuple[int, ...]


class GgufTensor(NamedTuple):
    """One tensor as a GGUF header lists it: `offset` from the start of the data section, bytes."""

    name: str
    type: int
    shape: tuple[int, int, int, int]
    offset: int
    nbytes: int


class GgufHeader:
    """The parsed header of one GGUF file; a context manager, since llama.cpp's parser owns memory.

    Raises ModelError where the file is no GGUF or its header is damaged.
    """

    def __init__(self, path: str) -> None:
        llama.check()
        self.path = path
        self._ggml = ctypes.c_void_p()
        with llama.captured_log() as log:
            self._ctx = llama.lib().gguf_init_from_file(
                os.fsencode(path), llama.GgufInitParams(True, ctypes.pointer(self._ggml))
            )
        if not self._ctx:
            raise ModelError(f"{path}: damaged or truncated GGUF header: {llama.first_complaint(log)}")

    def __enter__(self) -> GgufHeader:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ctx:
            llama.lib().gguf_free(self._ctx)
            llama.lib().ggml_free(self._ggml)
            self._ctx = None

    @property
    def data_offset(self) -> int:
        """Bytes before the data section."""
        return int(llama.lib().gguf_get_data_offset(self._ctx))

    def tensors(self) -> list[GgufTensor]:
        """The directory, in file order."""
        g, ctx = llama.lib(), self._ctx
        return [
            GgufTensor(
                g.gguf_get_tensor_name(ctx, i).decode(),
                g.gguf_get_tensor_type(ctx, i),
                tuple(g.gguf_get_tensor_ne(ctx, i)[:4]),
                g.gguf_get_tensor_offset(ctx, i),
                g.gguf_get_tensor_size(ctx, i),
            )
            for i in range(g.gguf_get_n_tensors(ctx))
        ]

    def values(self) -> dict[str, Value]:
        """Every key whose value is a number, a boolean, a string, or whole numbers by layer."""
        g, ctx = llama.lib(), self._ctx
        found: dict[str, Value] = {}
        for i in range(g.gguf_get_n_kv(ctx)):
            kind = g.gguf_get_kv_type(ctx, i)
            key = g.gguf_get_key(ctx, i).decode("utf-8", "replace")
            if kind == _STRING:
                found[key] = (g.gguf_get_val_str(ctx, i) or b"").decode("utf-8", "replace")
            elif kind in _SCALARS:
                found[key] = ctypes.cast(g.gguf_get_val_data(ctx, i), ctypes.POINTER(_SCALARS[kind]))[0]
            elif kind == _ARRAY and (of := g.gguf_get_arr_type(ctx, i)) in _INTEGERS:
                n = g.gguf_get_arr_n(ctx, i)
                if 0 < n <= _LONGEST:
                    found[key] = tuple(ctypes.cast(g.gguf_get_arr_data(ctx, i), ctypes.POINTER(_SCALARS[of]))[:n])
        return found

    def merged_with(self, others: list[GgufHeader]) -> bytes:
        """The header of one file that holds the tensors of this shard and then of `others`, without split keys."""
        g = llama.lib()
        whole = g.gguf_init_empty()
        try:
            g.gguf_set_kv(whole, self._ctx)
            for key in (b"split.no", b"split.count", b"split.tensors.count"):
                g.gguf_remove_key(whole, key)
            for shard in (self, *others):
                tensor = g.ggml_get_first_tensor(shard._ggml)
                while tensor:
                    g.gguf_add_tensor(whole, tensor)
                    tensor = g.ggml_get_next_tensor(shard._ggml, tensor)
            buffer = ctypes.create_string_buffer(g.gguf_get_meta_size(whole))
            g.gguf_get_meta_data(whole, buffer)
            return buffer.raw
        finally:
            g.gguf_free(whole)
