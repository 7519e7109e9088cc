"""The only place that knows llama.cpp, and the layout check that comes before it (docs/abi.md).

`library`: the pinned release, the bindings and what they leave out; `log`: why it gave up. `model`, `vocabulary`,
`context`, `sampler`: its objects. `head`: the context of a model's own heads. `_ggml`: ggml's binary interface.

Imports: nothing.
"""

from __future__ import annotations

from .context import ABORTED, BufferSizes, Context
from .head import HEADS, HeadContext, Rows, TargetRows
from .library import GgufInitParams, check, exit_on_abort, lib, type_name
from .log import captured_log, first_complaint
from .model import Model, load_model
from .sampler import SamplerChain
from .vocabulary import adds_bos, bos_token, is_end, piece, special_text, special_token, tokenize

__all__ = [
    "ABORTED",
    "HEADS",
    "BufferSizes",
    "Context",
    "GgufInitParams",
    "HeadContext",
    "Model",
    "Rows",
    "SamplerChain",
    "TargetRows",
    "adds_bos",
    "bos_token",
    "captured_log",
    "check",
    "exit_on_abort",
    "first_complaint",
    "is_end",
    "lib",
    "load_model",
    "piece",
    "special_text",
    "special_token",
    "tokenize",
    "type_name",
]
