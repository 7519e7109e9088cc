"""The library's heart: an engine opens a model, a generation decodes with it, a scoring reads a text with it.

`engine`, `opening`, `cache_opening`, `planning`: a model opened, part by part, with the settings of `config`. `turn`,
`generation`, `scoring`, of a `request`: what is done with it. `sequence`, `graphs`, `target`, `choosing`: how a token
is decoded and chosen. `account`, `books`: what it costs. `text`, `stop_strings`, `chat`, `demo`: words.

Imports: accounting, experts, gguf, host, llama, observe, speculation, streamer.
"""

from __future__ import annotations

from .config import EngineConfig, Sampling
from .engine import Engine, Progress
from .generation import Drafting, Generation
from .request import Request
from .scoring import Scoring
from .sequence import TokenSequence
from .turn import Turn

__all__ = [
    "Drafting",
    "Engine",
    "EngineConfig",
    "Generation",
    "Progress",
    "Request",
    "Sampling",
    "Scoring",
    "TokenSequence",
    "Turn",
]
