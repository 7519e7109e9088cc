"""bmoe runs Mixture-of-Experts GGUF models larger than memory.

with bmoe.Engine.open("model.gguf", overlap=True) as engine:
    generation = engine.generate("Once upon a time", max_tokens=64)
    for token in generation:
        print(token.text, end="")
    print(generation.result.decode_tok_s)
"""

from __future__ import annotations

from importlib import metadata

try:
    __version__ = metadata.version("bmoe")
except metadata.PackageNotFoundError:  # a source tree that was built in place
    __version__ = "0+unknown"

from .config import EngineConfig, Sampling
from .engine import Engine
from .errors import AbiError, BmoeError, MemoryBudgetError, ModelError, ReadError, UsageError
from .metrics import GenerationResult, StreamCounters, Token

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
    "UsageError",
    "__version__",
]
