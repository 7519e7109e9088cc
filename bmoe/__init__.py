"""bmoe runs Mixture-of-Experts GGUF models larger than memory.

with bmoe.Engine.open("model.gguf", overlap=True) as engine:
    generation = engine.generate("Once upon a time", max_tokens=64)
    for token in generation:
        print(token.text, end="")
    print(generation.result.decode_tok_s)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accounting.counters import StreamCounters
    from .accounting.results import GenerationResult, Token
    from .accounting.token_record import TokenRecord
    from .engine.config import EngineConfig, Sampling
    from .engine.engine import Engine
    from .errors import AbiError, BmoeError, MemoryBudgetError, ModelError, ReadError, UsageError

    __version__: str

# Loaded when first asked for: a program that only wants `python -m bmoe --version`, or is interrupted while it
# starts, does not wait for llama.cpp's bindings.
_HOMES = {
    "engine.config": ("EngineConfig", "Sampling"),
    "engine.engine": ("Engine",),
    "errors": ("AbiError", "BmoeError", "MemoryBudgetError", "ModelError", "ReadError", "UsageError"),
    "accounting.counters": ("StreamCounters",),
    "accounting.results": ("GenerationResult", "Token"),
    "accounting.token_record": ("TokenRecord",),
    "version": ("__version__",),
}

__all__ = [
    "AbiError",
    "BmoeError",
    "Engine",
    "EngineConfig",
    "GenerationResult",
    "MemoryBudgetError",
    "ModelError",
    "ReadError",
    "Sampling",
    "StreamCounters",
    "Token",
    "TokenRecord",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f".{home}", __name__), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
