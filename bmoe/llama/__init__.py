"""The only place that knows llama.cpp: its bindings, models, contexts, samplers, and the layout check (docs/abi.md).

Imports: nothing.
"""

from __future__ import annotations

from .head import HEADS, HeadContext, Rows, TargetRows
from .library import (
    ABORTED,
    BufferSizes,
    Context,
    GgufInitParams,
    Model,
    SamplerChain,
    adds_bos,
    bos_token,
    captured_log,
    check,
    exit_on_abort,
    first_complaint,
    is_end,
    lib,
    load_model,
    piece,
    special_text,
    tokenize,
    type_name,
)

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
    "tokenize",
    "type_name",
]
