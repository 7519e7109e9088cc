"""A model's vocabulary: text to tokens and back, BOS, and the tokens that end a generation."""

from __future__ import annotations

import ctypes
import threading

from ..errors import BmoeError
from . import library
from .model import Model


def tokenize(model: Model, text: str, *, special: bool = True) -> list[int]:
    """Token ids of `text`, with BOS where the model wants one; `special`: control tokens are recognised."""
    raw = text.encode("utf-8")
    n = len(raw) + 8
    buffer = (ctypes.c_int32 * n)()
    got = library.C.llama_tokenize(model.vocab, raw, len(raw), buffer, n, True, special)
    if got < 0:
        n = -got
        buffer = (ctypes.c_int32 * n)()
        got = library.C.llama_tokenize(model.vocab, raw, len(raw), buffer, n, True, special)
    if got < 0:
        raise BmoeError(f"llama.cpp cannot tokenize {len(raw)} bytes of text")
    return list(buffer[:got])


def piece(model: Model, token: int, *, special: bool = False) -> bytes:
    """The bytes of one token; may end inside a character."""
    with _piece_lock:
        n = library.lib().llama_token_to_piece(model.vocab, token, _piece, len(_piece), 0, special)
        if n >= 0:
            return _piece.raw[:n]
    longer = ctypes.create_string_buffer(-n)
    n = library.lib().llama_token_to_piece(model.vocab, token, longer, len(longer), 0, special)
    return longer.raw[: max(0, n)]


_piece = ctypes.create_string_buffer(256)
_piece_lock = threading.Lock()


def special_text(model: Model, name: str) -> str:
    """Text of the "bos" or "eos" token, "" where there is none."""
    token = int((library.C.llama_vocab_bos if name == "bos" else library.C.llama_vocab_eos)(model.vocab))
    return piece(model, token, special=True).decode("utf-8", "replace") if token >= 0 else ""


def special_token(model: Model, text: str) -> int | None:
    """The id of the special token that is written `text`, as "<|im_end|>", and has no text of its own; else None."""
    raw = text.encode("utf-8", "replace")
    ids = (ctypes.c_int32 * 2)()
    if library.C.llama_tokenize(model.vocab, raw, len(raw), ids, len(ids), False, True) != 1:
        return None
    token = int(ids[0])
    return token if not piece(model, token) and piece(model, token, special=True) == raw else None


def bos_token(model: Model) -> int:
    """The id of BOS, negative where there is none."""
    return int(library.C.llama_vocab_bos(model.vocab))


def adds_bos(model: Model) -> bool:
    """True where tokenizing a prompt puts BOS first."""
    return bool(library.C.llama_vocab_get_add_bos(model.vocab))


def is_end(model: Model, token: int) -> bool:
    """True for a token that ends a generation."""
    return bool(library.C.llama_vocab_is_eog(model.vocab, token))
