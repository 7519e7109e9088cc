"""What a run shows of itself: records of tokens, traces of routes and reads, what bounds it.

`route_trace`, `io_trace`: written as `traces` of an engine; `record_format`: records as files have them; `diagnosis`:
what bounds a run. `telemetry` makes the records and is loaded only where they are asked for. What reads all this back
is `bmoe.analysis`.

Imports: accounting, experts, gguf, host, streamer.
"""

from __future__ import annotations

from .diagnosis import Diagnosis, Evidence, diagnose
from .io_trace import IoTracer
from .record_format import csv_head, csv_row, csv_summary, json_line
from .route_trace import RouteTracer
from .traces import Traces

__all__ = [
    "Diagnosis",
    "Evidence",
    "IoTracer",
    "RouteTracer",
    "Traces",
    "csv_head",
    "csv_row",
    "csv_summary",
    "diagnose",
    "json_line",
]
