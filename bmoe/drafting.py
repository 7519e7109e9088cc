"""Lookup drafters for use without an engine: `make(name, **settings)`; `DraftSpec` says what an engine drafts with."""

from __future__ import annotations

from .speculation.drafting import ALL_TYPES, TYPES, DraftSpec, MapConfig, ModConfig, NgramConfig, make

__all__ = ["ALL_TYPES", "TYPES", "DraftSpec", "MapConfig", "ModConfig", "NgramConfig", "make"]
