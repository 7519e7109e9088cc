"""Models: loaded by llama.cpp from their header alone, with tensors that the caller places."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelError
from . import _ggml, library
from .log import assertions_caught, last_complaint


@dataclass
class Model:
    """A loaded llama.cpp model and the host that holds its addresses.

    `tensors`: `{name: addresses of the ggml_tensors}`, two where a tensor of the file serves as two (a tied
    embedding). Their data are not there until the caller has placed them.
    """

    handle: Any
    host: _ggml.ModelHost
    tensors: dict[str, list[int]]
    vocab: Any = None
    n_vocab: int = 0
    dry: bool = False
    _keep: list[Any] = field(default_factory=list)

    def place(self, name: str, data: int) -> None:
        """Points the tensor(s) called `name` at their bytes at the address `data`."""
        for tensor in self.tensors[name]:
            self.host.place(tensor, data)

    def close(self) -> None:
        if self.handle is not None:
            library.C.llama_model_free(self.handle)
            self.handle = None
            self.host.close()


class BuftOverride(ctypes.Structure):
    # llama_model_tensor_buft_override, which the bindings leave out.
    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def load_model(
    header: bytes,
    size: int,
    name: str,
    overrides: dict[str, int] | None = None,
    load_mtp: bool = False,
    dry: bool = False,
) -> Model:
    """Loads a model from its header alone; no byte of tensor data is read.

    `size`: bytes of the file the header describes; `name` is for messages; `overrides`: integer keys to replace;
    `dry`: its contexts only say what they would allocate (`Context.buffers`), and it has no `tensors`.
    Raises ModelError with llama.cpp's own reason.
    """
    C = library.C
    host = _ggml.ModelHost(header, size)
    keep: list[Any] = []
    params = C.llama_model_default_params()
    no_devices = (ctypes.c_void_p * 1)(None)
    buft = (BuftOverride * 2)()
    buft[0].pattern, buft[0].buft = b".", host.buffer_type
    buft[1].pattern, buft[1].buft = None, None
    keep += [no_devices, buft]
    params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
    params.tensor_buft_overrides = ctypes.cast(buft, ctypes.c_void_p)
    params.n_gpu_layers = 0
    params.load_mode = 0  # LLAMA_LOAD_MODE_NONE: read through the stream, no map
    params.lazy_mode = 0  # LLAMA_LAZY_MODE_OFF
    params.use_extra_bufts = False
    params.check_tensors = False
    params.load_mtp = load_mtp
    params.no_alloc = dry
    if overrides:
        kv = (C.llama_model_kv_override * (len(overrides) + 1))()
        for i, (key, value) in enumerate(overrides.items()):
            kv[i].key = key.encode()
            kv[i].tag = C.LLAMA_KV_OVERRIDE_TYPE_INT
            kv[i].value.val_i64 = value
        kv[len(overrides)].key = b""
        params.kv_overrides = kv
        keep.append(kv)
    with assertions_caught() as log:
        handle = C.llama_model_load_from_file_ptr(ctypes.c_void_p(host.file_pointer), params)
    if not handle:
        host.close()
        raise ModelError(f"{name}: llama.cpp cannot load it: {last_complaint(log)}")
    vocab = C.llama_model_get_vocab(handle)
    return Model(handle, host, host.finish_load(), vocab, int(C.llama_vocab_n_tokens(vocab)), dry, keep)
