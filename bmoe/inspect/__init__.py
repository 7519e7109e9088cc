"""What a model takes and how fast it will be here, before it is run: `python -m bmoe inspect` (docs/inspect.md).

`inspection`: facts of the header; `measurement`: bounded measurements; `hit_model`, `speed_model`: what follows from
them, pure; `forecast`: all together.

Imports: engine, experts, gguf, host, llama, speculation, streamer.
"""

from __future__ import annotations

from .inspection import Inspection, inspect_model

__all__ = ["Inspection", "inspect_model"]
