"""Generations in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bmoe


def generate(engine: bmoe.Engine, prompt: Sequence[int], n: int = 24, **settings: Any) -> bmoe.GenerationResult:
    """The result of `n` tokens, whatever they are."""
    generation = engine.generate(list(prompt), max_tokens=n, stop_at_end=False, **settings)
    for _ in generation:
        pass
    return generation.result


def ids(engine: bmoe.Engine, prompt: Sequence[int], n: int = 8, **settings: Any) -> list[int]:
    """The ids of `n` tokens, as the generation gives them one by one."""
    return [t.id for t in engine.generate(list(prompt), max_tokens=n, stop_at_end=False, **settings)]
