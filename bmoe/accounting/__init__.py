"""What things cost: counters, time, bytes by cause, and the records and results made of these. Pure.

`counters`: the stream's running totals; `timing`: where a token's time went; `bytes_by_cause`: what was read for what;
`token_cost`: all of these at one token; `token_record`: the row of a token; `results`: tokens and whole generations.

Imports: host.
"""

from __future__ import annotations

from .bytes_by_cause import CAUSES, FlashSplit
from .counters import StreamCounters
from .results import GenerationResult, SpecResult, Token
from .timing import DRAFT, GRAPH, LOOP, NO_TIME, OUTPUT, Clock, TimeSplit
from .token_cost import Cost, TokenCosts
from .token_record import COLUMNS, TIME_COLUMNS, TokenRecord

__all__ = [
    "CAUSES",
    "COLUMNS",
    "DRAFT",
    "GRAPH",
    "LOOP",
    "NO_TIME",
    "OUTPUT",
    "TIME_COLUMNS",
    "Clock",
    "Cost",
    "FlashSplit",
    "GenerationResult",
    "SpecResult",
    "StreamCounters",
    "TimeSplit",
    "Token",
    "TokenCosts",
    "TokenRecord",
]
