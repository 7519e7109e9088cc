"""Tiny random-weight GGUF models, one per architecture that the tests and the gates need.

Every file is complete: stock llama.cpp loads it, tokenizes text with it and decodes it.
"""

from .scripted import scripted_routes
from .vocabulary import SPECIALS, prompt_ids, vocabulary
from .write import ARCHES, QUANTS, write_tiny, write_tiny_mtp

__all__ = [
    "ARCHES",
    "QUANTS",
    "SPECIALS",
    "prompt_ids",
    "scripted_routes",
    "vocabulary",
    "write_tiny",
    "write_tiny_mtp",
]
