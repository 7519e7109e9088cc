"""The policy around the streamer: the budget, its slots, where weights lie, warm starts.

`budget`: how much memory experts get; `slots`: how it is cut; `pool`: that memory; `weights`: where all tensors lie;
`warm_start`: what is read ahead of the first token.

Imports: gguf, host, llama, streamer.
"""

from __future__ import annotations

from .budget import CacheDecision, CacheRequest, ModelSizes, advice, decide, parse_cache_mb
from .pool import SlotPool
from .slots import SlotPlan, plan_slots, share_out
from .warm_start import Preloader, StateError
from .weights import DENSE_MODES, DenseMode, Weights

__all__ = [
    "DENSE_MODES",
    "CacheDecision",
    "CacheRequest",
    "DenseMode",
    "ModelSizes",
    "Preloader",
    "SlotPlan",
    "SlotPool",
    "StateError",
    "Weights",
    "advice",
    "decide",
    "parse_cache_mb",
    "plan_slots",
    "share_out",
]
