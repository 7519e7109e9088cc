"""The one place in Python that knows llama.cpp: version check, GGUF reading, model and context handles.

Everything goes through stock `llama_cpp`. `check()` runs once, before the first model: it refuses another
release than the pinned one and compares ggml's binary layout with the one the extensions were compiled for.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import AbiError, BmoeError, ModelError
from . import _ggml

PINNED = "0.3.36"
"""The llama-cpp-python release whose ggml layout ext/bmoe/llama/ggml_abi.h describes."""

# The low-level bindings: llama_cpp.llama_cpp, and a second handle on the same library for what they leave out.
C: Any = None
_lib: Any = None

_lock = threading.Lock()
_log_lock = threading.RLock()


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


# ---- log ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collects what llama.cpp logs inside the block: the messages are there after it. Then who had the log has it back.

    One block at a time in a process: the log is global.
    """
    lines: list[str] = []
    with _log_lock:
        _ggml.capture_log()
        try:
            yield lines
        finally:
            lines += _ggml.release_log().decode("utf-8", "replace").split("\0")


def first_complaint(lines: list[str]) -> str:
    """The first complaint of the GGUF parser: those after it only say that it gave up."""
    return next((re.sub(r"^\w+: ", "", line.strip()) for line in lines if line.strip()), "no reason given")


def _reason(lines: list[str]) -> str:
    """The line of llama.cpp's log that says why it gave up."""
    for line in reversed(lines):
        text = line.strip()
        if "error" in text.lower() and not text.endswith("failed to load model"):
            return re.sub(r"^\w+: ", "", text)
    return next((line.strip() for line in reversed(lines) if "fail" in line.lower()), "no reason given")


def type_name(number: int) -> str:
    """ggml's name of a tensor type, as "q4_K"."""
    return str(_lib.ggml_type_name(number).decode())


# ---- model ----------------------------------------------------------------------------------------


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
            C.llama_model_free(self.handle)
            self.handle = None
            self.host.close()


def exit_on_abort() -> None:
    """For programs: a failed assertion inside llama.cpp ends the process with one line and exit code 1."""
    check()
    _ggml.exit_on_abort()


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """`captured_log` around a call that catches C++ exceptions: a failed assertion inside becomes one of its errors."""
    with captured_log() as log:
        _ggml.throw_on_abort(True)
        try:
            yield log
        finally:
            _ggml.throw_on_abort(False)


class _BuftOverride(ctypes.Structure):
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
    host = _ggml.ModelHost(header, size)
    keep: list[Any] = []
    params = C.llama_model_default_params()
    no_devices = (ctypes.c_void_p * 1)(None)
    buft = (_BuftOverride * 2)()
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
    with _watched() as log:
        handle = C.llama_model_load_from_file_ptr(ctypes.c_void_p(host.file_pointer), params)
    if not handle:
        host.close()
        raise ModelError(f"{name}: llama.cpp cannot load it: {_reason(log)}")
    vocab = C.llama_model_get_vocab(handle)
    return Model(handle, host, host.finish_load(), vocab, int(C.llama_vocab_n_tokens(vocab)), dry, keep)


# ---- context --------------------------------------------------------------------------------------

ABORTED = 2
"""What llama_decode returns where the abort callback stopped it."""

_BUFFER_LINE = re.compile(r"(\S+)\s+(KV|RS|compute|output)\s+buffer size\s*=\s*([\d.]+) MiB")
# A dry model's context says that its KV buffers have no size; what they would have is only here.
_DRY_KV_LINE = re.compile(r"llama_kv_cache\w*: size\s*=\s*([\d.]+) MiB")


@dataclass(frozen=True)
class BufferSizes:
    """What a context has allocated, bytes: KV cache, recurrent state, compute and output buffers."""

    kv: int
    recurrent: int
    compute: int

    def __add__(self, other: BufferSizes) -> BufferSizes:
        return BufferSizes(self.kv + other.kv, self.recurrent + other.recurrent, self.compute + other.compute)


class Context:
    """A llama.cpp context: token batches in, logits out. One thread at a time, except for the stop flag."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_ubatch: int,
        n_threads: int,
        n_outputs: int = 1,
        n_each: int = 0,
        n_snapshots: int = 0,
        mtp: bool = False,
        eval_callback: int = 0,
        abort_callback: int = 0,
        userdata: int = 0,
    ) -> None:
        params = C.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_ubatch
        params.n_ubatch = n_ubatch
        params.n_seq_max = 1
        # Logits are wanted for few rows; the default reserves vocabulary x batch floats.
        params.n_outputs_max = n_outputs
        params.n_rs_seq = n_snapshots
        params.ctx_type = C.LLAMA_CONTEXT_TYPE_MTP if mtp else C.LLAMA_CONTEXT_TYPE_DEFAULT
        params.n_threads = n_threads
        params.n_threads_batch = n_threads
        params.offload_kqv = False
        params.op_offload = False
        params.no_perf = True
        if eval_callback:
            params.cb_eval = C.ggml_backend_sched_eval_callback(eval_callback)
            params.cb_eval_user_data = ctypes.c_void_p(userdata)
        if abort_callback:
            params.abort_callback = ctypes.cast(ctypes.c_void_p(abort_callback), C.ggml_abort_callback)
            params.abort_callback_data = ctypes.c_void_p(userdata)
        with _watched() as log:
            self.handle = C.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise BmoeError(
                f"llama.cpp cannot make a context of {n_ctx} tokens ({_reason(log)}): use a smaller -c or --ubatch"
            )
        self.model = model
        self.buffers = self._sizes(log, model.dry)
        self.n_ctx = int(C.llama_n_ctx(self.handle))
        self.n_batch = int(C.llama_n_batch(self.handle))
        self.n_vocab = model.n_vocab
        self._memory = C.llama_get_memory(self.handle)
        self.recurrent = bool(C.llama_model_is_recurrent(model.handle) or C.llama_model_is_hybrid(model.handle))
        self.n_snapshots = int(C.llama_n_rs_seq(self.handle))
        self._batch = C.llama_batch_init(n_each or n_outputs, 0, 1)
        self._address = int(ctypes.cast(self.handle, ctypes.c_void_p).value or 0)
        self._vocab_address = int(ctypes.cast(model.vocab, ctypes.c_void_p).value or 0)
        self._logits_at = 0
        self._logits: npt.NDArray[np.float32] = np.empty(0, np.float32)

    @staticmethod
    def _sizes(log: list[str], dry: bool) -> BufferSizes:
        found = {"KV": 0.0, "RS": 0.0, "compute": 0.0, "output": 0.0}
        for line in log:
            if m := _BUFFER_LINE.search(line):
                found[m[2]] += float(m[3])
            elif dry and (m := _DRY_KV_LINE.search(line)):
                found["KV"] += float(m[1])
        mib = 1 << 20
        return BufferSizes(
            int(found["KV"] * mib), int(found["RS"] * mib), int((found["compute"] + found["output"]) * mib)
        )

    def decode(self, tokens: npt.NDArray[np.int32]) -> int:
        """Appends `tokens` (int32, at most one batch) to the sequence; logits of the last are kept.

        Returns llama_decode's code: 0 done, 1 no room, ABORTED, negative for errors.
        """
        batch = C.llama_batch_get_one(tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), len(tokens))
        return int(C.llama_decode(self.handle, batch))

    def decode_each(self, tokens: npt.NDArray[np.int32], position: int, skip: int = 0) -> int:
        """As `decode`, at `position` (how many tokens the sequence holds), with logits of all but the first `skip`.

        At most `n_outputs` of them, in a batch of at most `n_each` tokens.
        """
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = int(token)
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= skip
        return int(C.llama_decode(self.handle, batch))

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits of the last decoded token, float32 [n_vocab]: a view, valid until the next decode."""
        address = _lib.llama_get_logits_ith(self.handle, -1)
        if address != self._logits_at:  # the buffer stays where it is: one view serves every step
            floats = (ctypes.c_float * self.n_vocab).from_address(address)
            self._logits_at, self._logits = address, np.ctypeslib.as_array(floats)
        return self._logits

    def logits_of(self, row: int) -> npt.NDArray[np.float32]:
        """As `logits`, of the token at place `row` of the last batch, where they were kept."""
        floats = (ctypes.c_float * self.n_vocab).from_address(_lib.llama_get_logits_ith(self.handle, row))
        return np.ctypeslib.as_array(floats)

    def greedy(self, row: int = -1) -> tuple[int, bool, bytes]:
        """The likeliest token after the last decoded one: its id, whether it ends a generation, its bytes.

        `row`: after the token at that place of the batch instead, where its logits were kept.
        """
        token, end, text = _ggml.greedy_token(self._address, self._vocab_address, self.n_vocab, row)
        return token, end, piece(self.model, token) if text is None else text

    def truncate(self, n: int) -> bool:
        """Keeps the first `n` tokens of the sequence. False where this kind of memory cannot."""
        return bool(C.llama_memory_seq_rm(self._memory, 0, n, -1))

    def first_kept(self) -> int:
        """Position of the oldest token still held: above 0 where a sliding window has dropped some."""
        return int(C.llama_memory_seq_pos_min(self._memory, 0))

    def clear(self) -> None:
        """Empties the sequence."""
        C.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        if self.handle is not None:
            C.llama_batch_free(self._batch)
            C.llama_free(self.handle)
            self.handle = None


# ---- text -----------------------------------------------------------------------------------------


def tokenize(model: Model, text: str, *, special: bool = True) -> list[int]:
    """Token ids of `text`, with BOS where the model wants one; `special`: control tokens are recognised."""
    raw = text.encode("utf-8")
    n = len(raw) + 8
    buffer = (ctypes.c_int32 * n)()
    got = C.llama_tokenize(model.vocab, raw, len(raw), buffer, n, True, special)
    if got < 0:
        n = -got
        buffer = (ctypes.c_int32 * n)()
        got = C.llama_tokenize(model.vocab, raw, len(raw), buffer, n, True, special)
    if got < 0:
        raise BmoeError(f"llama.cpp cannot tokenize {len(raw)} bytes of text")
    return list(buffer[:got])


def piece(model: Model, token: int, *, special: bool = False) -> bytes:
    """The bytes of one token; may end inside a character."""
    with _piece_lock:
        n = _lib.llama_token_to_piece(model.vocab, token, _piece, len(_piece), 0, special)
        if n >= 0:
            return _piece.raw[:n]
    longer = ctypes.create_string_buffer(-n)
    n = _lib.llama_token_to_piece(model.vocab, token, longer, len(longer), 0, special)
    return longer.raw[: max(0, n)]


_piece = ctypes.create_string_buffer(256)
_piece_lock = threading.Lock()


def special_text(model: Model, name: str) -> str:
    """Text of the "bos" or "eos" token, "" where there is none."""
    token = int((C.llama_vocab_bos if name == "bos" else C.llama_vocab_eos)(model.vocab))
    return piece(model, token, special=True).decode("utf-8", "replace") if token >= 0 else ""


def bos_token(model: Model) -> int:
    """The id of BOS, negative where there is none."""
    return int(C.llama_vocab_bos(model.vocab))


def adds_bos(model: Model) -> bool:
    """True where tokenizing a prompt puts BOS first."""
    return bool(C.llama_vocab_get_add_bos(model.vocab))


def is_end(model: Model, token: int) -> bool:
    """True for a token that ends a generation."""
    return bool(C.llama_vocab_is_eog(model.vocab, token))


class SamplerChain:
    """llama.cpp's own sampler chain: top-k, top-p, temperature, then a draw with `seed`."""

    def __init__(self, temp: float, top_k: int, top_p: float, seed: int) -> None:
        self._chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        if top_k > 0:
            C.llama_sampler_chain_add(self._chain, C.llama_sampler_init_top_k(top_k))
        if top_p < 1.0:
            C.llama_sampler_chain_add(self._chain, C.llama_sampler_init_top_p(top_p, 1))
        C.llama_sampler_chain_add(self._chain, C.llama_sampler_init_temp(temp))
        C.llama_sampler_chain_add(self._chain, C.llama_sampler_init_dist(seed))

    def sample(self, context: Context) -> int:
        """Draws from the logits of the last decoded token and notes the choice."""
        return int(C.llama_sampler_sample(self._chain, context.handle, -1))

    def close(self) -> None:
        if self._chain is not None:
            C.llama_sampler_free(self._chain)
            self._chain = None
