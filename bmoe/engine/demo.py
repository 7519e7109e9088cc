"""The bundled demo model and what the engine does with it when nothing else is asked."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from .config import Sampling

MODEL = "bmoe-demo-26m-a5m-q8_0.gguf"
PROMPT = '''import os
import sys


def read_config(path, encoding="utf-8"):
    """Read a configuration file and return a dictionary.
'''
SAMPLING = Sampling(temp=0.9, top_k=40, top_p=0.9, seed=7)


def model_path() -> Path:
    """Path of the bundled GGUF (a real file: the package is never run from a zip)."""
    return Path(str(resources.files("bmoe").joinpath("data").joinpath(MODEL)))
