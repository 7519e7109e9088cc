"""The compiled mechanism: reads, the expert cache and its admission policy, the graph hook, plan and kernel.

Its sources are in ext/bmoe/streamer, one module for each mechanism; `_admission`, `_dropping`, `_route_log` and
`_router` are used from C, by the streamer.

Imports: llama.
"""

from __future__ import annotations

from ._cache import ExpertCache
from ._reads import ALIGNMENT, IO_ROW, Lanes, window
from ._streamer import Streamer

__all__ = ["ALIGNMENT", "IO_ROW", "ExpertCache", "Lanes", "Streamer", "window"]
