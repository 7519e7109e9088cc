"""Lookup drafters for use without an engine: `make(name, **settings)`; `DraftSpec` says what an engine drafts with.

docs/drafting.md has the drafters, their settings and examples.
"""

from __future__ import annotations

from .speculation.drafters import DrafterStack, Source, llama_draft_model, make, make_drafter
from .speculation.settings import ALL_TYPES, TYPES, DraftSpec, MapConfig, ModConfig, NgramConfig

__all__ = [
    "ALL_TYPES",
    "TYPES",
    "DraftSpec",
    "DrafterStack",
    "MapConfig",
    "ModConfig",
    "NgramConfig",
    "Source",
    "llama_draft_model",
    "make",
    "make_drafter",
]
